"""What is known of the calculation behind a snapshot: cell, electrons, temperature."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isoscale.errors import UserError
from isoscale.science.electronic.integrals import BOLTZMANN

RYDBERG = 13.605693012183622
"""eV."""
BOHR = 0.5291772105638411
"""Å."""
MOST_TEXT = 1 << 26
"""Characters to look at: what is larger is data that was named by mistake."""


@dataclass(frozen=True)
class Calculation:
    """One calculation, in eV, Å and K."""

    path: str
    volume: float
    """Of the cell."""
    num_atoms: int
    num_electrons: float
    temperature: float
    grid: tuple[int, ...] | None = None
    """Points in each direction, where the file says."""


def read_calculation(path: Path) -> Calculation:
    """From `.info.json`, or from the output of Quantum ESPRESSO."""
    try:
        with path.open(errors="replace") as file:
            text = file.read(MOST_TEXT)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    found = _from_json(path, text) if path.suffix == ".json" else _from_espresso(path, text)
    for what in ("volume", "num_atoms", "num_electrons", "temperature"):
        value = getattr(found, what)
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{path} says that {what} is {value:g}; it must be larger than 0")
    return found


def _from_json(path: Path, text: str) -> Calculation:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not a complete JSON file: {error}") from None
    try:
        atoms = values["atoms"]
        return Calculation(
            str(path), _volume(atoms["cell"]), len(atoms["numbers"]), float(values["number_of_electrons_exact"]),
            float(values["temperature"]), _grid(values),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path} does not describe a calculation: {problem}. Needed are temperature (in K), "
            "number_of_electrons_exact, and atoms with cell (in Å) and numbers"
        ) from None


def _volume(cell: Any) -> float:
    return abs(float(np.linalg.det(np.asarray(cell, np.float64).reshape(3, 3))))


def _grid(values: dict[str, Any]) -> tuple[int, ...] | None:
    found = values.get("grid_dimensions")
    return tuple(int(count) for count in found) if found else None


_NUMBER = r"([-+]?\d+\.?\d*(?:[eEdD][-+]?\d+)?)"
_APART = r"(?:\s+|(?=-))"
_AXIS = rf"a\(\d\)\s*=\s*\(\s*{_NUMBER}{_APART}{_NUMBER}{_APART}{_NUMBER}\s*\)"
_WIDTH = rf"(?:smearing, width|gaussian broad\.) \(Ry\)\s*=\s*{_NUMBER}"
_ESPRESSO = {
    "the lattice parameter": r"celldm\(1\)\s*=\s*" + _NUMBER,
    "the number of atoms": r"number of atoms/cell\s*=\s*(\d+)",
    "the number of electrons": r"number of electrons\s*=\s*" + _NUMBER,
    "the width of Fermi-Dirac smearing": _WIDTH,
}
_FERMI_DIRAC = r"Fermi-Dirac smearing|ngauss\s*=\s*-99"
REMEDY = "write a .info.json beside it, or name another file with `info:`"


def _from_espresso(path: Path, text: str) -> Calculation:
    found = {what: re.search(pattern, text) for what, pattern in _ESPRESSO.items()}
    axes = re.findall(_AXIS, text)[:3]
    missing = [what for what, match in found.items() if match is None] + ["the crystal axes"] * (len(axes) < 3)
    if missing:
        raise UserError(f"{path} is not a usable output of Quantum ESPRESSO: {', '.join(missing)} not found; {REMEDY}")
    _check_espresso(path, text)
    length, num_atoms, num_electrons, width = (_number(match[1]) for match in found.values() if match)
    cell = np.asarray([[_number(value) for value in axis] for axis in axes]) * length * BOHR
    grid = re.search(r"FFT dimensions:\s*\(\s*(\d+),\s*(\d+),\s*(\d+)\)", text)
    return Calculation(
        str(path), _volume(cell), int(num_atoms), num_electrons, width * RYDBERG / BOLTZMANN,
        tuple(map(int, grid.groups())) if grid else None,
    )  # fmt: skip


def _check_espresso(path: Path, text: str) -> None:
    """Refuse numbers that would mean something else."""
    if not re.search(_FERMI_DIRAC, text):
        raise UserError(f"{path} has no Fermi-Dirac smearing, and the width of another is not a temperature; {REMEDY}")
    if "CELL_PARAMETERS" in text:
        raise UserError(f"{path} changes its cell on the way, so that the first one is not that of the end; {REMEDY}")


def _number(text: str) -> float:
    """As Fortran writes it."""
    return float(text.lower().replace("d", "e"))
