"""LightningModules, their loaders and their hooks, by duck typing."""

from isoscale.system.moved import moved_into

__getattr__ = moved_into("isoscale.engine.lightning", "isoscale.engine.lightning.module")
