"""`isoscale data info` of systems of atoms: what is in them, and how many neighbours their atoms have."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isoscale.errors import UserError
from isoscale.observe.tables import aligned
from isoscale.science.potentials.atomic_systems import AtomicSystems
from isoscale.science.potentials.frames import SortedSystem
from isoscale.science.potentials.neighbour_cache import look
from isoscale.science.potentials.neighbours import suggested_sel
from isoscale.science.potentials.systems import LABELS, System, find_systems

DEFAULT_CUTOFF = 6.0
"""Å."""


def of_paths(paths: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Of systems at paths, with `cutoff=8` among the options for another than usual."""
    cutoff = options.get("cutoff", DEFAULT_CUTOFF)
    if options.keys() - {"cutoff"} or not isinstance(cutoff, int | float) or cutoff <= 0:
        given = " ".join(f"{key}={value}" for key, value in options.items())
        raise UserError(f"systems of atoms take cutoff=NUMBER, in Å; found {given}")
    systems = {"system": [system for path in paths for system in find_systems(path)]}
    why = "the default; cutoff=8 takes another" if cutoff == DEFAULT_CUTOFF else "as asked for"
    return {"title": ", ".join(paths), **describe_systems(systems, float(cutoff)), "why": why}


def of_recipe(data: Any, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the systems of a recipe, beside what its model has room for; None of other data."""
    if not isinstance(data, AtomicSystems):
        return None
    model = values["task"].get("model")
    model = model if isinstance(model, Mapping) else {}
    descriptor = model.get("descriptor")
    descriptor = descriptor if isinstance(descriptor, Mapping) else {}
    why = "task.model.descriptor.cutoff" if "cutoff" in descriptor else "the default"
    cutoff = float(descriptor.get("cutoff", DEFAULT_CUTOFF))
    sel = descriptor.get("sel")
    room = list(sel) if isinstance(sel, list) else None
    return {**describe_systems(data.systems, cutoff, model.get("types"), room), "why": why}


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


def lines(facts: dict[str, Any]) -> list[str]:
    """What is known of systems, for people."""
    found = [facts["title"]]
    for split, systems in facts["systems"].items():
        found += [
            "",
            *aligned([(split, "frames", "atoms", "formula", "periodic", "labels"), *map(_row, systems)], indent="  "),
        ]
    near = facts["neighbours"]
    has_room = any(each["sel"] is not None for each in near["types"])
    head = ("type", "most", *(["sel"] if has_room else []), "suggested sel")
    rows = [_neighbour_row(each, has_room) for each in near["types"]]
    found += ["", f"neighbours within {near['cutoff']:g} Å ({facts['why']})", *aligned([head, *rows], indent="  ")]
    if near["nearest"] is not None:
        found.append(f"  the nearest two atoms are {near['nearest']:.3f} Å apart, in {near['nearest_in']}")
    return [*found, "  suggested: a tenth more than the most that any atom has, rounded up to a multiple of 4"]


def _row(system: dict[str, Any]) -> tuple[str, ...]:
    numbers = f"{system['frames']:,}", f"{system['atoms']:,}"
    labels = ", ".join(system["labels"]) or "none"
    return system["name"], *numbers, system["formula"], "yes" if system["periodic"] else "no", labels


def _neighbour_row(found: dict[str, Any], has_room: bool) -> tuple[str, ...]:
    room = "" if found["sel"] is None else str(found["sel"]) + (" too few" if found["sel"] < found["most"] else "")
    return found["name"], str(found["most"]), *([room] if has_room else []), str(found["suggested"])
