"""What a checkpoint holds, and how it is written and read."""

from isoscale.system.moved import moved_into

__getattr__ = moved_into("isoscale.engine.state", "isoscale.engine.state.registry")
