"""What several ranks say, and where each of them is."""
