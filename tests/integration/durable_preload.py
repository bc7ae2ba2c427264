"""Imported once, before servers are forked off: what takes long."""

from tests.harness import demo_tokenizer

demo_tokenizer()
