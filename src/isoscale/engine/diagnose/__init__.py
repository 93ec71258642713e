"""Why a training broke down, and where its time and memory go."""

from isoscale.system.moved import moved_into

__getattr__ = moved_into("isoscale.engine.diagnose", "isoscale.engine.diagnose.nan")
