"""Commands that look at runs."""
