"""HTTP in, tokens out: settings, command line, endpoints. The one place that builds and joins the parts."""
