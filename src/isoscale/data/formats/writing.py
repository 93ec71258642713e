"""Write columns block by block, however many rows there will be, in formats that can be read by rows again."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import h5py
import numpy as np

from isoscale.data.columns import Array
from isoscale.data.formats.checks import library
from isoscale.system.files import sync_file

CHUNK_BYTES = 1 << 20
"""What HDF5 and Zarr store as one piece; small, because rows are read in any order."""


class Writer(Protocol):
    """Takes blocks of rows, and names what it wrote when it is closed."""

    def add(self, rows: Mapping[str, Array]) -> None:
        """Write more rows of every column."""

    def close(self) -> list[Path]:
        """Finish, so that all of it is on the disk."""


class NpyWriter:
    """A `.npy` file for each column: `stem.column.npy`."""

    def __init__(self, folder: Path, stem: str) -> None:
        """Files in `folder` whose names begin with `stem`."""
        self._folder, self._stem = folder, stem
        self._files: dict[str, tuple[BinaryIO, np.dtype[Any], list[int]]] = {}

    def add(self, rows: Mapping[str, Array]) -> None:
        """Write more rows behind those that are there."""
        for name, array in rows.items():
            if name not in self._files:
                path = self._folder / f"{self._stem}.{name}.npy"
                self._files[name] = (path.open("wb"), array.dtype, [0, *array.shape[1:]])
                write_npy_header(*self._files[name])
            file, _, shape = self._files[name]
            shape[0] += len(array)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def close(self) -> list[Path]:
        """Put the number of rows into the headers, which leave room for it."""
        for file, dtype, shape in self._files.values():
            file.seek(0)
            write_npy_header(file, dtype, shape)
            file.flush()
            os.fsync(file.fileno())
            file.close()
        return [Path(file.name) for file, _, _ in self._files.values()]


def write_npy_header(file: BinaryIO, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
    """What stands before the rows of a `.npy` file; it leaves room for more of them."""
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(file, description)


class Hdf5Writer:
    """One HDF5 file, `stem.h5`, with a dataset for each column."""

    def __init__(self, folder: Path, stem: str) -> None:
        """A new file in `folder`."""
        self._path = folder / f"{stem}.h5"
        self._file = h5py.File(self._path, "w")

    def add(self, rows: Mapping[str, Array]) -> None:
        """Make the datasets longer."""
        for name, array in rows.items():
            if name not in self._file:
                inner = array.shape[1:]
                layout = {"maxshape": (None, *inner), "chunks": (_chunk_rows(array), *inner)}
                self._file.create_dataset(name, (0, *inner), array.dtype, **layout)
            stored = self._file[name]
            stored.resize(len(stored) + len(array), axis=0)
            stored[len(stored) - len(array) :] = array

    def close(self) -> list[Path]:
        """Close the file."""
        self._file.close()
        sync_file(self._path)
        return [self._path]


class ZarrWriter:
    """One Zarr store, `stem.zarr`, with an array for each column."""

    def __init__(self, folder: Path, stem: str) -> None:
        """A new store in `folder`."""
        self._path = folder / f"{stem}.zarr"
        self._group = library("zarr", self._path).open_group(self._path, mode="w")

    def add(self, rows: Mapping[str, Array]) -> None:
        """Make the arrays longer."""
        for name, array in rows.items():
            if name not in self._group:
                inner = array.shape[1:]
                chunks = (_chunk_rows(array), *inner)
                self._group.create_array(name, shape=(0, *inner), dtype=array.dtype, chunks=chunks)
            self._group[name].append(array)

    def close(self) -> list[Path]:
        """See that all chunks are on the disk."""
        for file in self._path.rglob("*"):
            if file.is_file():
                sync_file(file)
        return [self._path]


WRITERS: dict[str, type[NpyWriter] | type[Hdf5Writer] | type[ZarrWriter]] = {
    "npy": NpyWriter,
    "hdf5": Hdf5Writer,
    "zarr": ZarrWriter,
}


def _chunk_rows(array: Array) -> int:
    return max(1, CHUNK_BYTES // max(1, array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))))
