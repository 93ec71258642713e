"""The life of a run: opened, trained, written down, read and used."""
