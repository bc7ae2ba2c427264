"""Engines: what turns token ids into token ids. One Protocol, several implementations."""
