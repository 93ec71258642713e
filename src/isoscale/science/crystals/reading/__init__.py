"""Structures in files: readers, units and what is said of them."""
