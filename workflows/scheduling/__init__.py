"""Which ready node runs next, on what, with whom: pure decisions, events in and commands out."""
