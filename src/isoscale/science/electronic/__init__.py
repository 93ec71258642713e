"""Electronic structure: learning the local density of states, and the physics that follows from it."""

from isoscale.science.electronic.ldos import Ldos
from isoscale.science.electronic.snapshots import Snapshots

__all__ = ["Ldos", "Snapshots"]
