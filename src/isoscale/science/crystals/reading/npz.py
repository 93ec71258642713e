"""Ragged arrays in an `.npz` file: `ptr, pos, z, cell, pbc`, then targets, a row per structure or per atom."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoscale.errors import UserError
from isoscale.science.crystals.reading.found import Found, said_units
from isoscale.science.crystals.reading.structure import Structure
from isoscale.science.crystals.reading.table import StructureTable
from isoscale.science.crystals.reading.units import DEFAULTS

_NAMES = {
    "pos": ("pos", "positions"), "z": ("z", "numbers", "atomic_numbers"), "cell": ("cell", "cells", "lattice"),
    "pbc": ("pbc",), "ptr": ("ptr",), "name": ("name", "names"),
}  # fmt: skip
LAYOUT = "ptr (N + 1,), pos (atoms, 3), z (atoms,), cell (N, 3, 3), pbc (N, 3), energy (N,), force (atoms, 3), …"


def read_npz(path: Path) -> Found:
    """All structures of a file."""
    arrays = _arrays(path)
    taken = {key: next((name for name in names if name in arrays), None) for key, names in _NAMES.items()}
    missing = [key for key in ("ptr", "pos", "z") if taken[key] is None]
    if missing:
        raise UserError(
            f"{path} holds no structures of atoms: it has {', '.join(arrays) or 'nothing'}, but no "
            f"{' and no '.join(missing)}; expected {LAYOUT}"
        )
    known = {key: arrays[name] for key, name in taken.items() if name is not None}
    starts = known["ptr"].astype(np.int64).reshape(-1)
    count = len(starts) - 1
    if count < 1 or starts[0] != 0 or np.any(np.diff(starts) < 1) or starts[-1] != len(known["z"]):
        raise UserError(
            f"{path}: ptr should rise from 0 to the {len(known['z']):,} atoms of z, the first atom of each structure "
            "and the end"
        )
    if known["pos"].shape != (len(known["z"]), 3):
        raise UserError(f"{path}: pos has the shape {known['pos'].shape}, expected ({len(known['z'])}, 3)")
    cells = _cells(known.get("cell"), count, path)
    pbc = _pbc(known.get("pbc"), cells, count, path)
    others = {name: array for name, array in arrays.items() if name not in taken.values()}
    per = {name: _per(name, array, count, len(known["z"]), path) for name, array in others.items()}
    systems = [str(name) for name in known["name"]] if "name" in known else [""] * count
    texts = {name: str(array) for name, array in arrays.items() if array.dtype.kind == "U" and not array.ndim}
    return Found(
        str(path),
        [_structure(path, number, starts, known, cells, pbc, others, per, systems) for number in range(count)],
        {target: [unit] for target, unit in said_units(texts).items()},
    )


def _structure(
    path: Path, number: int, starts: NDArray[np.int64], known: dict[str, NDArray[Any]], cells: NDArray[np.float64],
    pbc: NDArray[np.bool_], others: dict[str, NDArray[Any]], per: dict[str, str], systems: list[str],
) -> Structure:  # fmt: skip
    atoms = slice(starts[number], starts[number + 1])
    targets = {
        name: np.asarray(array[atoms] if per[name] == "atom" else array[number], _dtype(array))
        for name, array in others.items()
        if per[name]
    }
    return Structure(
        known["z"][atoms].astype(np.int64), known["pos"][atoms].astype(np.float64), cells[number], pbc[number],
        targets, f"{path}, structure {number}", systems[number],
        frozenset(name for name, kind in per.items() if kind == "atom"),
    )  # fmt: skip


def _dtype(array: NDArray[Any]) -> Any:
    return np.int64 if array.dtype.kind in "biu" else np.float64


def _cells(given: NDArray[Any] | None, count: int, path: Path) -> NDArray[np.float64]:
    if given is None:
        return np.zeros((count, 3, 3))
    if given.shape not in ((count, 3, 3), (3, 3), (count, 9)):
        raise UserError(f"{path}: cell has the shape {given.shape}, expected ({count}, 3, 3)")
    return np.array(np.broadcast_to(given.reshape(-1, 3, 3), (count, 3, 3)), np.float64)


def _pbc(given: NDArray[Any] | None, cells: NDArray[np.float64], count: int, path: Path) -> NDArray[np.bool_]:
    if given is None:
        return np.repeat(np.any(cells != 0, axis=(1, 2)).reshape(-1, 1), 3, axis=1)
    if given.shape not in ((count, 3), (3,), (count,), ()):
        raise UserError(f"{path}: pbc has the shape {given.shape}, expected ({count}, 3)")
    rows = given[:, None] if given.shape == (count,) and count != 3 else given
    return np.array(np.broadcast_to(rows, (count, 3)), np.bool_)


def _per(name: str, array: NDArray[Any], count: int, num_atoms: int, path: Path) -> str:
    """Whether an array has a row per structure or per atom; text has no say."""
    if array.dtype.kind not in "biuf":
        return ""
    if array.shape[:1] == (num_atoms,) and (name in ("force", "forces") or num_atoms != count):
        return "atom"
    if array.shape[:1] == (count,):
        return "structure"
    raise UserError(
        f"{path}: {name} has the shape {array.shape}, which is neither a row per structure ({count:,}) nor a row per "
        f"atom ({num_atoms:,})"
    )


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if isinstance(file, np.ndarray):
                raise ValueError("it holds one array without a name")
            return {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError) as error:
        reason = "it holds pickles or is damaged" if "pickle" in str(error) else error
        raise UserError(f"cannot read {path} as an .npz file of plain arrays: {reason}; expected {LAYOUT}") from None


def holds_structures(path: Path) -> bool:
    """Whether a file looks like this kind, by the names of its arrays."""
    try:
        with zipfile.ZipFile(path) as file:
            names = {name.removesuffix(".npy") for name in file.namelist()}
    except (OSError, zipfile.BadZipFile):
        return False
    return all(names & set(_NAMES[key]) for key in ("ptr", "pos", "z"))


def write_npz(table: StructureTable, path: Path | str) -> None:
    """Write structures as such a file, which is read faster than any other."""
    arrays = {name: target.values for name, target in table.targets.items() if target.has.all()}
    partly = [name for name in table.targets if name not in arrays]
    for name in partly:  # what is missing is not a number, which readers take for missing
        target = table.targets[name]
        rows = target.has if target.per == "structure" else np.repeat(target.has, table.counts)
        arrays[name] = np.where(rows.reshape(-1, *[1] * (target.values.ndim - 1)), target.values, np.nan)
    names = {"name": np.array(table.names)} if table.names else {}
    units = {f"{target}_unit": np.array(unit) for target, unit in DEFAULTS.items()}
    named: dict[str, Any] = {
        "ptr": table.starts, "pos": table.positions, "z": table.numbers.astype(np.int16), "cell": table.cells,
        "pbc": table.pbc, **names, **units, **arrays,
    }  # fmt: skip
    np.savez_compressed(path, **named)
