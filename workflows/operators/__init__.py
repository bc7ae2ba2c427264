"""The kinds of work that nodes do."""
