"""Zarr, versions 2 and 3: arrays by name in a folder of chunks."""

from pathlib import Path
from typing import Any

import numpy as np

from isoscale.data.columns import Array, Column, Rows
from isoscale.data.formats.checks import check_numbers, split_shape
from isoscale.data.formats.extras import library
from isoscale.data.formats.views import Flattened
from isoscale.errors import UserError

ONLY = "array"
"""The name of an array that is no member of a group."""


def open_zarr(path: Path, dataset: str, sample_dims: int | None = None) -> Column:
    """The rows of an array."""
    column = ZarrColumn(path, dataset)
    return column if sample_dims in (None, len(column.row_shape)) else Flattened(column, sample_dims)


class ZarrColumn:
    """Rows of an array of a store."""

    def __init__(self, path: Path, dataset: str) -> None:
        """The array of that name."""
        self.name = str(path) if dataset == ONLY else f"{path} ({dataset})"
        self._stored = stored = _arrays(path)[dataset]
        check_numbers(self.name, stored.dtype)
        self.num_rows, self.row_shape = split_shape(self.name, stored.shape, None)
        self.dtype = stored.dtype.newbyteorder("=")

    def take(self, rows: Rows) -> Array:
        """The rows asked for, each chunk read once."""
        wanted, places = np.unique(rows, return_inverse=True)
        return self._stored.oindex[wanted].astype(self.dtype, copy=False)[places]


def zarr_names(path: Path) -> list[str]:
    """The names of all arrays, at any depth."""
    return list(_arrays(path))


def _arrays(path: Path) -> dict[str, Any]:
    zarr = library("zarr", path)
    try:
        found = zarr.open(path, mode="r")
        if isinstance(found, zarr.Array):
            return {ONLY: found}
        return {name: member for name, member in found.members(max_depth=None) if isinstance(member, zarr.Array)}
    except Exception as error:
        raise UserError(f"{path} is no Zarr store that can be read: {error}") from None
