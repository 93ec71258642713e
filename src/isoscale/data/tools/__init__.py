"""Tools for data files: convert, shuffle, describe, download."""
