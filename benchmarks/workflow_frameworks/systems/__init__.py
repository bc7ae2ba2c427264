"""The systems that are compared. This package runs in the frameworks' own environment."""
