"""Load from outside: Locust users and trace replay."""
