"""Systems as DeePMD-kit stores them: frames of the same atoms, in a folder or in a group of an HDF5 file."""

import math
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoscale.data.columns import Array, Column, Joined, Rows, row_bytes
from isoscale.data.formats.hdf5 import hdf5_names, open_hdf5
from isoscale.data.formats.npy import open_npy
from isoscale.data.formats.views import place
from isoscale.errors import UserError

LABELS = ("energy", "force", "virial", "atom_energy")
"""What frames may be labelled with."""
VIRTUAL = -1
"""The type of an atom that only fills a row."""
HDF5 = (".h5", ".hdf5")
FILES = {"atom_energy": "atom_ener", "types": "real_atom_types"}
"""Arrays whose files have other names than ours."""
_CONVERT = (
    "frames are read from set.000/coord.npy and the like; convert text, for coord, box, energy and force alike: "
    "numpy.save('set.000/coord.npy', numpy.loadtxt('coord.raw', ndmin=2))"
)


class Store(Protocol):
    """The files of a system, wherever they are."""

    name: str
    """As the user gave it."""

    def names(self) -> list[str]:
        """Files by their path in the system: `type.raw`, `set.000/coord.npy`."""

    def words(self, name: str) -> list[str]:
        """The words of a text file."""

    def column(self, name: str, sample_dims: int | None) -> Column:
        """The rows of an array."""


class FolderStore:
    """Files in a folder."""

    def __init__(self, path: Path) -> None:
        """A folder with `type.raw`."""
        self.name = str(path)
        self._path = path

    def names(self) -> list[str]:
        """Files by their path in the folder."""
        inside = [path for path in self._path.iterdir() if path.is_file()]
        sets = [path for folder in self._path.glob("set.*") if folder.is_dir() for path in folder.iterdir()]
        return sorted(str(path.relative_to(self._path)) for path in [*inside, *sets])

    def words(self, name: str) -> list[str]:
        """The words of a text file."""
        return (self._path / name).read_text(encoding="utf-8", errors="replace").split()

    def column(self, name: str, sample_dims: int | None) -> Column:
        """The rows of a `.npy` file."""
        return open_npy(self._path / name, sample_dims)


class GroupStore:
    """Datasets in a group of an HDF5 file, under the names that files would have."""

    def __init__(self, path: Path, group: str) -> None:
        """A group with `type.raw`."""
        self.name = f"{path}#/{group}"
        self._path = path
        self._prefix = f"{group}/" if group else ""

    def names(self) -> list[str]:
        """Datasets by their path in the group."""
        found = _all_names(self._path, self._path.stat().st_mtime_ns)
        return [name.removeprefix(self._prefix) for name in found if name.startswith(self._prefix)]

    def words(self, name: str) -> list[str]:
        """The values of a dataset, numbers or text."""
        with h5py.File(self._path, "r") as file:
            stored = np.asarray(file[self._prefix + name][()]).reshape(-1).tolist()
        texts = [value.decode() if isinstance(value, bytes) else str(value) for value in stored]
        return [word for text in texts for word in text.split()]

    def column(self, name: str, sample_dims: int | None) -> Column:
        """The rows of a dataset."""
        return open_hdf5(self._path, self._prefix + name, sample_dims)


@lru_cache(maxsize=8)
def _all_names(path: Path, version: int) -> list[str]:
    """The datasets of a file; `version` tells it from another that takes its place."""
    return sorted(hdf5_names(path))


