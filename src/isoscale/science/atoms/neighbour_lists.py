"""Neighbour lists with a skin: longer than the cutoff, so that one serves for many steps of a simulation."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from isoscale.errors import UserError
from isoscale.science.atoms.neighbours import load_vesin

if TYPE_CHECKING:
    from ase import Atoms


class Neighbours:
    """Lists of neighbours that are longer than the cutoff, and made anew only when atoms have moved that far."""

    def __init__(self, cutoff: float, skin: float) -> None:
        """All pairs up to `cutoff` + `skin`."""
        self._reach, self._skin = cutoff + skin, skin
        self._at: Atoms | None = None
        self._pairs: list[Tensor] = []
        self.num_lists = 0
        """That have been made."""

    def of(self, atoms: "Atoms") -> list[Tensor]:
        """Firsts (pairs), seconds (pairs) and shifts (pairs, 3)."""
        if not self._serves(atoms):
            self._pairs, self._at = list_neighbours(atoms, self._reach), atoms.copy()
            self.num_lists += 1
        return self._pairs

    def _serves(self, atoms: "Atoms") -> bool:
        """Whether no pair can have come within the cutoff unseen."""
        at = self._at
        if at is None or len(at) != len(atoms) or (at.pbc != atoms.pbc).any() or (at.cell != atoms.cell).any():
            return False
        moved = atoms.positions - at.positions
        return bool(np.einsum("ij,ij->i", moved, moved).max(initial=0.0) <= (self._skin / 2) ** 2)


def list_neighbours(atoms: "Atoms", reach: float) -> list[Tensor]:
    """Firsts (pairs), seconds (pairs) and shifts (pairs, 3) of all pairs up to `reach` Å, both ways."""
    if (atoms.pbc & ~np.array(atoms.cell).any(1)).any():
        raise UserError("the atoms are periodic where they have no cell: set atoms.cell, or atoms.pbc = False")
    search = load_vesin().NeighborList(cutoff=reach, full_list=True, n_threads=torch.get_num_threads())
    found = search.compute(points=atoms.positions, box=np.array(atoms.cell), periodic=list(atoms.pbc), quantities="ijS")
    return [torch.from_numpy(array.astype(np.int64)) for array in found]
