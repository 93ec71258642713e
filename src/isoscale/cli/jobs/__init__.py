"""Commands that submit jobs, and show, follow and end them."""
