"""How much faster training gets on more ranks: what was asked and measured, the table and the ways to measure."""
