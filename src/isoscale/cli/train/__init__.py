"""Commands that train, and use what was trained."""
