"""Whatever ASE reads: output of VASP and other codes, CIF, trajectories, and databases of ASE's own."""

import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoscale.errors import UserError
from isoscale.science.crystals.reading.found import NAMES_OF_SYSTEMS, Found, said_units
from isoscale.science.crystals.reading.structure import Structure, Targets

REFUSED = ("bundletrajectory", "mysql", "postgresql", "mariadb")
"""Formats that are not read: those that may hold pickles, which run what they like, and those that are no files."""
_OF_ATOMS = ("numbers", "positions", "tags", "momenta", "masses", "move_mask")
"""Arrays that are no targets."""


def ase_module(name: str, path: object) -> Any:
    """A module of ase, or what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"reading {path} needs ase: pip install 'isoscale[crystals]' ({error})") from None


def read_with_ase(path: Path) -> Found:
    """All structures of a file in any format that ASE knows, in ASE's units."""
    formats, io = ase_module("ase.io.formats", path), ase_module("ase.io", path)
    try:
        kind = formats.filetype(str(path))
    except Exception as error:
        raise UserError(f"ASE does not know what kind of file {path} is: {error}") from None
    if kind in REFUSED:
        raise UserError(
            f"{path} is a {kind}, which is not read here; write it as extxyz: ase convert {path} new.extxyz"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of spacegroups and such, which are no matter here
            frames = io.read(str(path), index=":", format=kind, do_not_split_by_at_sign=True)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} cannot be read as {kind}: {reason}; it may be truncated or damaged") from None
    units: dict[str, set[str]] = {}
    structures = [_structure(atoms, f"{path}, frame {number}", units) for number, atoms in enumerate(frames)]
    said = {target: sorted(values) for target, values in units.items()}
    return Found(str(path), structures, said, known=kind not in ("json", "db", "traj"))


def _structure(atoms: Any, place: str, units: dict[str, set[str]]) -> Structure:
    results = dict(getattr(atoms.calc, "results", None) or {})
    per_atom = {key: array for key, array in atoms.arrays.items() if key not in _OF_ATOMS}
    targets = {**numeric(atoms.info), **numeric(per_atom), **numeric(results)}
    for target, unit in said_units(atoms.info).items():
        units.setdefault(target, set()).add(unit)
    named = {*per_atom, *(key for key in results if key in ("forces", "magmoms", "charges", "energies", "stresses"))}
    name = next((str(atoms.info[key]) for key in NAMES_OF_SYSTEMS if isinstance(atoms.info.get(key), str)), "")
    return Structure(
        np.asarray(atoms.numbers, np.int64), np.asarray(atoms.positions, np.float64),
        np.asarray(atoms.cell.array, np.float64), np.asarray(atoms.pbc, np.bool_), targets, place, name,
        frozenset(named & targets.keys()),
    )  # fmt: skip


def read_database(path: Path) -> Found:
    """All rows of a database of ASE (`.db`, `.json`); its key-value pairs and data are targets too."""
    database = ase_module("ase.db", path)
    try:
        with database.connect(str(path), use_lock_file=False) as connected:
            structures = [_row(row, path) for row in connected.select(sort="id")]
    except UserError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} cannot be read as a database of ASE: {reason}") from None
    return Found(str(path), structures)


def _row(row: Any, path: Path) -> Structure:
    pairs, data = dict(row.key_value_pairs), dict(row.data)
    stored = {key: row[key] for key in _RESULTS if row.get(key) is not None}
    count = len(row.numbers)
    extra = numeric(data)
    per_atom = {"forces", "magmoms", "charges"} & stored.keys()
    per_atom |= {key for key, values in extra.items() if values.shape[:1] == (count,) and count > 1}
    name = next((str(pairs[key]) for key in NAMES_OF_SYSTEMS if isinstance(pairs.get(key), str)), "")
    return Structure(
        np.asarray(row.numbers, np.int64), np.asarray(row.positions, np.float64), np.asarray(row.cell, np.float64),
        np.asarray(row.pbc, np.bool_), {**extra, **numeric(pairs), **numeric(stored)}, f"{path}, row {row.id}", name,
        frozenset(per_atom),
    )  # fmt: skip


_RESULTS = ("energy", "forces", "stress", "free_energy", "magmom", "magmoms", "charges", "dipole")


def numeric(values: Mapping[str, Any]) -> Targets:
    """Those values that are numbers, as arrays."""
    found = {}
    for key, value in values.items():
        array = _numbers(value)
        if array is not None:
            found[key] = array
    return found


def _numbers(value: Any) -> NDArray[Any] | None:
    if value is None or isinstance(value, str | bytes | Mapping):
        return None
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    if array.dtype.kind not in "biuf" or not array.size:
        return None
    return array.astype(np.int64 if array.dtype.kind in "biu" else np.float64)
