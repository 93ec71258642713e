"""Commands that run many trainings: sweeps and scaling studies."""
