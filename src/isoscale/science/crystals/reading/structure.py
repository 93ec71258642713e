"""One structure: atoms, cell, and what is known of it."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Targets = dict[str, NDArray[np.float64] | NDArray[np.int64]]

PER_ATOM = frozenset({"forces"})
"""Targets that are always one row per atom."""
PER_STRUCTURE = frozenset({"energy", "stress"})
"""Targets that are never."""


@dataclass(frozen=True)
class Structure:
    """Atoms of one structure, with targets by ASE's names and in its units.

    `energy` is the total in eV, `forces` (n, 3) are in eV/Å, `stress` (3, 3) in eV/Å³ and positive where the energy
    rises with strain. Other targets keep their own name and unit.
    """

    numbers: NDArray[np.int64]  # (n,), atomic numbers
    positions: NDArray[np.float64]  # (n, 3), Å
    cell: NDArray[np.float64]  # (3, 3), a row per vector; zeros where nothing is periodic
    pbc: NDArray[np.bool_]  # (3,)
    targets: Targets = field(default_factory=dict)
    place: str = ""
    """The file and the frame in it, for people."""
    name: str = ""
    """What the structure belongs to: a system, a kind of configuration; errors are listed by it."""
    per_atom: frozenset[str] | None = None
    """Targets that have a row per atom; None judges by their shapes."""

    def __len__(self) -> int:
        """Number of atoms."""
        return len(self.numbers)

    def is_per_atom(self, target: str) -> bool:
        """Whether a target has a row per atom."""
        if target in PER_ATOM or target in PER_STRUCTURE:
            return target in PER_ATOM
        if self.per_atom is not None:
            return target in self.per_atom
        shape = np.shape(self.targets[target])
        return bool(shape) and shape[0] == len(self)
