"""Neighbour lists with a skin: longer than the cutoff, so that one serves for many steps of a simulation."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from isoscale.errors import UserError
from isoscale.science.atoms.neighbours import load_vesin

if TYPE_CHECKING:
    from ase import Atoms

List = TypeVar("List")


class Neighbours(Generic[List]):
    """A list of neighbours that is longer than the cutoff, and made anew only when atoms have moved that far."""

    def __init__(self, search: "Callable[[Atoms], List]", skin: float) -> None:
        """`search` finds all pairs up to the cutoff and `skin` Å more."""
        self._search, self._skin = search, skin
        self._at: Atoms | None = None
        self._found: List | None = None
        self.num_lists = 0
        """That have been made."""

    def of(self, atoms: "Atoms") -> List:
        """What `search` has found for these atoms, or for the same ones not far from here."""
        if self._found is None or not self._serves(atoms):
            self._found, self._at = self._search(atoms), atoms.copy()
            self.num_lists += 1
        return self._found

    def _serves(self, atoms: "Atoms") -> bool:
        """Whether no pair can have come within the cutoff unseen."""
        at = self._at
        if at is None or len(at) != len(atoms) or (at.pbc != atoms.pbc).any() or (at.cell != atoms.cell).any():
            return False
        moved = atoms.positions - at.positions
        return bool(np.einsum("ij,ij->i", moved, moved).max(initial=0.0) <= (self._skin / 2) ** 2)


def list_pairs(atoms: "Atoms", reach: float) -> list[Tensor]:
    """Firsts (pairs), seconds (pairs) and shifts (pairs, 3) of all pairs up to `reach` Å, both ways."""
    if (atoms.pbc & ~np.array(atoms.cell).any(1)).any():
        raise UserError("the atoms are periodic where they have no cell: set atoms.cell, or atoms.pbc = False")
    search = load_vesin().NeighborList(cutoff=reach, full_list=True, n_threads=torch.get_num_threads())
    found = search.compute(points=atoms.positions, box=np.array(atoms.cell), periodic=list(atoms.pbc), quantities="ijS")
    return [torch.from_numpy(array.astype(np.int64)) for array in found]
