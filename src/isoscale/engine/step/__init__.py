"""One training step, and the programs that run it: eager, compiled, captured."""

from isoscale.system.moved import moved_into

__getattr__ = moved_into("isoscale.engine.step", "isoscale.engine.step.step")
