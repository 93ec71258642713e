"""Zarr, versions 2 and 3: arrays by name in a folder of chunks."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from isoscale.data.columns import Array, Column, Rows
from isoscale.data.formats.checks import check_length, check_numbers, library, split_shape
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
        uses_blosc = any("blosc" in type(codec).__name__.lower() for codec in stored.compressors)
        self._folder = path / stored.path if uses_blosc and path.is_dir() else None
        self._checked: set[int] = set()

    def take(self, rows: Rows) -> Array:
        """The rows asked for, each chunk read once."""
        wanted, places = np.unique(rows, return_inverse=True)
        self._check_chunks(wanted)
        with self._words_for_damage():
            found = self._stored.oindex[wanted]
        return found.astype(self.dtype, copy=False)[places]

    @contextmanager
    def _words_for_damage(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of whichever codec
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            raise UserError(f"{self.name} is truncated or damaged, or needs a codec that is not there: {why}") from None

    def _check_chunks(self, rows: Rows) -> None:
        """Blosc reads beyond the end of a chunk that was cut short, and takes what lies there for values."""
        if self._folder is None:
            return
        shape, lengths = self._stored.shape, self._stored.chunks
        others = [range(-(-length // chunk)) for length, chunk in zip(shape[1:], lengths[1:], strict=True)]
        for first in set((rows // lengths[0]).tolist()) - self._checked:
            for rest in product(*others):
                path = self._folder / self._stored.metadata.encode_chunk_key((first, *rest))
                if path.exists():  # one that is not there stands for zeros
                    with path.open("rb") as file:
                        expected = int.from_bytes(file.read(16)[12:], "little")
                    check_length(path, path.stat().st_size, max(16, expected))
            self._checked.add(first)


class ZarrArray(ZarrColumn):
    """An array that is read as it is sliced."""

    def __init__(self, path: Path, dataset: str) -> None:
        """The array of that name."""
        super().__init__(path, dataset)
        self.shape, self.chunks = (self.num_rows, *self.row_shape), self._stored.chunks
        self.attributes = dict(self._stored.attrs)

    def __getitem__(self, place: Any) -> Array:
        """What numpy would give."""
        self._check_chunks(np.arange(self.num_rows))
        with self._words_for_damage():
            return np.asarray(self._stored[place]).astype(self.dtype, copy=False)


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
        raise UserError(f"{path} is not a readable Zarr store: {error}") from None
