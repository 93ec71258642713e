"""Losses and metrics: sums with weights, accumulators on the device, and the windows in which they are read."""

from isoscale.system.moved import moved_into

__getattr__ = moved_into("isoscale.engine.metrics", "isoscale.engine.metrics.torchmetrics")
