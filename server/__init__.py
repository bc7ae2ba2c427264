"""HTTP in, tokens out: settings, command line, endpoints. Builds and joins all parts."""
