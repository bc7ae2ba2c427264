"""What the server costs and where its ceiling is: see docs/benchmarks.md for the commands."""
