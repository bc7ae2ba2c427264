"""All that touches vLLM's internals, pinned to one minor version.

Importing vLLM costs seconds and hundreds of megabytes, so the gateway does not: what it needs from
here (`environment`, `progress`, and `parsers` for the Hermes format) does without. Only another
tool call parser, or a reasoning parser, brings vLLM into the gateway's process.
"""
