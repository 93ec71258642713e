"""Alloys of many sizes, and a small recipe that learns them."""

from pathlib import Path
from typing import Any

import numpy as np

from isoscale.science.crystals import alloys

STEPS = 9
"""Of 5 in an epoch, the last one smaller; a log and an evaluation every 3."""


def small(path: Path, network: str = "painn") -> dict[str, Any]:
    """A recipe with targets of several kinds, and weights that move."""
    return {
        "seed": 3,
        "task": {
            "class": "crystal", "model": {"class": network, "width": 8, "layers": 1, "cutoff": 3.5},
            "targets": {"energy": {}, "forces": {"loss": "huber"}, "stress": {}, "bulk_modulus": {"of": "structure"}},
        },
        "data": {
            "class": "structures", "train": str(path), "split": {"val": 7}, "batch_size": 6,
            "transforms": [{"class": "periodic_edges", "cutoff": 3.5, "adaptive_cutoff": True}],
        },
        "optimizer": {"name": "adam", "lr": 3e-3},
        "train": {
            "steps": STEPS, "epochs": None, "threads": 1, "evaluate": "3 steps", "clip": 10.0, "ema": 0.9,
            "loss_weights": {"energy": {"name": "sigmoid", "start": 1, "end": 10}, "forces": 10},
        },
        "parallel": {"reduce": "tree", "shards": 4},
        "checkpoint": {"every": "1 steps", "keep": 100},
        "observe": {"every": 3},
    }  # fmt: skip


def made(path: Path, count: int = 35) -> Path:
    """An .npz file of alloys."""
    np.savez(path, **alloys.make(alloys.Making(count=count)))
    return path
