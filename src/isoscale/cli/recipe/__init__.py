"""Commands about recipes."""
