"""What is known of the calculation behind a snapshot: cell, electrons, temperature."""

import json
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
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    return _from_json(path, text) if path.suffix == ".json" else _from_espresso(path, text)


def _from_json(path: Path, text: str) -> Calculation:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from None
    try:
        atoms = values["atoms"]
        return Calculation(
            str(path), _volume(atoms["cell"]), len(atoms["numbers"]), float(values["number_of_electrons_exact"]),
            float(values["temperature"]), _grid(values),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} does not describe a calculation: {type(error).__name__}: {error}. Needed are "
            "temperature, number_of_electrons_exact and atoms with cell and numbers"
        ) from None


def _volume(cell: Any) -> float:
    return abs(float(np.linalg.det(np.asarray(cell, np.float64).reshape(3, 3))))


def _grid(values: dict[str, Any]) -> tuple[int, ...] | None:
    found = values.get("grid_dimensions")
    return tuple(int(count) for count in found) if found else None


_NUMBER = r"([-+]?\d+\.?\d*(?:[eEdD][-+]?\d+)?)"
_ESPRESSO = {
    "the lattice parameter": r"celldm\(1\)\s*=\s*" + _NUMBER,
    "the number of atoms": r"number of atoms/cell\s*=\s*(\d+)",
    "the number of electrons": r"number of electrons\s*=\s*" + _NUMBER,
    "the smearing width": r"smearing, width \(Ry\)\s*=\s*" + _NUMBER,
}


def _from_espresso(path: Path, text: str) -> Calculation:
    found = {what: re.search(pattern, text) for what, pattern in _ESPRESSO.items()}
    axes = re.findall(rf"a\(\d\)\s*=\s*\(\s*{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s*\)", text)[:3]
    missing = [what for what, match in found.items() if match is None] + ["the crystal axes"] * (len(axes) < 3)
    if missing:
        raise UserError(f"{path} is no output of Quantum ESPRESSO that can be used: {', '.join(missing)} not found")
    length, num_atoms, num_electrons, width = (float(match[1]) for match in found.values() if match)
    cell = np.asarray(axes, np.float64) * length * BOHR
    grid = re.search(r"FFT dimensions:\s*\(\s*(\d+),\s*(\d+),\s*(\d+)\)", text)
    return Calculation(
        str(path), _volume(cell), int(num_atoms), num_electrons, width * RYDBERG / BOLTZMANN,
        tuple(map(int, grid.groups())) if grid else None,
    )  # fmt: skip
