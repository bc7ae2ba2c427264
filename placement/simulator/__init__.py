"""A pipeline simulated step by step: what runs together, how long it takes, when tokens come.

The same parts, driven by an event loop, are the fleet's simulated engine
(`spot.engines.simulated`)."""
