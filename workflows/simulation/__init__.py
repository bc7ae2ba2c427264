"""The workflow scheduler on simulated resources, in virtual time."""
