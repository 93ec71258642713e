"""YAML and JSON with the origin of every value."""
