"""Boxes in files, of fields that are soon made and can be learned: gas that follows the matter, but smoother."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from isoscale.science.cosmology.fields import FIELDS

SIDE = 12
RECIPE: dict[str, Any] = {
    "seed": 3,
    "task": {"class": "field_regression", "model": {"class": "unet3d", "width": 4, "depth": 2}},
    "data": {
        "class": "boxes", "crop": 8, "wrap": True, "eval_samples": 6, "batch_size": 4, "samples_per_epoch": 12,
        "transforms": ["cube_symmetry"],
    },
    "optimizer": {"name": "adam", "lr": 1e-2},
    "train": {"epochs": 3, "threads": 1},
    "parallel": {"reduce": "tree"},
    "checkpoint": {"every": "1 steps", "keep": 100},
    "observe": {"every": 1},
}  # fmt: skip


def arrays(seed: int = 0, side: int = SIDE) -> dict[str, Any]:
    """The arrays of a periodic box, between -1 and 1."""
    matter = np.random.default_rng(seed).normal(size=(4, side, side, side)).astype(np.float32) / 8
    gas = sum(np.roll(matter, shift, axis) for shift in (-1, 1) for axis in (1, 2, 3)) / 6
    return {"Nbody": matter, "Hydro": np.concatenate([gas, gas[:1] * 0.5])}


def write(path: Path, seed: int = 0, side: int = SIDE, **changes: Any) -> Path:
    """An HDF5 file of such a box, with other arrays in the place of its own where they are given."""
    with h5py.File(path, "w") as file:
        for name, array in {**arrays(seed, side), **changes}.items():
            file.create_dataset(name, data=array, chunks=(1, *[min(4, length) for length in array.shape[1:]]))
            file[name].attrs["fields"] = list(FIELDS[name])[: len(array)]
        file.attrs["cell_size"] = 0.04
    return path


def recipe(folder: Path, **data: Any) -> dict[str, Any]:
    """A training on two such boxes, and a third one for validation."""
    paths = [str(write(folder / f"box{seed}.h5", seed)) for seed in range(3)]
    return {**RECIPE, "data": {**RECIPE["data"], "train": paths[:2], "val": paths[2], **data}}
