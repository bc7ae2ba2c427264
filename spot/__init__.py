"""Where a generation runs, and where it runs next: pipelines, routing, migration, engines."""
