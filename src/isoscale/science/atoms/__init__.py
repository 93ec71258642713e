"""What sciences of atoms share: lists of neighbours, and calculators of ASE."""
