"""`isoscale data info` of structures: elements, sizes, targets with their units, what is odd, and where."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoscale.errors import UserError
from isoscale.observe.tables import aligned
from isoscale.science.crystals.reading import opening
from isoscale.science.crystals.reading.checks import Finding, examine
from isoscale.science.crystals.reading.elements import SYMBOLS
from isoscale.science.crystals.reading.loading import Loaded, load
from isoscale.science.crystals.reading.table import StructureTable, Target
from isoscale.science.crystals.reading.units import DEFAULTS, PRESSURES, declared
from isoscale.science.crystals.structures import Structures

LARGE_FORCE = 20.0
"""eV/Å: beyond that an atom is hardly in a solid."""
LARGE_STRESS = 100.0
"""GPa."""
FAR = 8.0
"""Energies so many deviations (by the median) from what their composition explains are outliers."""
LEAST_FAR = 0.5
"""eV/atom: nearer ones are none."""
NEAR = 0.5
"""Å: nearer atoms are on top of each other."""
MOST_PLACES = 3
ELEMENTS_PER_LINE = 10


def recognises(name: str) -> bool:
    """Whether a path holds structures."""
    return opening.recognises(Path(name).expanduser())


def of_paths(paths: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Of files, with their units among the options: `energy=eV/atom stress=-kbar`."""
    known = {target: str(unit) for target, unit in options.items() if target in DEFAULTS}
    unknown = options.keys() - known.keys()
    if unknown:
        raise UserError(
            f"structures take units, such as energy=eV/atom stress=-kbar; found {', '.join(sorted(unknown))}"
        )
    loaded = load(opening.open_files(list(paths)), declared(known), {})
    findings = [each for each in examine(loaded.table) if each.target not in known]
    return {
        "title": ", ".join(paths),
        "splits": {"structures": of_table(loaded.table)},
        "units": units_of(loaded),
        "findings": [_finding(each) for each in findings],
        "remarks": loaded.remarks,
    }


