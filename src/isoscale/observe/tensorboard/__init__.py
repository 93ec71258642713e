"""A run in TensorBoard: what is written, and the server that shows it."""

from isoscale.system.moved import moved_into

__getattr__ = moved_into("isoscale.observe.tensorboard", "isoscale.observe.tensorboard.observer")
