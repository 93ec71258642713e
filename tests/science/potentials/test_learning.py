"""A potential of water learns as fast as it should, from a DeePMD-kit input file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isoscale

STEPS = 80


def input_file(data: Path, folder: Path) -> Path:
    """The example's input, in single precision, with the paths of its data."""
    asked: dict[str, Any] = json.loads((data / "input_torch.json").read_text())
    for part in ("training_data", "validation_data"):
        systems = asked["training"][part]["systems"]
        asked["training"][part]["systems"] = [str(data / "water" / Path(name).name) for name in systems]
    for part in ("descriptor", "fitting_net"):
        asked["model"][part]["precision"] = "float32"
    path = folder / "input.json"
    path.write_text(json.dumps(asked))
    return path


@pytest.fixture(scope="module")
def run(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    """The first steps of the example, with the learning rate that they have in the whole of it."""
    folder = tmp_path_factory.mktemp("learning")
    overrides = {
        "training.numb_steps": STEPS, "learning_rate.stop_lr": 1e-3, "training.disp_freq": 20, "training.seed": 50,
        "training.stat_file": str(folder / "statistics.hdf5"),
    }  # fmt: skip
    return isoscale.train(input_file(shared / "data" / "potentials", folder), run=folder / "run", **overrides)


@pytest.mark.full
def test_errors_of_forces_fall_to_half_within_a_hundred_steps(run: isoscale.Run) -> None:
    curve = dict(run.history("val/force_rmse"))
    assert 0.7 < curve[20] < 0.9  # eV/Å: nothing is learned yet, and the forces themselves are that large
    assert curve[STEPS] < 0.65 * curve[20]


@pytest.mark.full
def test_statistics_are_those_of_another_program(run: isoscale.Run) -> None:
    """DeePMD-kit drew 60 other frames of the same data."""
    found = {name: buffer.cpu().numpy() for name, buffer in run.model().named_buffers()}
    expected = {
        "descriptor.mean": [0.0503492, 0.0481208],
        "descriptor.scale": [[0.1399143, 0.0858495], [0.1239442, 0.0767629]],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-3)
    np.testing.assert_allclose(found["energy_bias"], [-93.57426636, -187.14853271], rtol=1e-5)
