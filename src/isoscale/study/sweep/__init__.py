"""One recipe with many settings: the points, how they stand, and the ways to train them."""
