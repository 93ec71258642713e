"""What all sciences of atoms share: neighbours, and the folder where what was found of them is kept."""
