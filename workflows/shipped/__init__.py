"""The workflow templates that ship, a YAML file each; see `workflows.library`."""