def of_recipe(data: Any, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of the structures of a recipe; None of other data."""
    if not isinstance(data, Structures):
        return None
    found = {each.evidence: each for findings in data.findings.values() for each in findings}
    return {
        "splits": {split: of_table(table) for split, table in data.tables.items()},
        "units": units_of(next(iter(data.loaded.values()))),
        "findings": [_finding(each) for each in found.values()],
        "remarks": data.remarks,
    }


def units_of(loaded: Loaded) -> dict[str, dict[str, str]]:
    """The unit of each target in the files, and how that is known."""
    return {target: {"unit": loaded.units[target], "known_by": loaded.sources[target]} for target in DEFAULTS}


def _finding(found: Finding) -> dict[str, Any]:
    return {"target": found.target, "verdict": found.verdict, "evidence": found.evidence, "unit": found.unit}


def of_table(table: StructureTable) -> dict[str, Any]:
    """Plain values of some structures."""
    volumes = np.abs(np.linalg.det(table.cells))[table.pbc.all(1)]
    return {
        "structures": len(table),
        "atoms": _range(table.counts),
        "elements": _elements(table),
        "periodic": {"all": int(table.pbc.all(1).sum()), "none": int((~table.pbc.any(1)).sum())},
        "volume_per_atom": _range(volumes / table.counts[table.pbc.all(1)]) if len(volumes) else None,
        "systems": len(set(table.names)) if table.names else 0,
        "targets": {name: _target(table, name, target) for name, target in table.targets.items()},
        "outliers": [*_outliers(table)],
        "nearest": nearest_atoms(table),
    }


def _range(values: NDArray[Any]) -> dict[str, float]:
    return {
        "min": float(np.min(values)), "median": float(np.median(values)), "max": float(np.max(values)),
        "total": float(np.sum(values)),
    }  # fmt: skip


def _elements(table: StructureTable) -> list[dict[str, Any]]:
    numbers, atoms = np.unique(table.numbers, return_counts=True)
    pairs = np.unique(np.stack([table.structure_of, table.numbers]), axis=1)[1]
    structures = dict(zip(*map(np.ndarray.tolist, np.unique(pairs, return_counts=True)), strict=True))
    return [
        {"symbol": SYMBOLS[number], "atoms": count, "structures": structures[number]}
        for number, count in zip(numbers.tolist(), atoms.tolist(), strict=True)
    ]


def _target(table: StructureTable, name: str, target: Target) -> dict[str, Any]:
    rows = target.has if target.per == "structure" else np.repeat(target.has, table.counts)
    values = target.values[rows]
    shown = values / table.counts[rows].astype(float) if name == "energy" else values
    return {
        "per": target.per, "has": int(target.has.sum()), "shape": list(values.shape[1:]),
        "min": float(shown.min()), "max": float(shown.max()), "mean": float(shown.mean()),
        "rms": float(np.sqrt(np.mean(np.square(shown, dtype=np.float64)))),
        "is_whole": bool(values.dtype.kind == "i"),
    }  # fmt: skip


def _outliers(table: StructureTable) -> list[dict[str, Any]]:
    """Structures that are unlike the others, by target, the worst first."""
    found = []
    if "forces" in table.targets:
        target = table.targets["forces"]
        lengths = np.linalg.norm(target.values, axis=1)
        largest = np.maximum.reduceat(lengths, table.starts[:-1]) * target.has
        found.append(_listed(table, "forces", largest, LARGE_FORCE, "eV/Å", "of an atom"))
    if "stress" in table.targets:
        target = table.targets["stress"]
        largest = np.abs(target.values).max((1, 2)) / PRESSURES["GPa"] * target.has
        found.append(_listed(table, "stress", largest, LARGE_STRESS, "GPa", "of an entry"))
    if "energy" in table.targets:
        found.append(_energy_outliers(table))
    return [each for each in found if each is not None]


def _listed(
    table: StructureTable, name: str, sizes: NDArray[np.float64], limit: float, unit: str, what: str
) -> dict[str, Any] | None:
    beyond = np.flatnonzero(sizes > limit)
    if not len(beyond):
        return None
    worst = beyond[np.argsort(-sizes[beyond], kind="stable")][:MOST_PLACES].tolist()
    return {
        "target": name, "structures": len(beyond), "beyond": limit, "unit": unit, "what": what,
        "worst": [{"value": float(sizes[at]), "place": table.places(at)} for at in worst],
    }  # fmt: skip


def _energy_outliers(table: StructureTable) -> dict[str, Any] | None:
    """Energies far from what least squares on the composition explain."""
    target = table.targets["energy"]
    elements, rows = np.unique(table.numbers, return_inverse=True)
    if target.has.sum() < 3 * len(elements):
        return None
    flat = np.bincount(table.structure_of * len(elements) + rows, minlength=len(table) * len(elements))
    fractions = (flat.reshape(len(table), len(elements)) / table.counts[:, None])[target.has]
    energies = (target.values / table.counts)[target.has]
    left = energies - fractions @ np.linalg.lstsq(fractions, energies, rcond=None)[0]
    left = np.abs(left - np.median(left))
    far = max(LEAST_FAR, FAR * 1.4826 * float(np.median(left)))
    sizes = np.zeros(len(table))
    sizes[target.has] = left
    return _listed(table, "energy", sizes, round(far, 2), "eV/atom", "from what the composition explains")


def nearest_atoms(table: StructureTable, cutoff: float = 3.0) -> dict[str, Any] | None:
    """The two atoms nearest to each other, images too; None where nobody can tell, or none are within the cutoff."""
    try:
        from vesin import NeighborList
    except ImportError:
        return None
    search = NeighborList(cutoff=cutoff, full_list=False)
    best, where, near = np.inf, 0, 0
    for at, structure in enumerate(table):
        found = search.compute(structure.positions, structure.cell, structure.pbc.tolist(), "d")[0]
        smallest = float(found.min()) if len(found) else np.inf
        near += smallest < NEAR
        if smallest < best:
            best, where = smallest, at
    if not np.isfinite(best):
        return None
    return {"distance": best, "place": table.places(where), "on_top": near}


def lines(facts: dict[str, Any]) -> list[str]:
    """What is known of structures, for people."""
    found = [facts["title"]]
    for split, known in facts["splits"].items():
        found += ["", *_split_lines(split, known, facts["units"])]
    told = [each for each in facts["findings"] if each["evidence"]]
    if told:
        found += ["", "units, as far as the numbers tell"]
        found += [f"  {each['target']} ({_WORDS[each['verdict']]}): {each['evidence']}" for each in told]
        wrong = [f"{each['target']}={each['unit']}" for each in told if each["verdict"] == "wrong" and each["unit"]]
        if wrong:
            declare = ", ".join(each.replace("=", ": ") for each in wrong)
            found.append(f"  declare them in the recipe: data.units: {{{declare}}}; or here: {' '.join(wrong)}")
    if facts["remarks"]:
        found += ["", *facts["remarks"]]
    return found


_WORDS = {"wrong": "WRONG", "odd": "odd", "right": "right", "unknown": "not known"}


def _split_lines(split: str, known: dict[str, Any], units: dict[str, Any]) -> list[str]:
    atoms, periodic = known["atoms"], known["periodic"]
    kinds = [f"{periodic['all']:,} periodic"] if periodic["all"] else []
    kinds += [f"{periodic['none']:,} not periodic"] if periodic["none"] else []
    partly = known["structures"] - periodic["all"] - periodic["none"]
    kinds += [f"{partly:,} periodic in some directions"] if partly else []
    kinds += [f"{known['systems']:,} systems"] if known["systems"] > 1 else []
    found = [
        f"{split}: {known['structures']:,}, {', '.join(kinds)}",
        f"  atoms: {atoms['min']:.0f} to {atoms['max']:.0f}, half have {atoms['median']:.0f} or fewer; "
        f"{atoms['total']:,.0f} in all",
    ]  # fmt: skip
    if known["volume_per_atom"]:
        volume = known["volume_per_atom"]
        found.append(f"  volume per atom: {volume['min']:.1f} to {volume['max']:.1f} Å³, median {volume['median']:.1f}")
    found += _element_lines(known["elements"])
    rows = [_target_row(name, target, known["structures"], units) for name, target in known["targets"].items()]
    if rows:
        head = ("target", "unit", "structures", "smallest", "mean", "largest", "rms", "in the files")
        found += aligned([head, *rows], indent="  ")
    else:
        found.append("  no targets")
    for each in known["outliers"]:
        beyond = f"{each['target']} beyond {each['beyond']:g} {each['unit']} {each['what']}"
        found.append(f"  outliers: {each['structures']:,} with {beyond}")
        found += [f"    {worst['value']:.4g} in {worst['place']}" for worst in each["worst"]]
    near = known["nearest"]
    if near is not None:
        found.append(f"  the nearest two atoms are {near['distance']:.3f} Å apart, in {near['place']}")
        if near["on_top"]:
            found.append(f"  {near['on_top']:,} structures have atoms on top of each other (nearer than {NEAR} Å)")
    return found


def _element_lines(elements: Sequence[dict[str, Any]]) -> list[str]:
    words = [f"{each['symbol']} {each['atoms']:,}" for each in elements]
    parts = [words[at : at + ELEMENTS_PER_LINE] for at in range(0, len(words), ELEMENTS_PER_LINE)]
    first = f"  {len(words)} element{'s' if len(words) > 1 else ''} (atoms): "
    return [(first if not at else " " * len(first)) + ", ".join(part) for at, part in enumerate(parts)]


def _target_row(name: str, target: dict[str, Any], total: int, units: dict[str, Any]) -> tuple[str, ...]:
    ours = {"energy": "eV/atom", "forces": "eV/Å", "stress": "eV/Å³"}.get(name, "")
    count = f"{target['has']:,}" if target["has"] == total else f"{target['has']:,} of {total:,}"
    known = units.get(name)
    said = f"{known['unit']} ({_KNOWN[known['known_by']]})" if known else f"{_shape(target)} per {target['per']}"
    numbers = (f"{target[key]:.5g}" for key in ("min", "mean", "max", "rms"))
    return name, ours, count, *numbers, said


_KNOWN = {
    "recipe": "declared",
    "detected": "detected",
    "file": "the file says so",
    "format": "its format",
    "assumed": "assumed",
}


def _shape(target: dict[str, Any]) -> str:
    return " × ".join(map(str, target["shape"])) or ("a whole number" if target["is_whole"] else "one number")
