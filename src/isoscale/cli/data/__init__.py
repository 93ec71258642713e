"""Commands that fetch, describe, convert and shuffle data."""