class System:
    """Frames of the same atoms: a source of positions, box, types and labels, read as they are asked for."""

    on_disk = True
    is_rows = True
    sample_unit = "atoms"

    def __init__(self, store: Store) -> None:
        """Look at the files, but read no frame."""
        self.name = store.name
        names = store.names()
        self.types = _types(store)
        """The type of each atom by its stored number; where frames have types of their own, they are in `columns`."""
        self.type_names = store.words("type_map.raw") if "type_map.raw" in names else None
        self.is_periodic = "nopbc" not in names
        self.columns = self._columns(store, names)
        self._length = self.columns["coord"].num_rows
        if not self._length:
            raise UserError(f"{self.name} is empty: its coord.npy has no frame; leave the system out")
        self.num_atoms = len(self.types)

    def __len__(self) -> int:
        """Number of frames."""
        return self._length

    @property
    def labels(self) -> frozenset[str]:
        """What frames are labelled with."""
        return frozenset(LABELS) & self.columns.keys()

    @property
    def sample_size(self) -> int:
        """Atoms of a frame."""
        return self.num_atoms

    @property
    def nbytes(self) -> int:
        """Bytes of all frames, as stored."""
        return self._length * sum(row_bytes(column) for column in self.columns.values())

    def fetch(self, indices: Tensor) -> dict[str, Tensor]:
        """Frames as they are stored: atoms in their own order, types by their stored numbers."""
        rows = indices.numpy()
        found = {key: column.take(rows) for key, column in self.columns.items()} | {"types": self.types_of(rows)}
        return {key: torch.from_numpy(np.require(values, requirements=["C", "W"])) for key, values in found.items()}

    def types_of(self, rows: Rows) -> NDArray[np.int64]:
        """The stored types (frames, atoms) of some frames."""
        if "types" in self.columns:
            return self.columns["types"].take(rows)
        return np.broadcast_to(self.types, (len(rows), self.num_atoms))

    def locate(self, index: int) -> str:
        """Where a frame is, for people."""
        return f"{self.name}, frame {index}"

    def file_of(self, key: str, index: int) -> str:
        """The file that an array of a frame is in, and the row there."""
        file, row = place(self.columns[key], index)
        return f"{file}, row {row}"

    def kinds(self, types: Sequence[str]) -> NDArray[np.int64]:
        """For each stored number the place of its type in `types`; VIRTUAL where that is missing."""
        if self.type_names is None:
            return np.arange(len(types))
        return np.array([types.index(name) if name in types else VIRTUAL for name in self.type_names], np.int64)

    def _columns(self, store: Store, names: Sequence[str]) -> dict[str, Column]:
        sets = sorted({name.partition("/")[0] for name in names if name.startswith("set.") and "/" in name})
        if not sets:
            text = [name for name in names if name in ("coord.raw", "energy.raw")]
            found = f"only {', '.join(text)}" if text else f"only {', '.join(names)}"
            raise UserError(f"{self.name} has no set.* with frames, {found}: {_CONVERT}")
        keys = ["coord", *(["box"] if self.is_periodic else []), *LABELS, "types"]
        return {
            key: Joined(parts) for key in keys if (parts := [*_parts(store, key, sets, names, len(self.types))])
        }  # fmt: skip


def _types(store: Store) -> NDArray[np.int64]:
    words = store.words("type.raw")
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise UserError(
            f'{store.name}/type.raw has "{wrong}", expected a number for each atom, 0 or more; names of types '
            "belong into type_map.raw"
        )
    if not words:
        raise UserError(f"{store.name}/type.raw is empty; expected a number for each atom")
    return np.array(words, np.int64)


def _parts(store: Store, key: str, sets: Sequence[str], names: Sequence[str], num_atoms: int) -> Iterator[Column]:
    """An array in every set, of one type; none where it is optional and not there."""
    files = [f"{each}/{FILES.get(key, key)}.npy" for each in sets]
    missing = [file for file in files if file not in names]
    if missing and (key in ("coord", "box") or len(missing) < len(files)):
        raise UserError(_missing(store.name, key, missing[0], files))
    if missing:
        return
    parts = [_open(store, key, file, _shape(key, num_atoms)) for file in files]
    dtype = np.result_type(*(part.dtype for part in parts), np.float32)
    dtype = np.dtype(np.int64) if key == "types" else min(dtype, np.dtype(np.float64))
    for part, each in zip(parts, sets, strict=True):
        _check_frames(store.name, part, key, store, each)
        yield _Shaped(part, _shape(key, num_atoms), dtype)


def _missing(name: str, key: str, file: str, files: Sequence[str]) -> str:
    if key == "box":
        return (
            f"{name} has no {file}, and no file nopbc: give a box (9 numbers per frame), or make an empty file nopbc "
            "where nothing is periodic"
        )
    if key == "coord":
        return f"{name} has no {file}; {_CONVERT}"
    other = next(each for each in files if each != file)
    return f"{name} has no {file}, but other sets have ({other}); put what is labelled alike into a system of its own"


