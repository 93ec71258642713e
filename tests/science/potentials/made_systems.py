"""Small systems of atoms at random places, in folders and HDF5 files."""

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from isoscale.data.sources import Sources
from isoscale.science.potentials.atomic_systems import AtomicSystems

TYPES = ["O", "H"]
CUTOFF = 2.5


class Alone:
    """The one process there is."""

    rank, world_size = 0, 1

    def all_gather(self, value: Any, what: str = "") -> list[Any]:
        return [value]


def arrays(num_frames: int = 3, types: tuple[int, ...] = (0, 1, 1, 0, 1), seed: int = 0) -> dict[str, np.ndarray]:
    """What the files of a set hold: coord, box, energy, force and virial, one row per frame."""
    random, num_atoms = np.random.default_rng(seed), len(types)
    box = np.eye(3) * 3 + random.normal(size=(num_frames, 3, 3)) * 0.2
    coord = random.uniform(-1, 4, (num_frames, num_atoms * 3))
    return {
        "coord": coord.astype(np.float32),
        "box": box.reshape(num_frames, 9).astype(np.float32),
        "energy": random.normal(size=num_frames),
        "force": random.normal(size=(num_frames, num_atoms * 3)),
        "virial": random.normal(size=(num_frames, 9)),
    }


def write(
    folder: Path, sets: list[dict[str, np.ndarray]] | None = None, types: tuple[int, ...] = (0, 1, 1, 0, 1),
    names: list[str] | None = TYPES, periodic: bool = True,
) -> Path:  # fmt: skip
    """A system in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "type.raw").write_text("\n".join(map(str, types)) + "\n")
    if names is not None:
        (folder / "type_map.raw").write_text("\n".join(names))
    if not periodic:
        (folder / "nopbc").touch()
    for number, each in enumerate(sets if sets is not None else [arrays(types=types)]):
        (folder / f"set.{number:03}").mkdir(exist_ok=True)
        for key, values in each.items():
            np.save(folder / f"set.{number:03}" / f"{key}.npy", values)
    return folder


def write_hdf5(path: Path, group: str, sets: list[dict[str, np.ndarray]], types: tuple[int, ...] = (0, 1, 1, 0, 1)):
    """The same in a group of an HDF5 file, in chunks."""
    with h5py.File(path, "a") as file:
        file[f"{group}/type.raw"] = np.array(types)
        file[f"{group}/type_map.raw"] = np.array([name.encode() for name in TYPES])
        for number, each in enumerate(sets):
            for key, values in each.items():
                file.create_dataset(f"{group}/set.{number:03}/{key}.npy", data=values, chunks=True)


def opened(*paths: object, cutoff: float = CUTOFF, types: list[str] = TYPES, **arguments: Any) -> Sources:
    """Systems for training, with their neighbours."""
    said: list[str] = arguments.pop("said", [])
    ranks = arguments.pop("ranks", Alone())
    return AtomicSystems([str(path) for path in paths], **arguments).with_neighbours(types, cutoff, ranks, said.append)


def brute_force(positions: np.ndarray, box: np.ndarray | None, cutoff: float) -> set[tuple[int, int, tuple[int, ...]]]:
    """Every pair within the cutoff, both ways, by looking at all images that could matter."""
    shifts = [(0, 0, 0)]
    if box is not None:
        inverse = np.linalg.inv(box)
        reach = cutoff * np.linalg.norm(inverse, axis=0) + np.ptp(positions @ inverse, axis=0) + 1
        shifts = list(itertools.product(*(range(-int(most), int(most) + 1) for most in np.ceil(reach))))
    images = np.array(shifts) @ (np.zeros((3, 3)) if box is None else box)
    found = set()
    for centre, neighbour in itertools.product(range(len(positions)), repeat=2):
        distances = np.linalg.norm(positions[neighbour] + images - positions[centre], axis=1)
        for number in np.flatnonzero(distances < cutoff):
            if centre != neighbour or any(shifts[number]):
                found.add((centre, neighbour, shifts[number]))
    return found
