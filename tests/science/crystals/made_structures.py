"""Structures whose energies, forces and stresses agree: atoms on springs, strained and shaken."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isoscale.science.crystals.reading.elements import SYMBOLS
from isoscale.science.crystals.reading.structure import Structure

SPRING = 2.0
"""eV/Å² of each atom to its site."""
BULK = 0.8
"""eV/Å³ per unit of strain."""
BINDING = {29: -3.7, 28: -5.5}
"""eV per atom."""
LATTICE = 3.6


def cubic(
    repeats: Sequence[int], number: int = 29, seed: int = 0, strain: float = 0.03, shake: float = 0.08
) -> Structure:
    """An fcc crystal of cubic cells, strained and shaken at random, with its exact energy, forces and stress.

    The energy is of springs in fractional coordinates plus a harmonic energy of the strain, so that the stress at fixed
    fractions is that of the strain alone, up to the small part that springs add.
    """
    random = np.random.default_rng(seed)
    basis = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    cells = np.stack(np.meshgrid(*map(np.arange, repeats), indexing="ij"), -1).reshape(-1, 3)
    sites = (cells[:, None] + basis[None]).reshape(-1, 3) * LATTICE
    drawn = random.normal(size=(3, 3)) * strain
    tensor = (drawn + drawn.T) / 2
    moves = random.normal(size=sites.shape) * shake
    deformed = np.eye(3) + tensor
    cell = np.diag(np.array(repeats) * LATTICE) @ deformed
    moves -= moves.mean(0)
    volume = float(np.prod(np.array(repeats) * LATTICE))
    energy = (
        len(sites) * BINDING[number] + 0.5 * SPRING * float((moves**2).sum())
        + 0.5 * BULK * volume * float((tensor**2).sum())
    )  # fmt: skip
    stress = BULK * tensor @ np.linalg.inv(deformed) * volume / abs(float(np.linalg.det(cell)))
    return Structure(
        np.full(len(sites), number), sites @ deformed + moves, cell, np.full(3, True),
        {
            "energy": np.array(energy), "forces": -SPRING * moves + 0.0, "stress": (stress + stress.T) / 2,
        },
        place=f"made {seed}",
    )  # fmt: skip


def many(
    count: int = 40, sizes: Sequence[Sequence[int]] = ((2, 2, 2), (1, 1, 1), (2, 1, 1)), **options: float
) -> list[Structure]:
    """Crystals of several sizes."""
    return [cubic(sizes[seed % len(sizes)], seed=seed, **options) for seed in range(count)]  # type: ignore[arg-type]


def write_extxyz(
    path: Path, structures: Sequence[Structure], scale: dict[str, float] | None = None, header: str = ""
) -> Path:
    """A file as other people write it; `scale` multiplies a target."""
    factors = scale or {}
    with path.open("w") as file:
        for structure in structures:
            values = {key: value * factors.get(key, 1.0) for key, value in structure.targets.items()}
            forces = values.get("forces")
            properties = "species:S:1:pos:R:3" + (":forces:R:3" if forces is not None else "")
            words = [f'Lattice="{_words(structure.cell)}"', f"Properties={properties}", header]
            words += [f"energy={float(values['energy']):.10f}"] if "energy" in values else []
            words += [f'stress="{_words(values["stress"])}"'] if "stress" in values else []
            file.write(f'{len(structure)}\n{" ".join(filter(None, words))} pbc="T T T"\n')
            for at, (number, position) in enumerate(zip(structure.numbers, structure.positions, strict=True)):
                row = [*position, *(forces[at] if forces is not None else ())]
                file.write(f"{SYMBOLS[number]} {' '.join(f'{value:.10f}' for value in row)}\n")
    return path


def _words(values: NDArray[np.float64]) -> str:
    return " ".join(f"{value:.10f}" for value in np.asarray(values).reshape(-1))
