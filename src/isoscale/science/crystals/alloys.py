"""Alloys of metals, made at once: structures of 1 to 32 atoms whose energies are those of effective-medium theory.

Something to learn where nothing is at hand. ASE's EMT (Jacobsen, Stoltze & Nørskov 1996) is a simple potential of seven
metals, but a real one: energies of many bodies, forces, stresses, and elastic properties that follow from them.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from isoscale.data.files import data_folder, writing_into
from isoscale.errors import UserError
from isoscale.science.crystals.reading.ase_files import ase_module
from isoscale.science.crystals.structures import Structures
from isoscale.system.printing import echo

LATTICE = {"Al": 4.05, "Ni": 3.52, "Cu": 3.61, "Pd": 3.89, "Ag": 4.09, "Pt": 3.92, "Au": 4.08}
"""Å, the edge of the cube of each metal that effective-medium theory knows."""
SHAPES = ((1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2), (2, 2, 3), (2, 3, 3), (3, 3, 3), (2, 4, 4))
"""Of supercells, in primitive cells."""
MOST_STRAIN, MOST_SHIFT = 0.04, 0.12
"""Of cells, and of atoms in Å."""
STRAIN = 2e-3
"""For the bulk modulus, up and down."""


@dataclass(frozen=True)
class Making:
    """Settings of alloys; all that decides what they are."""

    count: int = 400
    elements: tuple[str, ...] = ("Ni", "Cu", "Pd", "Ag", "Au")
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [each for each in self.elements if each not in LATTICE]
        if unknown or not self.elements:
            raise UserError(f"elements: {', '.join(unknown) or 'none'}; expected some of {', '.join(LATTICE)}")
        if self.count < 1:
            raise UserError(f"count={self.count}: at least one structure is needed")


class Alloys(Structures):
    """Alloys that are made at the first start, with energies, forces, stresses and bulk moduli (GPa)."""

    def __init__(
        self, count: int = Making.count, elements: list[str] | None = None, seed: int = 0,
        split: dict[str, float | int] | None = None, **structures: Any,
    ) -> None:  # fmt: skip
        """`count` structures of `elements` (Ni, Cu, Pd, Ag and Au), cut at random into splits; others as Structures."""
        making = Making(count, Making.elements if elements is None else tuple(elements), seed)
        known = hashlib.sha256(json.dumps(asdict(making)).encode()).hexdigest()[:12]
        path = data_folder() / "crystals" / f"alloys-{known}.npz"
        if not path.exists():
            echo(f"computing {count} alloys by effective-medium theory, once: {path}", err=True)
            write(path, making)
        super().__init__(path=str(path), split=split, **structures)


def make_files(
    folder: Path,
    report: Callable[[str, int, int], None],
    count: int = Making.count,
    elements: list[str] | None = None,
    seed: int = Making.seed,
) -> list[str]:
    """Write `alloys.npz`; returns what became of it, in words. What was made already is left alone."""
    path = folder / "alloys.npz"
    if path.exists():
        return [f"{path} is there already"]
    making = Making(count, Making.elements if elements is None else tuple(elements), seed)
    write(path, making, lambda done: report(path.name, done, count))
    return [f"{path}: {count} structures of {', '.join(making.elements)}"]


def write(path: Path, making: Making, report: Callable[[int], None] = lambda done: None) -> None:
    """Write alloys to an .npz file, which gets its name when it is whole."""
    aside = path.with_name(f".making-{uuid4().hex}.npz")
    with writing_into(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            np.savez(aside, allow_pickle=False, **make(making, report))
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)


def make(making: Making, report: Callable[[int], None] = lambda done: None) -> dict[str, NDArray[Any]]:
    """Structures and what effective-medium theory says of them, as the arrays of a file."""
    emt = ase_module("ase.calculators.emt", "alloys")
    random, found = np.random.default_rng(making.seed), []
    for number in range(making.count):
        atoms = _drawn(random, making.elements)
        atoms.calc = emt.EMT()
        found.append(atoms)
        atoms.info["bulk_modulus"] = _bulk_modulus(atoms)
        report(number + 1)
    return {
        "ptr": np.cumsum([0, *map(len, found)]),
        "z": np.concatenate([atoms.numbers for atoms in found]),
        "pos": np.concatenate([atoms.positions for atoms in found]),
        "cell": np.stack([atoms.cell.array for atoms in found]),
        "pbc": np.stack([atoms.pbc for atoms in found]),
        "energy": np.array([atoms.get_potential_energy() for atoms in found]),
        "forces": np.concatenate([atoms.get_forces() for atoms in found]),
        "stress": np.stack([atoms.get_stress(voigt=False) for atoms in found]),
        "bulk_modulus": np.array([atoms.info["bulk_modulus"] for atoms in found]),
        "name": np.array([atoms.get_chemical_formula("hill", empirical=True) for atoms in found]),
    }


def _drawn(random: np.random.Generator, elements: tuple[str, ...]) -> Any:
    """A strained piece of a face-centred lattice, with elements and shifts at random."""
    from ase import Atoms

    repeats = SHAPES[random.integers(len(SHAPES))]
    symbols = random.choice(random.choice(elements, random.integers(1, len(elements) + 1)), int(np.prod(repeats)))
    edge = float(np.mean([LATTICE[str(symbol)] for symbol in symbols]))
    cell = 0.5 * edge * np.array([[0.0, 1, 1], [1, 0, 1], [1, 1, 0]])
    places = np.stack(np.meshgrid(*map(np.arange, repeats), indexing="ij"), -1).reshape(-1, 3)
    atoms = Atoms([str(symbol) for symbol in symbols], places @ cell, cell=cell * np.reshape(repeats, (3, 1)), pbc=True)
    strain = random.uniform(-MOST_STRAIN, MOST_STRAIN, (3, 3))
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + 0.5 * (strain + strain.T)), scale_atoms=True)
    atoms.positions += random.uniform(0, MOST_SHIFT) * random.normal(size=atoms.positions.shape)
    return atoms


def _bulk_modulus(atoms: Any) -> float:
    """-V dp/dV in GPa, by stresses of cells that are a little larger and smaller."""
    from ase.units import GPa

    pressures = []
    for change in (-STRAIN, STRAIN):
        other = atoms.copy()
        other.calc = atoms.calc.__class__()
        other.set_cell(atoms.cell.array * (1 + change), scale_atoms=True)
        pressures.append(-other.get_stress(voigt=False).trace() / 3)
    return float((pressures[0] - pressures[1]) / (6 * STRAIN) / GPa)
