"""Optimizers, learning rate schedules and the moving average of the weights."""
