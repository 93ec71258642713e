"""Which ranks are alive, how they find each other, and what stands between them."""
