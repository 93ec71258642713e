"""The frame, the architectures and the weights of the reference numbers, from formulas alone."""

import zlib
from dataclasses import dataclass, field

import numpy as np

TYPES = ["A", "B", "C"]
CUTOFF, SMOOTH = 4.0, 0.5


@dataclass(frozen=True)
class Case:
    """One architecture."""

    sel: list[int] = field(default_factory=lambda: [24, 26, 22])
    widths: list[int] = field(default_factory=lambda: [8, 16, 16])
    axis_width: int = 4
    dt: bool = False
    one_side: bool = True
    fitting_widths: list[int] = field(default_factory=lambda: [12, 12, 12])
    fitting_dt: bool = True


CASES = {
    "plain": Case(),
    "pairs": Case(one_side=False),
    "dt": Case(dt=True),
    "pairs_dt": Case(one_side=False, dt=True),
    "no_fitting_dt": Case(fitting_dt=False),
    "uneven_widths": Case(widths=[6, 10, 13], dt=True, fitting_widths=[9, 14]),
    "doubled_widths": Case(widths=[2, 4, 8], dt=True, fitting_widths=[32, 64, 64, 7]),
    "doubled_features": Case(widths=[1, 2, 2], axis_width=2, dt=True, fitting_widths=[8, 8]),
    "small_sel": Case(sel=[9, 10, 12]),
}


def frame() -> dict[str, np.ndarray]:
    """A random frame of 20 atoms, in a box with no right angle that is smaller than twice the cutoff."""
    random = np.random.RandomState(7)
    box = np.array([[5.6, 0.0, 0.0], [1.1, 5.9, 0.0], [-0.7, 0.9, 6.2]])
    grid = np.array([(a, b, c) for a in range(3) for b in range(3) for c in range(3)])[random.permutation(27)[:20]]
    coord = ((grid + 0.5) / 3) @ box + random.uniform(-0.45, 0.45, (20, 3))
    return {"coord": coord, "box": box, "types": random.permutation([0] * 6 + [1] * 9 + [2] * 5)}


LEARNED = ["plain", "pairs_dt"]
"""Cases that are also trained, for a few steps."""
NUM_STEPS, RATE = 5, 1e-3
WEIGHTS = {"energy": 0.5, "force": 10.0, "virial": 0.3, "atom_energy": 0.7}
"""Of the terms of the loss."""


def labels() -> dict[str, np.ndarray]:
    """What the frame is said to have."""
    shapes = {"energy": (), "force": (20, 3), "virial": (3, 3), "atom_energy": (20,)}
    return {name: filled(name, shape) for name, shape in shapes.items()}


def filled(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The values of a parameter: a wave that begins where its name says."""
    phase = zlib.crc32(name.encode()) % 1000 / 100
    values = 0.4 * np.sin(0.7 * np.arange(np.prod(shape, dtype=int)) + phase)
    return (values + 0.5 if name.endswith("dt") else values).reshape(shape)


def statistics() -> tuple[list[float], list[list[float]], list[float]]:
    """Mean and scale of neighbours by the centre's type, and the energy bias."""
    return [0.05, 0.06, 0.04], [[0.14, 0.09], [0.12, 0.08], [0.15, 0.1]], [-1.5, -0.25, 2.0]
