"""The points of snapshots as samples, and what is known of each snapshot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isoscale.data.columns import Array, Column, Rows
from isoscale.data.sources import ColumnSource
from isoscale.errors import UserError
from isoscale.science.electronic.calculation import Calculation


@dataclass(frozen=True)
class Snapshot:
    """One configuration of atoms."""

    name: str
    input: Path
    target: Path | None
    """None where only predictions are wanted."""
    num_rows: int
    grid: tuple[int, ...]
    """Points in each direction, or all in a row where no file tells."""
    known: Calculation | None = None
    """What a file beside it tells."""
    obstacle: str = ""
    """Why its points are not all points of one configuration."""

    @property
    def calculation(self) -> Calculation | None:
        """The calculation of all its points together, None where no file tells about it; or why there cannot be one."""
        if self.obstacle:
            raise UserError(self.obstacle)
        return self.known


class SnapshotSource(ColumnSource):
    """The points of some snapshots, one after the other."""

    rows_at_once = 8192
    """In an evaluation: for so little data a point, more than a batch of a training."""

    def __init__(self, columns: Mapping[str, Column], snapshots: Sequence[Snapshot]) -> None:
        """Columns `input` and `target` of all snapshots together."""
        super().__init__(columns)
        self.snapshots = list(snapshots)
        self.ends = torch.cumsum(torch.tensor([snapshot.num_rows for snapshot in snapshots]), 0)

    def snapshot_of(self, samples: Tensor) -> Tensor:
        """The number of the snapshot that each sample belongs to."""
        return torch.bucketize(samples, self.ends.to(samples.device), right=True)

    def number(self) -> None:
        """Give every sample the number of its snapshot, as `snapshot`."""
        self.columns["snapshot"] = _Numbers(self)

    def parts(self) -> dict[str, dict[str, float]]:
        """Each snapshot in numbers, by their units."""
        return {snapshot.name: _numbers(snapshot) for snapshot in self.snapshots}


class _Numbers:
    """Of every point, the number of its snapshot."""

    row_shape: tuple[int, ...] = ()
    dtype = np.dtype(np.int64)

    def __init__(self, source: SnapshotSource) -> None:
        self.name, self.num_rows, self._source = "the number of the snapshot", len(source), source

    def take(self, rows: Rows) -> Array:
        return self._source.snapshot_of(torch.from_numpy(rows)).numpy()


def _numbers(snapshot: Snapshot) -> dict[str, float]:
    known = snapshot.known
    if known is None:
        return {"points": snapshot.num_rows}
    return {
        "points": snapshot.num_rows, "atoms": known.num_atoms, "electrons": known.num_electrons,
        "K": known.temperature, "Å³": known.volume,
    }  # fmt: skip
