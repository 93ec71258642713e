"""Networks from graphs to features of atoms."""
