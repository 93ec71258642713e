"""How jobs get into the queue of a cluster: a base class, and a module for each scheduler."""
