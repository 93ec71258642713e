"""Open arrays in files: the name says the format, or the first bytes where it does not."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from isoscale.config import Config
from isoscale.data.columns import Column, Joined
from isoscale.data.files import MOST_NAMES, find_files, is_store
from isoscale.data.formats import hdf5, npy, zarr
from isoscale.data.formats.checks import number_type
from isoscale.data.formats.idx import open_idx
from isoscale.data.formats.text import open_text
from isoscale.data.formats.views import SomeRows, View, check_fits, read_cut, read_range
from isoscale.errors import UserError

SUFFIXES = {
    ".npy": "npy",
    ".npz": "npz",
    ".h5": "hdf5", ".hdf5": "hdf5", ".hdf": "hdf5", ".he5": "hdf5", ".nc": "hdf5",
    ".zarr": "zarr",
    ".lmdb": "lmdb", ".mdb": "lmdb",
    ".txt": "text", ".csv": "text", ".tsv": "text", ".dat": "text",
    ".bin": "raw", ".raw": "raw",
    ".idx": "idx",
}  # fmt: skip
_BEGINNINGS = {b"\x93NUMPY": "npy", b"PK\x03\x04": "npz", b"\x89HDF\r\n\x1a\n": "hdf5", b"\0\0\x08": "idx"}
_NAMES: dict[str, Callable[[Path], list[str]]] = {
    "npz": npy.npz_names,
    "hdf5": hdf5.hdf5_names,
    "zarr": zarr.zarr_names,
}
"""Of formats that hold several arrays."""
_BY_NAME: dict[str, Callable[[Path, str, int | None], Column]] = {
    "npz": npy.open_npz,
    "hdf5": hdf5.open_hdf5,
    "zarr": zarr.open_zarr,
}
_SINGLE: dict[str, Callable[[Path, int | None], Column]] = {"npy": npy.open_npy, "text": open_text, "idx": open_idx}


class ColumnOptions(Config):
    """One column of a source: the files that it is in, and what of them is used."""

    path: str | Annotated[list[str], Field(min_length=1)]
    """A file, a pattern (`snapshots/*.in.npy`, in natural order), a folder, or a list of them, read as one."""
    dataset: str | None = None
    """Which array, where a file holds several (`.npz`, HDF5, Zarr)."""
    columns: str | Annotated[list[int], Field(min_length=1)] | None = None
    """Which values of the last dimension: a range such as "3:" or "3:94", or a list of numbers."""
    dtype: str | None = None
    """The type to convert to when rows are read, such as float32; of raw files, the type that they are stored in."""
    rows: str | None = None
    """Which rows, as a range over all files: "0:1000"."""
    sample_dims: Annotated[int, Field(ge=0)] | None = None
    """How many trailing dimensions make a sample; by default all but the first."""
    shape: list[Annotated[int, Field(ge=1)]] | None = None
    """The shape of one sample of raw files (`.bin`)."""


def read_options(spec: str | Sequence[str] | Mapping[str, Any], where: str) -> ColumnOptions:
    """What a recipe says about a column, checked; a path alone is enough."""
    values = dict(spec) if isinstance(spec, Mapping) else {"path": spec}
    try:
        return ColumnOptions.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([where, *map(str, first["loc"][:1])])
        if first["type"] == "extra_forbidden":
            raise UserError(
                f"{key}: there is no such option; there is {', '.join(ColumnOptions.model_fields)}"
            ) from None
        raise UserError(f"{key}: {first['msg']}") from None


def open_column(spec: str | Sequence[str] | Mapping[str, Any], where: str = "column") -> Column:
    """The rows of all files of a column, as one; `where` names it in errors."""
    options = read_options(spec, where)
    files = find_files(options.path, tuple(SUFFIXES))
    dtype = None if options.dtype is None else number_type(options.dtype, f"{where}.dtype")
    parts = [_open_file(file, options, dtype) for file in files]
    _check_alike(parts, any_dtype=dtype is not None)
    joined: Column = Joined([_cut(part, options.columns, dtype and dtype.newbyteorder("=")) for part in parts])
    check_fits(joined)
    if options.rows is None:
        return joined
    return SomeRows(joined, read_range(options.rows, joined.num_rows, f"{where}.rows"))


def format_of(path: Path) -> str:
    """The format of a file, by its name or, where that says nothing, by its first bytes."""
    if path.suffix.lower() in SUFFIXES:
        return SUFFIXES[path.suffix.lower()]
    if is_store(path):
        return "lmdb" if (path / "data.mdb").exists() else "zarr"
    if "ubyte" in path.name:
        return "idx"
    with path.open("rb") as file:
        beginning = file.read(8)
    for magic, name in _BEGINNINGS.items():
        if beginning.startswith(magic):
            return name
    raise UserError(f"{path} is in no format that is known; known are {', '.join(SUFFIXES)}")


def dataset_names(path: Path) -> list[str] | None:
    """The names of the arrays in a file; None where it holds one without a name."""
    names = _NAMES.get(format_of(path))
    return None if names is None else names(path)


def open_array(path: Path, dataset: str) -> Any:
    """An array of a file, which is read as it is sliced; `shape`, `dtype` and perhaps `attributes` say what it is.

    HDF5, Zarr, .npz, or a folder with a .npy file of that name.
    """
    if path.is_dir() and not is_store(path):
        found = path / f"{dataset}.npy"
        if not found.exists():
            raise UserError(f"{path} has no file {dataset}.npy; there is {', '.join(_names_in(path)) or 'nothing'}")
        npy.open_npy(found)  # which says what is wrong with it
        return np.load(found, mmap_mode="r")
    kind = format_of(path)
    if kind not in _NAMES:
        raise UserError(f"{path} holds no arrays by name: give an HDF5 file, a Zarr store, a .npz file or a folder")
    name = _dataset(path, dataset)
    if kind == "npz":
        column = npy.open_npz(path, name)
        return column.take(np.arange(column.num_rows))
    return hdf5.Hdf5Array(path, name) if kind == "hdf5" else zarr.ZarrArray(path, name)


def _names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())[:MOST_NAMES]


def _open_file(path: Path, options: ColumnOptions, dtype: np.dtype[Any] | None) -> Column:
    kind, dims = format_of(path), options.sample_dims
    try:
        if kind in _NAMES:
            return _BY_NAME[kind](path, _dataset(path, options.dataset), dims)
        if options.dataset is not None:
            raise UserError(f'{path} holds no arrays by name; leave dataset: "{options.dataset}" out')
        if kind == "raw":
            return npy.open_raw(path, dtype, options.shape)
        if kind == "lmdb":
            raise UserError(f"{path} holds whole samples, not a column; write columns: {path}")
        return _SINGLE[kind](path, dims)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _dataset(path: Path, wanted: str | None) -> str:
    """The name of the array that is meant."""
    names = dataset_names(path) or []
    if wanted is not None and wanted.strip("/") in names:
        return wanted.strip("/")
    if wanted is None and len(names) == 1:
        return names[0]
    there = f"there is {', '.join(names)}" if names else "there is none"
    problem = f'{path} has no dataset "{wanted}"' if wanted is not None else f"{path}: which dataset?"
    raise UserError(f"{problem}; {there}")


def _check_alike(parts: Sequence[Column], any_dtype: bool) -> None:
    """Of many files name the one that is not like the others, which need not be the second one."""
    kinds = [(part.row_shape, None if any_dtype else part.dtype) for part in parts]
    usual, count = Counter(kinds).most_common(1)[0]
    for part, kind in zip(parts, kinds, strict=True):
        if kind != usual:
            raise UserError(
                f"{part.name} has rows of {part.row_shape} {part.dtype}, but {count} of the {len(parts)} files "
                f"that are read as one have {usual[0]} {usual[1] or ''}".rstrip()
            )


def _cut(column: Column, columns: str | Sequence[int] | None, dtype: np.dtype[Any] | None) -> Column:
    if columns is None:
        return column if dtype is None or dtype == column.dtype else View(column, slice(None), dtype)
    if not column.row_shape:
        raise UserError(f"{column.name} has one value per row, of which no columns can be picked")
    return View(column, read_cut(columns, column.row_shape[-1], f"columns of {column.name}"), dtype)
