"""Files to one table: our names, our units, and structures that make sense."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from isoscale.data.files import short_names
from isoscale.errors import UserError
from isoscale.science.crystals.reading.elements import HEAVIEST
from isoscale.science.crystals.reading.found import Found
from isoscale.science.crystals.reading.names import Renames, check_renames, renamed, reserved, rivals, usual_names
from isoscale.science.crystals.reading.structure import Structure
from isoscale.science.crystals.reading.table import StructureTable, Target
from isoscale.science.crystals.reading.units import DEFAULTS, Unit, parse

FLAT = 1e-6
"""A cell whose volume is less than this part of the product of its edges is flat."""


@dataclass(frozen=True)
class Loaded:
    """Structures, and how their units are known."""

    table: StructureTable
    units: dict[str, str]
    """The unit that each target had in the files."""
    sources: dict[str, str]
    """How that is known: `recipe`, `detected`, `file`, `format` or `assumed`; the weakest of all files."""
    remarks: list[str] = field(default_factory=list)


def load(found: Sequence[Found], units: Mapping[str, Unit], renames: Renames, of_recipe: bool = True) -> Loaded:
    """The structures of files in one table.

    Of files that a recipe does not name, what they say of their units goes before `units`, and they need not have all
    values of `renames`.
    """
    if of_recipe:
        check_renames(dict.fromkeys(chain.from_iterable(map(_present, found))), renames)
    structures: list[Structure] = []
    remarks: list[str] = []
    used: dict[str, dict[str, str]] = {target: {} for target in DEFAULTS}
    stems = short_names([each.where for each in found]) if len(found) > 1 else [""]
    for each, stem in zip(found, stems, strict=True):
        chosen = {target: _unit(each, target, units, not of_recipe, remarks) for target in DEFAULTS}
        for target, (unit, source) in chosen.items():
            used[target][unit.name] = min(source, used[target].get(unit.name, source), key=_ORDER.index)
        structures += _usual(each, {target: unit for target, (unit, _) in chosen.items()}, renames, stem, remarks)
    table = _complete(StructureTable.of(structures), remarks)
    check(table)
    remarks += [f"{name} is left out: {why}" for name, why in table.left_out.items()]
    return Loaded(
        table,
        {target: " and ".join(names) for target, names in used.items()},
        {target: min(names.values(), key=_ORDER.index) for target, names in used.items()},
        list(dict.fromkeys(remarks)),
    )


_ORDER = ("assumed", "format", "file", "recipe")
"""From weak to strong."""


def _unit(
    found: Found, target: str, units: Mapping[str, Unit], files_first: bool, remarks: list[str]
) -> tuple[Unit, str]:
    said = found.unit_of(target)
    in_file = parse(said, target, f"{found.where}: the unit of {target}") if said is not None else None
    given = units.get(target)
    if given is not None and in_file is not None and given.name != in_file.name:
        chosen = in_file if files_first else given
        remarks.append(
            f"{found.where} says that {target} is in {in_file.name}, and data.units that it is in {given.name}: "
            f"taken as {chosen.name}"
        )
    if in_file is not None and (given is None or files_first):
        return in_file, "file"
    if given is not None:
        return given, "recipe"
    return parse(DEFAULTS[target], target), "format" if found.known else "assumed"


def _usual(found: Found, units: Mapping[str, Unit], renames: Renames, stem: str, remarks: list[str]) -> list[Structure]:
    """The structures of a file with our names and in our units."""
    present = _present(found)
    names, left_out = reserved(usual_names(present, renames), found.where)
    remarks += left_out
    for name, others in rivals(present, names).items():
        given = next(each for each, ours in names.items() if ours == name)
        if name not in renames:
            remarks.append(
                f"{found.where}: {name} is {given}; it has {' and '.join(others)} too, which "
                f"data.targets.{name}={others[0]} would take"
            )
    scaled = [_with_lengths(structure, units["length"].factor) for structure in found.structures]
    structures, said = renamed(scaled, names, found.where)
    remarks += said
    return [_with_units(structure, units, stem) for structure in structures]


def _present(found: Found) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(structure.targets for structure in found.structures)))


def _with_lengths(structure: Structure, factor: float) -> Structure:
    cell = structure.cell if structure.pbc.any() else np.zeros((3, 3))
    if factor == 1.0 and cell is structure.cell:
        return structure
    return replace(structure, positions=structure.positions * factor, cell=cell * factor)


def _with_units(structure: Structure, units: Mapping[str, Unit], stem: str) -> Structure:
    targets = dict(structure.targets)
    for target, unit in units.items():
        if target in targets and not unit.is_usual:
            factor = unit.factor * (len(structure) if unit.per_atom else 1)
            targets[target] = np.asarray(targets[target], np.float64) * factor
    return replace(structure, targets=targets, name=structure.name or stem)


def _complete(table: StructureTable, remarks: list[str]) -> StructureTable:
    """Targets that are not numbers are missing; says what is missing where others have it."""
    targets = {}
    for name, target in table.targets.items():
        bad = _structures_with(table, target, lambda values: ~np.isfinite(values)) & target.has
        if bad.any():
            remarks.append(
                f"{name} is not a number in {_of(bad.sum(), len(table))}, which count as having none: the first is "
                f"{table.places(int(bad.argmax()))}"
            )
        has = target.has & ~bad
        rows = bad if target.per == "structure" else np.repeat(bad, table.counts)
        values = np.where(rows.reshape(-1, *[1] * (target.values.ndim - 1)), 0, target.values)
        targets[name] = Target(values if bad.any() else target.values, target.per, has)
        missing = ~target.has
        if missing.any():
            remarks.append(
                f"{name} is missing in {_of(missing.sum(), len(table))}: the first is "
                f"{table.places(int(missing.argmax()))}"
            )
    return replace(table, targets={name: target for name, target in targets.items() if target.has.any()})


def _of(count: int, total: int) -> str:
    return f"{count:,} of {total:,} structures"


def _structures_with(
    table: StructureTable, target: Target, is_such: Callable[[NDArray[np.float64]], NDArray[np.bool_]]
) -> NDArray[np.bool_]:
    """The structures (N,) of which any value is such."""
    such = np.asarray(is_such(target.values).reshape(len(target.values), -1).any(1))
    if target.per == "structure":
        return such
    return np.asarray(np.bincount(table.structure_of, such, len(table)) > 0)


def check(table: StructureTable) -> None:
    """Refuse structures that are none: positions that are no numbers, unknown elements, cells without volume."""
    per_atom = table.structure_of
    _refuse(table, per_atom[~np.isfinite(table.positions).all(1)], "has positions that are not numbers")
    wrong = (table.numbers < 1) | (table.numbers > HEAVIEST)
    if wrong.any():
        number = int(table.numbers[wrong][0])
        _refuse(table, per_atom[wrong], f"has an atom of the atomic number {number}, which is no element")
    _refuse(table, np.flatnonzero(~np.isfinite(table.cells).all((1, 2))), "has a cell that is not made of numbers")
    flat = np.flatnonzero(_is_flat(table))
    if len(flat):
        cell = np.array2string(table.cells[flat[0]], precision=3, separator=", ").replace("\n", "")
        _refuse(
            table, flat,
            f"is periodic, but its cell {cell} has no volume there; give a cell, or pbc=\"F F F\" where nothing is "
            "periodic",
        )  # fmt: skip


def _is_flat(table: StructureTable) -> NDArray[np.bool_]:
    """Whether the periodic vectors of each cell are linearly dependent, or nearly so."""
    unit = np.eye(3)[None] * np.ones((len(table), 1, 1))
    vectors = np.where(table.pbc[:, :, None], table.cells, 0.0)
    lengths = np.linalg.norm(vectors, axis=2)
    scaled = vectors / np.where(lengths > 0, lengths, 1.0)[:, :, None]
    gram = scaled @ scaled.transpose(0, 2, 1)
    gram = np.where((table.pbc[:, :, None] & table.pbc[:, None, :]), gram, unit)
    return np.asarray(np.linalg.det(gram) < FLAT**2)


def _refuse(table: StructureTable, structures: NDArray[np.int64], what: str) -> None:
    if len(structures):
        count = len(np.unique(structures))
        others = f" (and {count - 1:,} others of {len(table):,})" if count > 1 else ""
        raise UserError(f"{table.places(int(structures[0]))} {what}{others}")
