"""What systems hold, in numbers: frames, atoms, labels, and how many neighbours atoms have."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isoscale.science.potentials.frames import SortedSystem
from isoscale.science.potentials.neighbour_cache import look
from isoscale.science.potentials.neighbours import suggested_sel
from isoscale.science.potentials.systems import LABELS, System


def describe_systems(
    systems: Mapping[str, Sequence[System]], cutoff: float, types: Sequence[str] | None = None,
    sel: Sequence[int] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Plain values: the systems of each split, and the neighbours of all of them together.

    `types` are those of a model (by default all that systems name), and `sel` what it has room for.
    """
    known = list(types or _all_types([system for listed in systems.values() for system in listed]))
    listed = {split: [SortedSystem(system, known) for system in given] for split, given in systems.items()}
    return {
        "systems": {split: [_system(each) for each in given] for split, given in listed.items()},
        "neighbours": _neighbours([each for given in listed.values() for each in given], cutoff, known, sel),
    }


def _all_types(systems: Sequence[System]) -> list[str]:
    """The names of types in the order in which systems name them; where none does, their numbers."""
    names = dict.fromkeys(name for system in systems for name in system.type_names or ())
    largest = max((int(system.types.max()) for system in systems if system.type_names is None), default=-1)
    return [*names, *map(str, range(len(names), largest + 1))]


def _system(frames: SortedSystem) -> dict[str, Any]:
    system = frames.system
    counts = zip(frames.types, frames.atoms, strict=True)
    formula = " ".join(f"{name}×{count}" if name.isdigit() else f"{name}{count}" for name, count in counts if count)
    return {
        "name": system.name,
        "frames": len(system),
        "atoms": system.num_atoms,
        "formula": f"up to {formula}" if "types" in system.columns else formula,
        "periodic": system.is_periodic,
        "labels": [label for label in LABELS if label in system.labels],
    }


def _neighbours(
    systems: Sequence[SortedSystem], cutoff: float, types: Sequence[str], sel: Sequence[int] | None
) -> dict[str, Any]:
    for system in systems:
        system.check(0, len(system))
    seen = [look(system, cutoff, 0, len(system)) for system in systems]
    most = np.max([each.most for each in seen], axis=0).tolist()
    nearest = min(seen, key=lambda each: each.nearest)
    room = list(sel) if sel is not None and len(sel) == len(types) else [None] * len(types)
    listed = zip(types, most, room, suggested_sel(most), strict=True)
    return {
        "cutoff": cutoff,
        "types": [dict(zip(("name", "most", "sel", "suggested"), each, strict=True)) for each in listed],
        "nearest": nearest.nearest if np.isfinite(nearest.nearest) else None,
        "nearest_in": systems[seen.index(nearest)].system.name,
    }
