"""What all sciences of atoms share: neighbours, the folder where they are kept, and calculators of ASE."""
