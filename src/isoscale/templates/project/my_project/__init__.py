"""How far a ball flies that is thrown through air."""
