"""Parameter files of other programs, as recipes."""
