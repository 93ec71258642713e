"""Small packed batches whose edges are found by trying all images."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Batch = dict[str, Tensor]


class Made(NamedTuple):
    """One structure."""

    numbers: NDArray[np.int64]
    positions: NDArray[np.float64]
    cell: NDArray[np.float64]
    """Zeros where nothing is periodic."""


def crystal(seed: int = 0, num_atoms: int = 5, size: float = 4.5, elements: Sequence[int] = (3, 8, 29)) -> Made:
    """Atoms in a skew cell, none too close to another one."""
    rng = np.random.default_rng(seed)
    cell = size * (np.eye(3) + rng.uniform(-0.15, 0.15, (3, 3)))
    places: list[NDArray[np.float64]] = []
    while len(places) < num_atoms:
        place = rng.uniform(0, 1, 3)
        apart = [((place - other + 0.5) % 1 - 0.5) @ cell for other in places]
        if all(np.linalg.norm(each) > 1.4 for each in apart):
            places.append(place)
    return Made(rng.choice(np.array(elements), num_atoms), np.array(places) @ cell, cell)


def molecule(seed: int = 0, num_atoms: int = 5, size: float = 4.0) -> Made:
    """Atoms without a cell."""
    made = crystal(seed, num_atoms, size)
    return made._replace(cell=np.zeros((3, 3)))


def edges(made: Made, cutoff: float, images: int = 3) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int8]]:
    """Source, target and image of the source, sorted by target."""
    found = []
    shifts = list(product(range(-images, images + 1), repeat=3)) if made.cell.any() else [(0, 0, 0)]
    for target, source, shift in product(range(len(made.numbers)), range(len(made.numbers)), shifts):
        vector = made.positions[source] + np.array(shift) @ made.cell - made.positions[target]
        if 1e-9 < np.linalg.norm(vector) < cutoff:
            found.append((source, target, *shift))
    table = np.array(found, np.int64).reshape(-1, 5)
    return table[:, 0], table[:, 1], table[:, 2:].astype(np.int8)


def packed(structures: Sequence[Made], cutoff: float, atoms: int = 0, padding_edges: int = 0, room: int = 0) -> Batch:
    """A batch of structures, with some padding `atoms` and edges, and room for empty structures behind them."""
    parts: dict[str, list[NDArray[np.generic]]] = {"source": [], "target": [], "shift": []}
    first = 0
    for made in structures:
        source, target, shift = edges(made, cutoff)
        parts["source"].append(source + first)
        parts["target"].append(target + first)
        parts["shift"].append(shift)
        first += len(made.numbers)
    last = first + atoms - 1
    num_structures = len(structures) + room
    sources = np.concatenate([*parts["source"], np.full(padding_edges, last)])
    counts = [len(made.numbers) for made in structures]
    arrays = {
        "z": np.concatenate([*(made.numbers for made in structures), np.zeros(atoms, np.int64)]),
        "pos": np.concatenate([*(made.positions for made in structures), np.zeros((atoms, 3))]),
        "batch": np.concatenate([np.repeat(np.arange(len(structures)), counts), np.full(atoms, num_structures)]),
        "cell": np.concatenate([np.stack([made.cell for made in structures]), np.zeros((room, 3, 3))]),
        "edge_source": sources,
        "edge_target": np.concatenate([*parts["target"], np.full(padding_edges, last)]),
        "edge_shift": np.concatenate([*parts["shift"], np.zeros((padding_edges, 3), np.int8)]),
        "by_source": np.argsort(sources, kind="stable"),
    }
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def one_sided(batch: Batch, seed: int = 0) -> Batch:
    """Without a third of the edges, so that not every edge has one that goes back."""
    keep = torch.from_numpy(np.random.default_rng(seed).random(len(batch["edge_source"])) > 0.33)
    found = batch | {name: batch[name][keep] for name in ("edge_source", "edge_target", "edge_shift")}
    return found | {"by_source": torch.argsort(found["edge_source"], stable=True)}
