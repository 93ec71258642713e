"""Names and shapes of targets: other people's spellings, and the many ways to write a stress."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoscale.errors import UserError, nearest
from isoscale.science.crystals.reading.structure import Structure

SPELLINGS = {
    "energy": (
        "energy", "potential_energy", "total_energy", "ref_energy", "dft_energy", "free_energy",
        "energy_total", "corrected_total_energy",
    ),
    "forces": ("forces", "force", "ref_forces", "dft_forces", "ref_force", "dft_force"),
    "stress": ("stress", "ref_stress", "dft_stress", "virial", "virials", "ref_virial", "ref_virials", "dft_virial"),
}  # fmt: skip
"""What files call our targets, in small letters and with underscores; the first one that a file has is taken."""
VIRIALS = frozenset(name for name in SPELLINGS["stress"] if "virial" in name)
"""Of which stress is −virial / volume."""
VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))
"""Of ASE: xx, yy, zz, yz, xz, xy."""

RESERVED = frozenset(
    {"z", "pos", "batch", "cell", "pbc", "ptr", "edge_source", "edge_target", "edge_shift", "by_source", "edge_index"}
)
"""What batches call other things; values of files that have such a name need another one."""

Renames = dict[str, str | None]
"""Our name of a target to that of the files; None leaves it out."""


def check_renames(present: Iterable[str], renames: Renames) -> None:
    """Refuse names that no file has."""
    listed = list(present)
    for name, given in renames.items():
        if given is not None and given not in listed:
            meant = nearest(given, listed)
            suggestion = f'; did you mean "{meant}"?' if meant else f"; there is {', '.join(listed) or 'no target'}"
            raise UserError(f'targets.{name} is "{given}", but the files have no such values{suggestion}')


def usual_names(present: Iterable[str], renames: Renames) -> dict[str, str]:
    """What each target of a file is called here: {name in the file: name}."""
    listed = list(present)
    found = {given: name for name, given in renames.items() if given is not None and given in listed}
    by_plain = {_plain(name): name for name in reversed(listed)}
    for name, spellings in SPELLINGS.items():
        given = next((by_plain[each] for each in spellings if each in by_plain), None)
        if name not in renames and given is not None:
            found.setdefault(given, name)
    taken = {*found.values(), *renames}
    return {name: found.get(name, name) for name in listed if name in found or name not in taken}


def reserved(names: dict[str, str], where: str) -> tuple[dict[str, str], list[str]]:
    """The names without those that batches use for something else, and what is left out."""
    kept = {given: name for given, name in names.items() if name not in RESERVED and not name.startswith("has_")}
    return kept, [
        f"{where}: {name} is left out, because batches use this name; data.targets.my_{name}={name} takes it"
        for name in names.values()
        if name not in kept.values()
    ]


def rivals(present: Iterable[str], chosen: dict[str, str]) -> dict[str, list[str]]:
    """Other values of a file that could have been meant by a target that has one of them."""
    others: dict[str, list[str]] = {}
    for given, name in chosen.items():
        if name in SPELLINGS:
            found = [each for each in present if each != given and _plain(each) in SPELLINGS[name]]
            others |= {name: found} if found else {}
    return others


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def renamed(structures: Sequence[Structure], names: dict[str, str], where: str) -> tuple[list[Structure], list[str]]:
    """Structures with our names and shapes of targets, and what was changed on the way."""
    stress = next((given for given, name in names.items() if name == "stress"), None)
    tensors, remarks = _stresses(structures, stress, where) if stress else ([None] * len(structures), [])
    found = []
    for structure, tensor in zip(structures, tensors, strict=True):
        targets = {names[given]: values for given, values in structure.targets.items() if given in names}
        if tensor is not None:
            targets["stress"] = tensor
        per_atom = structure.per_atom
        if per_atom is not None:
            per_atom = frozenset(names[given] for given in per_atom if given in names)
        found.append(replace(structure, targets={key: _shaped(key, structure, targets[key]) for key in targets},
                             per_atom=per_atom))  # fmt: skip
    return found, remarks


def _shaped(name: str, structure: Structure, values: NDArray[Any]) -> NDArray[Any]:
    """A target in the shape that its name asks for."""
    values = np.asarray(values)
    expected = {"energy": (), "forces": (len(structure), 3)}.get(name)
    if expected is None:
        return values
    if values.size != int(np.prod(expected)):
        shape = " × ".join(map(str, values.shape)) or "one number"
        wanted = "one number" if name == "energy" else f"{len(structure)} × 3"
        raise UserError(f"{structure.place}: {name} is {shape}, expected {wanted}")
    return values.reshape(expected).astype(np.float64, copy=False)


def _stresses(
    structures: Sequence[Structure], given: str, where: str
) -> tuple[list[NDArray[np.float64] | None], list[str]]:
    """Symmetric tensors (3, 3), with the sign of a stress."""
    tensors = [
        tensor_of(structure.targets[given], structure.place) if given in structure.targets else None
        for structure in structures
    ]  # fmt: skip
    there = [tensor for tensor in tensors if tensor is not None]
    remarks = []
    lower = max(float(np.abs(np.tril(tensor, -1)).max()) for tensor in there)
    upper = max(float(np.abs(np.triu(tensor, 1)).max()) for tensor in there)
    if lower == 0.0 and upper > 0.0:
        tensors = [None if tensor is None else tensor + np.triu(tensor, 1).T for tensor in tensors]
        remarks.append(f"{where}: {given} is an upper triangle; its other half was filled in")
    tensors = [None if tensor is None else (tensor + tensor.T) / 2 for tensor in tensors]
    if _plain(given) in VIRIALS:
        pairs = zip(structures, tensors, strict=True)
        tensors = [None if tensor is None else -tensor / volume(structure) for structure, tensor in pairs]
        remarks.append(f"{where}: stress is −{given} / volume")
    return tensors, remarks


def volume(structure: Structure) -> float:
    """Of the cell, in Å³."""
    found = abs(float(np.linalg.det(structure.cell)))
    if not found:
        raise UserError(f"{structure.place} has a virial, but no cell whose volume makes a stress of it")
    return found


def tensor_of(values: Any, place: str = "") -> NDArray[np.float64]:
    """A stress (3, 3) of one that is given so, as 9 numbers, or as 6 in Voigt's order of ASE."""
    given = np.asarray(values, np.float64)
    if given.size == 9:
        return given.reshape(3, 3)
    if given.size != 6:
        raise UserError(f"{place}: a stress has 6 or 9 numbers, found {given.size}")
    flat, tensor = given.reshape(6), np.zeros((3, 3))
    for value, (row, column) in zip(flat, VOIGT, strict=True):
        tensor[row, column] = tensor[column, row] = value
    return tensor
