"""All that touches vLLM's internals, pinned to one minor version.

Nothing here is imported by the gateway unless a tool or reasoning parser was asked for: importing
vLLM costs about six seconds and 600 MB.
"""
