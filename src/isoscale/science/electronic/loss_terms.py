"""Terms of the loss for what follows from all points of a snapshot together: its band energy, its density of states.

To first order, an error of the local density of states changes the band energy by a mean over all points of weighted
sums over energies. The mean over the few points of a snapshot that a step sees estimates it; its square is the term.
These means are taken in groups of consecutive points of a batch, so that the loss is the same on any number of ranks
and with any `train.accumulate` where each part of a batch is a whole number of groups; in `tree`, whose shards belong
to the recipe, always.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isoscale.data.columns import BLOCK_BYTES, row_bytes
from isoscale.data.sources import Source, Subset
from isoscale.engine.dataset_metrics import stored
from isoscale.errors import UserError
from isoscale.science.electronic.calculation import Calculation
from isoscale.science.electronic.integrals import EnergyGrid, Quadrature
from isoscale.science.electronic.physics import check_calculations
from isoscale.science.electronic.snapshot_source import SnapshotSource
from isoscale.science.electronic.states import fill_with

TERMS = ("band_energy", "dos")


class LossTerms:
    """The terms of a batch, each in the units of the squared error of the values that the network is trained on."""

    def __init__(self, sensitivities: Mapping[str, Tensor], slope: Tensor, group: int, device: torch.device) -> None:
        """`sensitivities` are (snapshots, energies), `slope` is that of stored by trained values (energies,)."""
        self._group = group
        self._weights = {name: _of_unit_size(values * slope).to(device) for name, values in sensitivities.items()}
        num_snapshots = len(next(iter(sensitivities.values())))
        self._all = torch.arange(num_snapshots, device=device)

    def __call__(self, error: Tensor, snapshots: Tensor) -> dict[str, Tensor]:
        """The terms, from errors (points, energies) and the numbers of the snapshots (points,)."""
        which = self._grouped((snapshots[:, None] == self._all).double())  # (groups, points, snapshots)
        counts = which.sum(1)[..., None].clamp(min=1)
        found = {}
        for name, weights in self._weights.items():
            change = error.double() * weights[snapshots]
            if name == "band_energy":
                change = change.sum(1, keepdim=True) / math.sqrt(error.shape[1])  # the loss is a mean over energies
            sums = which.mT @ self._grouped(change)  # (groups, snapshots, energies or 1)
            found[name] = ((sums.square() / counts).sum() / len(error)).to(error.dtype)
        return found

    def _grouped(self, rows: Tensor) -> Tensor:
        """(groups, points of a group, …), the last group filled up with zeros."""
        missing = -len(rows) % min(self._group, len(rows))
        return nn.functional.pad(rows, (0, 0, 0, missing)).view(-1, min(self._group, len(rows)), rows.shape[1])


def _of_unit_size(weights: Tensor) -> Tensor:
    """Divided by their size over all snapshots, so that a term of weight 1 counts like the squared error of a point."""
    return weights / weights.square().sum(1).mean().sqrt()


def make_terms(
    names: Sequence[str], group: int, source: Source, grid: EnergyGrid, task: nn.Module, transforms: Sequence[Any]
) -> LossTerms:
    """The terms for training data of which all targets are read once, on the device of the task."""
    known = sensitivities(whole(source), grid)
    ends = [stored(task, transforms, torch.full((1, grid.size), end, dtype=torch.float64)) for end in (0.0, 1.0)]
    device = next(task.parameters()).device
    return LossTerms({name: known[name] for name in names}, (ends[1] - ends[0])[0], group, device)


def check_training(source: Source, names: Sequence[str]) -> None:
    """Refuse training data from which a term cannot be computed."""
    snapshots = whole(source)
    check_calculations(snapshots, names)
    if "snapshot" not in snapshots.columns:
        raise UserError("task.physics.loss must know which snapshot a point belongs to: set data.numbered=true")


def whole(source: Source) -> SnapshotSource:
    """The snapshots of which training data may be a part."""
    while isinstance(source, Subset):
        source = source.source
    if not isinstance(source, SnapshotSource):
        raise UserError("task.physics.loss needs training data of the class snapshots")
    return source


def sensitivities(source: SnapshotSource, grid: EnergyGrid) -> dict[str, Tensor]:
    """What an error of 1 at every point changes, per atom: the band energy and the density of states.

    (snapshots, energies) in float64; the Fermi level moves along.
    """
    known = _calculations(source)
    sizes = torch.tensor([each.volume for each in known], dtype=torch.float64)[:, None]
    atoms = torch.tensor([each.num_atoms for each in known], dtype=torch.float64)[:, None]
    dos = (torch.stack(list(_means(source))) * sizes).requires_grad_()
    electrons = torch.tensor([each.num_electrons for each in known], dtype=torch.float64)
    with torch.enable_grad():
        filling = fill_with(dos, electrons, Quadrature(grid, [each.temperature for each in known]))
        (slopes,) = torch.autograd.grad(filling.band_energy.sum(), dos)
    for snapshot, fermi in zip(source.snapshots, filling.fermi.tolist(), strict=True):
        if math.isnan(fermi):
            raise UserError(
                f"task.physics.loss: the states of {snapshot.name} have no Fermi level on the energy grid, which does "
                "not hold all its electrons: is task.energies right?"
            )
    return {"band_energy": slopes * sizes / atoms, "dos": (sizes / atoms).expand_as(slopes)}


def _calculations(source: SnapshotSource) -> list[Calculation]:
    found = [each.calculation for each in source.snapshots]
    assert all(each is not None for each in found)  # check_training has seen to it
    return [each for each in found if each is not None]


def _means(source: SnapshotSource) -> Iterator[Tensor]:
    """The mean local density of states of every snapshot, read in blocks of its targets."""
    column, start = source.columns["target"], 0
    size = max(1, BLOCK_BYTES // row_bytes(column))
    for end in source.ends.tolist():
        blocks = (column.take(np.arange(first, min(end, first + size))) for first in range(start, end, size))
        total = sum(block.sum(0, dtype=np.float64) for block in blocks)
        yield torch.as_tensor(total / (end - start))
        start = end
