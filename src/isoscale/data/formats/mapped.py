"""Rows of arrays: mapped, where they lie plainly in a file and are never loaded, or in memory, where they must be."""

import mmap
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from isoscale.data.columns import Array, Rows, fill, rows_at_once
from isoscale.data.formats.checks import check_not_cut, check_numbers, num_values, split_shape
from isoscale.errors import UserError

MOST_MAPS = 256
"""Files that are open at a time; each is a handle, of which a process may have a thousand or so."""


class MappedColumn:
    """Rows that lie one after the other in a file."""

    reads_in_parallel = True

    def __init__(
        self, path: Path, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, sample_dims: int | None
    ) -> None:
        """An array of `shape` that begins `offset` bytes into the file at `path`."""
        check_numbers(name, dtype)
        self.name = name
        self.num_rows, self.row_shape = split_shape(name, shape, sample_dims)
        self.dtype = dtype.newbyteorder("=")
        self._path, self._stored, self._offset = str(path), dtype, offset
        self._version = path.stat().st_mtime_ns
        self._values_per_row = num_values(name, self.row_shape)
        self._end = offset + num_values(name, shape, dtype.itemsize)

    def take(self, rows: Rows) -> Array:
        """The rows asked for: neighbours in one go, others by several threads."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            # An ordinary read, for which the system reads ahead.
            offset = self._offset + int(rows[0]) * self._values_per_row * self._stored.itemsize
            wanted = len(rows) * self._values_per_row
            try:
                values = np.fromfile(self._path, self._stored, wanted, offset=offset)
            except OSError as error:
                raise UserError(f"cannot read {self.name}: {error.strerror or error}") from None
            if len(values) < wanted:
                check_not_cut(self.name, os.stat(self._path).st_size, self._end)
            return values.astype(self.dtype, copy=False).reshape(len(rows), *self.row_shape)
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows:
            raise IndexError(f"{self.name} has rows 0 to {self.num_rows - 1}, asked for {rows.min()} to {rows.max()}")
        found = np.empty((len(rows), *self.row_shape), self.dtype)
        return fill(found, rows, rows_at_once(self), self._gather)

    def _gather(self, rows: Rows) -> Array:
        shape = (self.num_rows, *self.row_shape)
        memory, array = _mapped(self._path, self._version, self._stored, shape, self._offset)
        check_not_cut(self.name, memory.size(), self._end)  # to touch what was cut off would end the process
        # Rows that are checked may be clipped, which spares numpy a copy.
        return np.take(array, rows, axis=0, mode="clip")


@lru_cache(maxsize=MOST_MAPS)
def _mapped(
    path: str, version: int, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int
) -> tuple[mmap.mmap, Array]:
    """The file, and the array as it lies there; `version` tells a file from another that takes its place."""
    try:
        with open(path, "rb") as file:
            found, count = os.fstat(file.fileno()).st_size, num_values(path, shape)
            check_not_cut(path, found, offset + count * dtype.itemsize)
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    if hasattr(mmap, "MADV_RANDOM"):
        # Otherwise each row brings its neighbourhood along, 32 times what is needed.
        memory.madvise(mmap.MADV_RANDOM)
    return memory, np.frombuffer(memory, dtype, count, offset).reshape(shape)


class MemoryColumn:
    """Rows of an array that had to be read whole: of text, and of what is compressed."""

    reads_in_parallel = True

    def __init__(self, name: str, array: Array, sample_dims: int | None = None) -> None:
        """The array, and where it came from."""
        check_numbers(name, array.dtype)
        self.name = name
        self.num_rows, self.row_shape = split_shape(name, array.shape, sample_dims)
        self.dtype = array.dtype.newbyteorder("=")
        self._array = np.ascontiguousarray(array, self.dtype).reshape(self.num_rows, *self.row_shape)

    def take(self, rows: Rows) -> Array:
        """The rows asked for."""
        return np.take(self._array, rows, axis=0)
