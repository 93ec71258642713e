"""Columns: arrays in files, one row per sample; several files as one, and rows that are read in several threads."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoscale.errors import UserError

BLOCK_BYTES = 64 << 20
"""How much of a column is in memory at a time while all of it is read."""

MOST_LABEL_BYTES = 64 << 20
"""A column that is not larger may be read at the start, to look at its labels."""

Rows = NDArray[np.int64]
Array = NDArray[Any]
NUM_THREADS = 16
"""More than most machines have cores to spare: threads that wait for a disk cost nothing."""
CHUNK_BYTES = 1 << 20
"""What one thread reads at a time; what is smaller is not worth a thread."""


class Column(Protocol):
    """One array in a file, or in several, of which rows can be read in any order."""

    name: str
    """Where it is, for people: a path, or path and dataset."""
    num_rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """As stored."""

    def take(self, rows: Rows) -> Array:
        """The rows asked for, in the order asked, as an array of its own."""


def row_bytes(column: Column) -> int:
    """Bytes of one row."""
    return int(np.prod(column.row_shape, dtype=np.int64)) * column.dtype.itemsize


def blocks(column: Column, most_bytes: int = BLOCK_BYTES) -> Iterator[Array]:
    """All rows in order, a block at a time."""
    size = max(1, most_bytes // max(1, row_bytes(column)))
    for start in range(0, column.num_rows, size):
        yield column.take(np.arange(start, min(column.num_rows, start + size)))


def as_tensor(array: Array) -> Tensor:
    """The array as a tensor; of unsigned types of which torch cannot pick single values, as a signed one."""
    if array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8):
        raise UserError(f"no tensor can hold {array.dtype}: convert it, such as array.astype('float64')")
    if array.ndim == 1 and array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise UserError(f"{array.max()} of an array of {array.dtype} is too large for a whole number of 64 bits")
        array = array.astype(np.int32 if array.dtype.itemsize == 2 else np.int64)
    return torch.from_numpy(array)


class Joined:
    """Columns of several files, one after the other, as one."""

    def __init__(self, parts: Sequence[Column]) -> None:
        """Join columns of any length; their rows must have the same shape and dtype."""
        first = parts[0]
        for part in parts[1:]:
            if (part.row_shape, part.dtype) != (first.row_shape, first.dtype):
                raise UserError(
                    f"{part.name} has rows of {part.row_shape} {part.dtype}, but {first.name} has "
                    f"{first.row_shape} {first.dtype}; files that are read as one must agree"
                )
        self.parts = list(parts)
        self.name = first.name if len(parts) == 1 else f"{first.name} and {len(parts) - 1} more"
        self.row_shape, self.dtype = first.row_shape, first.dtype
        self._starts = np.cumsum([0, *(part.num_rows for part in parts)])
        self.num_rows = int(self._starts[-1])

    def take(self, rows: Rows) -> Array:
        """The rows asked for, each file asked once for its own."""
        if len(self.parts) == 1:
            return self.parts[0].take(rows)
        found = np.empty((len(rows), *self.row_shape), self.dtype)
        which = np.searchsorted(self._starts, rows, "right") - 1
        by_part = np.argsort(which, kind="stable")
        parts, first = np.unique(which[by_part], return_index=True)
        for part, mine in zip(parts, np.split(by_part, first[1:]), strict=True):
            found[mine] = self.parts[part].take(rows[mine] - self._starts[part])
        return found


def rows_at_once(column: Column) -> int:
    """How many rows one thread reads at a time."""
    return max(1, CHUNK_BYTES // max(1, row_bytes(column)))


def fill(out: Array, rows: Rows, size: int, read: Callable[[Rows], Array]) -> Array:
    """Write the rows that `read` gives into `out`, `size` of them at a time, in several threads where there are more.

    `read` may fill by itself, but no more than `size` rows at once: a thread that waits for its own pool waits forever.
    """

    def one(start: int) -> None:
        out[start : start + size] = read(rows[start : start + size])

    if len(rows) <= size:
        one(0)
    else:
        list(_pool(os.getpid()).map(one, range(0, len(rows), size)))
    return out


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked process has none of its parent's."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="isoscale-rows")
