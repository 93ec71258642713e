"""DeePMD-kit: its input files as recipes, and its checkpoints as models."""
