"""MALA: its parameter files as recipes."""
