"""A small input of DeePMD-kit and systems of atoms for it, which tests change here and there."""

import json
from pathlib import Path
from typing import Any

import numpy as np

INPUT: dict[str, Any] = {
    "model": {
        "type_map": ["A", "B"],
        "descriptor": {"type": "se_e2_a", "sel": [16, 16], "rcut": 3.0, "neuron": [4, 8], "axis_neuron": 2},
        "fitting_net": {"neuron": [8, 8]},
    },
    "learning_rate": {"start_lr": 1e-3, "stop_lr": 1e-5, "decay_steps": 10},
    "loss": {},
    "training": {
        "training_data": {"systems": ["one", "two"], "batch_size": 1},
        "validation_data": {"systems": "three", "batch_size": 1},
        "numb_steps": 40,
    },
}
SYSTEMS = ("one", "two", "three")


def changed(**changes: Any) -> dict[str, Any]:
    """The input with some keys set, `training__seed=3`, or left out, with `...` as the value."""
    found: dict[str, Any] = json.loads(json.dumps(INPUT))
    for words, value in changes.items():
        *sections, last = words.split("__")
        inside = found
        for name in sections:
            inside = inside.setdefault(name, {})
        if value is ...:
            inside.pop(last, None)
        else:
            inside[last] = value
    return found


def write(folder: Path, **changes: Any) -> Path:
    """The input as a file, beside folders in the places of its systems."""
    for name in SYSTEMS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    path = folder / "input.json"
    path.write_text(json.dumps(changed(**changes), indent=1))
    return path


def write_systems(folder: Path, num_frames: int = 4) -> None:
    """Frames of six atoms in a box of 5 Å, two of them of the first type."""
    random = np.random.default_rng(0)
    for name in SYSTEMS:
        inside = folder / name / "set.000"
        inside.mkdir(parents=True, exist_ok=True)
        (folder / name / "type.raw").write_text("0\n1\n1\n0\n1\n1\n")
        (folder / name / "type_map.raw").write_text("A\nB\n")
        grid = np.array([(x, y, 0) for x in (0.0, 2.5) for y in (0.0, 1.7, 3.3)])
        coord = grid + random.normal(0, 0.1, (num_frames, 6, 3))
        np.save(inside / "coord.npy", coord.reshape(num_frames, -1))
        np.save(inside / "box.npy", np.tile((5 * np.eye(3)).ravel(), (num_frames, 1)))
        np.save(inside / "energy.npy", random.normal(0, 1, num_frames))
        np.save(inside / "force.npy", random.normal(0, 1, (num_frames, 18)))
