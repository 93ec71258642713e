"""HDF5: datasets by name in one file."""

import errno
import math
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import DTypeLike

from isoscale.data.columns import BLOCK_BYTES, Array, Column, Rows, row_bytes
from isoscale.data.formats.checks import check_length, check_not_cut, check_numbers, split_shape
from isoscale.data.formats.mapped import MappedColumn
from isoscale.data.formats.views import Flattened
from isoscale.errors import UserError

MOST_OPEN = 64
BYTES_PER_ROW = 32 << 10
"""Picking one row out of a chunk takes as long as reading so many bytes."""


def open_hdf5(path: Path, dataset: str, sample_dims: int | None = None) -> Column:
    """The rows of a dataset; one that lies in the file as it is, without chunks, is read like a plain array."""
    name = f"{path} ({dataset})"
    with _open(str(path)) as file:
        stored = file[dataset]
        offset = stored.id.get_offset() if stored.chunks is None and not stored.external else None
        if offset is not None:
            return MappedColumn(path, name, stored.dtype, stored.shape, offset, sample_dims)
        column = Hdf5Column(path, name, stored)
    return column if sample_dims in (None, len(column.row_shape)) else Flattened(column, sample_dims)


class _Stored:
    """A dataset in a file that each process opens for itself."""

    def __init__(self, path: Path, name: str, stored: "h5py.Dataset") -> None:
        check_numbers(name, stored.dtype)
        self.name = name
        self.dtype = stored.dtype.newbyteorder("=")
        status = path.stat()
        self._path, self._dataset, self._version, self._end = (
            str(path), stored.name, status.st_mtime_ns, status.st_size,
        )  # fmt: skip
        # A file that nobody reads any more may be written again; those that are read are opened anew.
        weakref.finalize(self, _kept_open.cache_clear)

    @contextmanager
    def _opened(self) -> Iterator["h5py.Dataset"]:
        """The dataset to read from; what is wrong with it is said."""
        file = _kept_open(self._path, self._version, os.getpid())
        failure: OSError | None = None
        try:
            yield file[self._dataset]
        except OSError as error:
            failure = error
        # Of what was cut off since the file was opened, HDF5 may give zeros.
        check_not_cut(self.name, os.fstat(file.id.get_vfd_handle()).st_size, self._end)
        if failure is not None:
            raise UserError(f"{self.name} is damaged, or needs a filter that is not there: {failure}") from None


