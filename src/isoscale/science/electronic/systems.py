"""Snapshots as systems of electrons: what is known of all of them together, and their states filled."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from isoscale.science.electronic.calculation import Calculation
from isoscale.science.electronic.integrals import EnergyGrid, Quadrature
from isoscale.science.electronic.snapshot_source import Snapshot
from isoscale.science.electronic.states import Filling, fill, fill_with

MOST_NAMED = 3
"""Snapshots in one note."""


def calculation_of(snapshot: Snapshot) -> Calculation | None:
    """The calculation of all points of a snapshot together; None where it is not known or there is none."""
    return None if snapshot.obstacle else snapshot.known


class Systems:
    """Those snapshots whose calculation is known: a value of each, (systems,), in float64 on the device."""

    def __init__(self, snapshots: Sequence[Snapshot], grid: EnergyGrid, device: torch.device) -> None:
        """At least one of the snapshots has a calculation."""
        calculations = {number: calculation_of(snapshot) for number, snapshot in enumerate(snapshots)}
        self.numbers = [number for number, calculation in calculations.items() if calculation is not None]
        """Of the snapshots."""
        self.names = [snapshots[number].name for number in self.numbers]
        self.grid, self._device = grid, device
        rows = [snapshots[number].num_rows for number in self.numbers]
        known = [calculation for calculation in calculations.values() if calculation is not None]
        self.num_atoms = self.column(each.num_atoms for each in known)
        self.num_electrons = self.column(each.num_electrons for each in known)
        self.voxels = self.column(each.volume / count for each, count in zip(known, rows, strict=True))
        """The volume of one point, in Å³."""
        self.quadrature = Quadrature(grid, [each.temperature for each in known], device)

    def column(self, values: Iterable[float]) -> Tensor:
        """Numbers on the device."""
        return torch.tensor(list(values), dtype=torch.float64, device=self._device)

    def filled(self, sums: Tensor) -> Filling:
        """States filled with all electrons, from sums of the local ones over the points of a snapshot."""
        return fill_with(sums * self.voxels[:, None], self.num_electrons, self.quadrature)

    def held(self, filling: Filling, number: int) -> tuple[float, float]:
        """How many electrons the states of a system hold, up to the lowest and up to the highest energy of the grid."""
        edges = self.grid.energies(self._device)[[0, -1]]
        counts = [fill(filling.dos, edge.expand(len(self.numbers)), self.quadrature).num_electrons for edge in edges]
        return counts[0][number].item(), counts[1][number].item()

    def unfilled(self, filling: Filling, whose: str, among: Tensor) -> str | None:
        """In words, which of the systems `among` have no Fermi level on the energy grid; None if all have one."""
        found = (filling.fermi.isnan() & among).nonzero().flatten().tolist()
        words = [self._count(filling, number) for number in found[:MOST_NAMED]]
        more = [f"{len(found) - MOST_NAMED} more snapshots"] if len(found) > MOST_NAMED else []
        if not found:
            return None
        low, *_, high = self.grid.energies().tolist()
        return (
            f"the {whose} states have no Fermi level between {low:g} and {high:g} eV, the ends of task.energies: "
            + "; ".join(words + more)
        )

    def _count(self, filling: Filling, number: int) -> str:
        low, high = self.held(filling, number)
        return (
            f"{self.names[number]} has {self.num_electrons[number].item():g} electrons, and they hold "
            f"{low:.4g} to {high:.4g}"
        )
