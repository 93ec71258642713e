"""Structures made for tests, and their neighbours by looking at every image."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from isoscale.science.crystals.reading.structure import Structure
from isoscale.science.crystals.reading.table import StructureTable


def brute_force(positions: Any, cell: Any, pbc: Any, cutoff: float) -> dict[tuple[int, ...], float]:
    """Source, target, image and distance of every edge, by looking at all images that could be near enough."""
    positions, cell = np.asarray(positions, float), np.asarray(cell, float)
    spread = np.ptp(positions, axis=0)
    whole = complete(cell, pbc)
    reach = np.linalg.norm(spread) + cutoff
    most = np.where(pbc, np.ceil(reach * np.linalg.norm(np.linalg.inv(whole), axis=0)), 0).astype(int)
    ranges = [np.arange(-count, count + 1) for count in most]
    images = np.stack(np.meshgrid(*ranges, indexing="ij"), -1).reshape(-1, 3)
    found = {}
    for target, here in enumerate(positions):
        for source, there in enumerate(positions):
            distances = np.linalg.norm(there + images @ cell - here, axis=1)
            for place in np.nonzero(distances <= cutoff)[0]:
                if source != target or images[place].any():
                    found[(source, target, *images[place].tolist())] = float(distances[place])
    return found


def complete(cell: Any, pbc: Any) -> np.ndarray:
    """A cell whose vectors that are not periodic are unit vectors across the others."""
    cell = np.where(np.asarray(pbc)[:, None], cell, 0.0)
    _, sizes, across = np.linalg.svd(cell)
    free = iter(across[(sizes > 1e-12).sum() :])
    return np.stack([row if is_used else next(free) for row, is_used in zip(cell, pbc, strict=True)])


def structure(num_atoms: int, seed: int, place: str = "", pbc: Any = (True, True, True), **targets: Any) -> Structure:
    """Atoms at random, none too near to another, in a cell of any shape."""
    random = np.random.default_rng(seed)
    cell = np.eye(3) * 2.6 * num_atoms ** (1 / 3) + random.uniform(-0.4, 0.4, (3, 3))
    side = int(np.ceil(num_atoms ** (1 / 3)))
    lattice = np.stack(np.meshgrid(*[np.arange(side)] * 3), -1).reshape(-1, 3)[:num_atoms] / side
    positions = lattice @ cell + random.uniform(-0.2, 0.2, (num_atoms, 3))
    return Structure(
        random.integers(1, 90, num_atoms), positions, cell, np.array(pbc), targets, place or f"made {seed}"
    )


def table(num_structures: int = 5, first: int = 0, **arguments: Any) -> StructureTable:
    """Structures of different sizes, with energies and forces."""
    made = []
    for seed in range(first, first + num_structures):
        num_atoms = 1 + seed % 4 * 3
        random = np.random.default_rng(seed + 1000)
        labels = {"energy": np.array(random.normal()), "forces": random.normal(size=(num_atoms, 3))}
        made.append(structure(num_atoms, seed, **labels, **arguments))
    return StructureTable.of(made)


class Ranks:
    """Processes that are threads, which hear each other."""

    def __init__(self, rank: int, world: int, barrier: threading.Barrier, heard: list[Any]) -> None:
        self.rank, self.world_size = rank, world
        self._barrier, self._heard = barrier, heard

    def all_gather(self, value: Any, what: str = "") -> list[Any]:
        self._heard[self.rank] = value
        self._barrier.wait(30)
        values = list(self._heard)
        self._barrier.wait(30)
        return values


def together(world: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` gives, or raises, on each of several ranks."""
    barrier, heard, found = threading.Barrier(world), [None] * world, [None] * world

    def one(rank: int) -> None:
        try:
            found[rank] = work(Ranks(rank, world, barrier, heard))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