class Hdf5Column(_Stored):
    """Rows of a dataset in chunks."""

    def __init__(self, path: Path, name: str, stored: "h5py.Dataset") -> None:
        """The rows of `stored`, which is in the file at `path`."""
        super().__init__(path, name, stored)
        self.num_rows, self.row_shape = split_shape(name, stored.shape, None)
        self._chunk = stored.chunks[0] if stored.chunks else 1

    def take(self, rows: Rows) -> Array:
        """The rows asked for, each chunk read once: whole where much of it is wanted."""
        wanted, places = np.unique(rows, return_inverse=True)
        found = np.empty((len(wanted), *self.row_shape), self.dtype)
        with self._opened() as stored:
            sparse = np.ones(len(wanted), bool)
            for first, last in self._dense_runs(wanted):
                block = stored[wanted[first] : wanted[last - 1] + 1]
                found[first:last] = block[wanted[first:last] - wanted[first]]
                sparse[first:last] = False
            if sparse.any():
                found[sparse] = stored[wanted[sparse]]
        return found[places]

    def _dense_runs(self, wanted: Rows) -> Iterator[tuple[int, int]]:
        """Where neighbouring chunks of which much is wanted begin and end in `wanted`."""
        chunks, counts = np.unique(wanted // self._chunk, return_counts=True)
        ends = np.cumsum(counts)
        enough = max(1, self._chunk * row_bytes(self) // BYTES_PER_ROW)
        most = max(1, BLOCK_BYTES // max(1, self._chunk * row_bytes(self)))
        first = None
        for number, chunk in enumerate(chunks.tolist()):
            if counts[number] < enough:
                continue
            first = number if first is None else first
            follows = number + 1 < len(chunks) and chunks[number + 1] == chunk + 1 and counts[number + 1] >= enough
            if not follows or number + 1 - first >= most:
                yield int(ends[first] - counts[first]), int(ends[number])
                first = None


class Hdf5Array(_Stored):
    """A dataset that is read as it is sliced."""

    def __init__(self, path: Path, dataset: str) -> None:
        """The dataset of that name in the file at `path`."""
        with _open(str(path)) as file:
            stored = file[dataset]
            super().__init__(path, f"{path} ({dataset})", stored)
            self.shape, self.chunks = stored.shape, stored.chunks
            _check_written(self.name, stored)
            self.attributes = {**file.attrs, **stored.attrs}

    def __getitem__(self, place: Any) -> Array:
        """What numpy would give."""
        with self._opened() as stored:
            found: Array = stored[place]
        return found.astype(self.dtype, copy=False)  # which has the byte order of this machine


def _check_written(name: str, stored: "h5py.Dataset") -> None:
    """Refuse a dataset of which parts were never written: HDF5 gives zeros for them without a word."""
    if stored.chunks is None:
        return
    expected = math.prod(-(-size // chunk) for size, chunk in zip(stored.shape, stored.chunks, strict=True))
    written = stored.id.get_num_chunks()
    if written < expected:
        raise UserError(
            f"{name}: {expected - written} of its {expected} chunks were never written, and would be read as "
            f"{stored.fillvalue}: the program that wrote it has not finished; wait for it, or write the file again"
        )


def hdf5_names(path: Path) -> list[str]:
    """The names of all datasets, at any depth."""
    names: list[str] = []
    with _open(str(path)) as file:
        try:
            file.visititems(lambda name, found: names.append(name) if isinstance(found, h5py.Dataset) else None)
        except (RuntimeError, OSError, ValueError) as error:  # h5py has no kind of its own for what it cannot read
            raise UserError(f"{path} is damaged: {error}") from None
    return names


def allocate(
    path: Path, dataset: str, shape: Sequence[int], dtype: DTypeLike, attributes: Mapping[str, Any],
    of_dataset: Mapping[str, Any],
) -> int:  # fmt: skip
    """Make a file with room for one dataset, which lies there as it is: the place of its first byte."""
    with h5py.File(path, "x") as file:
        file.attrs.update(attributes)
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_layout(h5py.h5d.CONTIGUOUS)
        layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        layout.set_obj_track_times(False)  # equal data makes equal files
        kind, space = h5py.h5t.py_create(np.dtype(dtype)), h5py.h5s.create_simple(tuple(shape))
        stored = h5py.Dataset(h5py.h5d.create(file.id, dataset.encode(), kind, space, layout))
        stored.attrs.update(of_dataset)
        return int(stored.id.get_offset())


def has_attribute(path: Path, name: str) -> bool:
    """Whether a file is an HDF5 file with an attribute of this name."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            return name in file.attrs
    except OSError:
        return False


@lru_cache(maxsize=MOST_OPEN)
def _kept_open(path: str, version: int, process: int) -> "h5py.File":
    """The open file; `version` tells it from another that takes its place."""
    return _open(path)


def _open(path: str) -> "h5py.File":
    try:
        return h5py.File(path, "r")
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise UserError(f"{path} is being written by another program; wait until it is closed there") from None
        if "already open for write" in str(error):  # a mark in the file, which outlives a program that was killed
            raise UserError(
                f"{path} is being written by another program, or was left open by one that was killed; wait until it "
                f"is closed there; if nobody writes it any more, look whether it is whole, and type h5clear -s {path}"
            ) from None
        if "unable to lock" in str(error):  # a file system without locks, as many clusters have it: reading needs none
            return h5py.File(path, "r", locking=False)
        sizes = re.search(r"truncated file: eof = (\d+).*stored_eof = (\d+)", str(error))
        if sizes is None:
            raise UserError(f"{path} is not a readable HDF5 file: {error}") from None
        check_length(path, *map(int, sizes.groups()))
        raise