def _shape(key: str, num_atoms: int) -> tuple[int, ...]:
    """Of one frame."""
    by_atom = {"coord": (num_atoms, 3), "force": (num_atoms, 3), "atom_energy": (num_atoms,), "types": (num_atoms,)}
    return {"box": (3, 3), "virial": (3, 3), "energy": (), **by_atom}[key]


def _open(store: Store, key: str, file: str, shape: tuple[int, ...]) -> Column:
    column = store.column(file, None)
    if shape and not column.row_shape:  # one frame, written without a dimension for frames
        column = store.column(file, 1)
    if column.dtype.kind == "c":
        raise UserError(f"{column.name} holds complex numbers, expected real ones")
    found, expected = math.prod(column.row_shape), math.prod(shape)
    if found != expected:
        raise UserError(
            f"{column.name} has {found:,} numbers per frame, expected {_expected(key, shape)}; "
            f"the system is {store.name}"
        )
    return column


def _expected(key: str, shape: tuple[int, ...]) -> str:
    if key in ("box", "virial", "energy"):
        return str(math.prod(shape))
    return f"{math.prod(shape):,}: type.raw has {shape[0]:,} atoms" + (", 3 numbers each" if len(shape) > 1 else "")


def _check_frames(name: str, part: Column, key: str, store: Store, folder: str) -> None:
    expected = part.num_rows if key == "coord" else _open_coord(store, folder)
    if part.num_rows != expected:
        raise UserError(
            f"{part.name} has {part.num_rows:,} frames, but coord.npy beside it has {expected:,}; every frame of "
            f"{name} needs both"
        )


def _open_coord(store: Store, folder: str) -> int:
    coord = store.column(f"{folder}/coord.npy", None)
    return coord.num_rows if coord.row_shape else 1


class _Shaped:
    """Rows of one shape and type, however they are stored."""

    def __init__(self, column: Column, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.name, self.num_rows = column.name, column.num_rows
        self.row_shape, self.dtype = shape, dtype
        self._column = column

    def take(self, rows: Rows) -> Array:
        return self._column.take(rows).reshape(len(rows), *self.row_shape).astype(self.dtype, copy=False)


def find_systems(path: str, advice: str = "") -> list[System]:
    """The system at `path`, or else all that are below it, sorted: a folder, an HDF5 file, or `file.hdf5#/group`.

    `advice` is for who has none there.
    """
    file, _, group = path.partition("#")
    place = Path(file).expanduser()
    if not place.exists():
        what_next = f"; {advice}" if advice else ""
        raise UserError(f"there is no system {path}: {place} is not there (looked from {os.getcwd()}){what_next}")
    stores = list(_groups(place, group.strip("/")) if place.is_file() else _folders(place))
    if not stores:
        where = f"group {group or '/'} of {place}" if place.is_file() else f"{place} and all folders in it"
        raise UserError(f"no system found in {path}: looked for type.raw in {where}")
    return [System(store) for store in stores]


def has_systems(path: str) -> bool:
    """Whether a path leads to systems: a group, or a folder or an HDF5 file with some inside."""
    file, hash_sign, _ = path.partition("#")
    place = Path(file).expanduser()
    if hash_sign:
        return place.is_file()
    is_file = place.suffix in HDF5 and place.is_file()
    stores = _folders(place) if place.is_dir() else _groups(place, "") if is_file else iter(())
    return next(stores, None) is not None


def _folders(folder: Path) -> Iterator[Store]:
    """Systems in a folder and below it, also behind links, each folder once."""
    seen: set[str] = set()
    for where, inside, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(where)
        inside.sort()
        if real in seen or "type.raw" in files:
            inside.clear()
        if real not in seen and "type.raw" in files:
            yield FolderStore(Path(where))
        seen.add(real)


def _groups(path: Path, group: str) -> Iterator[Store]:
    prefix = f"{group}/" if group else ""
    names = [name for name in _all_names(path, path.stat().st_mtime_ns) if name.startswith(prefix)]
    systems = [name.removesuffix("type.raw").rstrip("/") for name in names if f"/{name}".endswith("/type.raw")]
    if group in systems:
        systems = [group]
    yield from (GroupStore(path, each) for each in systems)
