"""openPMD in HDF5: each descriptor, or each energy, is an array of its own on the grid, numbered from 0."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from isoscale.data.columns import Array, Column, Rows
from isoscale.data.formats.opening import dataset_names, format_of, open_column
from isoscale.data.formats.views import read_cut
from isoscale.errors import UserError


def components(file: str, group: str = "") -> list[str]:
    """The numbered arrays of a group, or of a file that holds nothing else; none where it is not laid out so."""
    path = Path(file)
    if not path.is_file() or format_of(path) != "hdf5":
        return []
    names = [name for name in dataset_names(path) or [] if name.startswith(f"{group}/" if group else "")]
    groups = {name.rpartition("/")[0] for name in names}
    numbered = {int(last): name for name in names if (last := name.rpartition("/")[2]).isdigit()}
    if len(groups) != 1 or sorted(numbered) != list(range(len(names))):
        return []
    return [numbered[number] for number in range(len(names))]


class Components:
    """The rows of numbered arrays: a number of each."""

    def __init__(self, file: str, names: Sequence[str], columns: str | list[int] | None = None) -> None:
        """Some of the arrays, or all of them; they must be on the same grid."""
        self.name = f"{file} ({names[0].rpartition('/')[0]})"
        cut = slice(None) if columns is None else read_cut(columns, len(names), f"columns of {self.name}")
        chosen = [names[number] for number in np.arange(len(names))[cut]]
        self._parts: list[Column] = [open_column({"path": file, "dataset": name, "sample_dims": 0}) for name in chosen]
        first = self._parts[0]
        for part in self._parts:
            if (part.num_rows, part.dtype) != (first.num_rows, first.dtype):
                raise UserError(f"{part.name} has {part.num_rows:,} {part.dtype}, but {first.name} {first.num_rows:,} "
                                f"{first.dtype}: all arrays of a snapshot must be alike")  # fmt: skip
        self.num_rows, self.dtype = first.num_rows, first.dtype
        self.row_shape: tuple[int, ...] = (len(self._parts),)

    def take(self, rows: Rows) -> Array:
        """The rows asked for, each array asked once."""
        found = np.empty((len(rows), len(self._parts)), self.dtype)
        for number, part in enumerate(self._parts):
            found[:, number] = part.take(rows)
        return found
