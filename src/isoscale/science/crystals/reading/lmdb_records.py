"""LMDB as graph toolkits write it: a record a structure, a pickled dict of arrays, read without running anything."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isoscale.data.formats.lmdb import LmdbSource
from isoscale.errors import UserError
from isoscale.science.crystals.reading.ase_files import numeric
from isoscale.science.crystals.reading.found import NAMES_OF_SYSTEMS, Found
from isoscale.science.crystals.reading.structure import Structure

_NAMES = {
    "positions": ("pos", "positions", "cart_coords", "coords"),
    "numbers": ("atomic_numbers", "z", "numbers"),
    "cell": ("cell", "lattice", "lattice_vectors"),
    "pbc": ("pbc",),
}
_IGNORED = frozenset({"natoms", "num_atoms", "num_nodes", "sid", "fid", "dataset", "distance_matrix", "fixed"})
"""Entries that say nothing of a structure that its atoms do not."""

Record = dict[str, Any]


def read_lmdb(path: Path) -> Found:
    """All records of a file or folder."""
    source = LmdbSource(path)
    records = [_record(source, number) for number in range(len(source))]
    counts = [len(_known(record, "numbers", source.locate(at)).reshape(-1)) for at, record in enumerate(records)]
    targets = [_targets(record) for record in records]
    per_atom = _per_atom(targets, counts)
    return Found(
        str(path),
        [
            _structure(record, found, per_atom, source.locate(at))
            for at, (record, found) in enumerate(zip(records, targets, strict=True))
        ],
    )


def _record(source: LmdbSource, number: int) -> Record:
    """The entries of one record, arrays as numpy has them."""
    batch = source.fetch(torch.tensor([number]))
    return {key: _array(value[0]) for key, value in batch.items()}


def _array(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _array(each) for key, each in value.items()}
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def _known(record: Record, key: str, place: str) -> NDArray[Any]:
    for name in _NAMES[key]:
        if record.get(name) is not None:
            return np.asarray(record[name])
    raise UserError(
        f"{place} has no {key} ({' or '.join(_NAMES[key])}), so that it is no structure; it has "
        f"{', '.join(map(str, record))}"
    )


def _targets(record: Record) -> dict[str, NDArray[Any]]:
    known = {name for names in _NAMES.values() for name in names} | _IGNORED
    inner = record.get("targets")
    entries = {**record, **(inner if isinstance(inner, Mapping) else {})}
    return numeric({key: value for key, value in entries.items() if key not in known})


def _per_atom(targets: Sequence[Mapping[str, NDArray[Any]]], counts: Sequence[int]) -> frozenset[str]:
    """Entries with a row for each atom in every record; structures of one atom do not tell."""
    fits: dict[str, bool] = {}
    for found, count in zip(targets, counts, strict=True):
        for name, values in found.items():
            if count > 1:
                fits[name] = fits.get(name, True) and values.shape[:1] == (count,)
    return frozenset(name for name, does in fits.items() if does) | {"force", "forces"}


def _structure(record: Record, targets: dict[str, NDArray[Any]], per_atom: frozenset[str], place: str) -> Structure:
    numbers = _known(record, "numbers", place).reshape(-1).astype(np.int64)
    positions = _known(record, "positions", place).astype(np.float64)
    if positions.shape != (len(numbers), 3):
        raise UserError(f"{place}: positions have the shape {positions.shape}, expected ({len(numbers)}, 3)")
    has_cell = any(record.get(name) is not None for name in _NAMES["cell"])
    cell = _known(record, "cell", place).astype(np.float64) if has_cell else np.zeros((3, 3))
    if cell.size != 9:
        raise UserError(f"{place}: the cell has the shape {cell.shape}, expected (3, 3)")
    pbc = np.asarray(record["pbc"]).reshape(-1) if record.get("pbc") is not None else np.array(has_cell)
    shaped = {
        name: values.reshape(()) if name not in per_atom and values.shape == (1,) else values
        for name, values in targets.items()
    }
    name = next((str(record[key]) for key in NAMES_OF_SYSTEMS if isinstance(record.get(key), str)), "")
    return Structure(
        numbers, positions, cell.reshape(3, 3), np.array(np.broadcast_to(pbc, (3,)), np.bool_), shaped, place, name,
        per_atom & shaped.keys(),
    )  # fmt: skip


def holds_structures(path: Path) -> bool:
    """Whether the first record looks like a structure."""
    try:
        record = _record(LmdbSource(path), 0)
    except UserError:
        return False
    return all(any(name in record for name in _NAMES[key]) for key in ("positions", "numbers"))
