"""A NaN on the way through the real command line: file, row, sample, layer and operation are named."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from isoscale import Run
from tests import warm
from tests.helpers import cli

pytestmark = pytest.mark.slow

NET = """
import torch
from torch import nn

class Logarithm(nn.Module):
    def forward(self, x):
        return torch.log(x)

class Net(nn.Module):
    def __init__(self, logarithm: bool = False):
        super().__init__()
        self.scale = Logarithm() if logarithm else nn.Identity()
        self.hidden = nn.Linear(4, 16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.hidden(self.scale(x)))))
"""
RECIPE = """
task: {class: supervised, model: {class: net.Net}, loss: mse}
data:
  class: isoscale.data.file_sources.Files
  columns: {input: ["part_1.npy", "part_2.npy"], target: target.npy}
  split: {train: 0.9, val: 0.1}
  on_nan: keep
  batch_size: 16
train: {epochs: 4}
observe: {every: 5, tensorboard: 0}
"""
ROW = 40
"""Of the second file."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    inputs = generator.uniform(0.1, 1, size=(200, 4)).astype("float32")
    np.save(tmp_path / "part_1.npy", inputs[:120])
    np.save(tmp_path / "part_2.npy", inputs[120:])
    np.save(tmp_path / "target.npy", inputs.sum(1, keepdims=True))
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def plant(folder: Path, value: float) -> None:
    rows = np.load(folder / "part_2.npy")
    rows[ROW, 2] = value
    np.save(folder / "part_2.npy", rows)


def reproduced(folder: Path) -> str:
    (script,) = folder.glob("run/not_finite/*/reproduce.py")
    done = warm.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def report(folder: Path) -> dict:
    (path,) = folder.glob("run/not_finite/*/report.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("options", [[], ["parallel.reduce=tree", "train.accumulate=2"]])
def test_a_nan_in_a_file_is_named_with_file_row_and_layer(options: list[str], folder: Path) -> None:
    plant(folder, np.nan)
    done = cli("train", "recipe.yaml", "--run", "run", *options, cwd=folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the data itself holds NaN, in input; it meets the model in layer model.hidden" in done.stderr
    assert f"part_2.npy, row {ROW} and target.npy, row {120 + ROW}" in done.stderr
    assert "run/not_finite/step_" in done.stderr and len(report(folder)["samples"]) == 1
    assert f"row {ROW}" in str(Run(folder / "run").record["message"]), "also in the record of the run"
    assert "the data itself holds NaN" in reproduced(folder)


def test_a_layer_that_takes_the_logarithm_of_a_negative_number_is_named(folder: Path) -> None:
    plant(folder, -0.5)
    done = cli("train", "recipe.yaml", "--run", "run", "task.model.logarithm=true", cwd=folder)
    assert done.returncode == 2
    assert "log made NaN out of finite numbers, in layer model.scale" in done.stderr
    assert "net.py:7: return torch.log(x)" in done.stderr and f"part_2.npy, row {ROW}" in done.stderr
    assert "log made NaN out of finite numbers, in layer model.scale" in reproduced(folder)


def test_after_the_sample_is_repaired_a_new_run_trains_to_its_end(folder: Path) -> None:
    plant(folder, -0.5)
    assert cli("train", "recipe.yaml", "--run", "run", "task.model.logarithm=true", cwd=folder).returncode == 2
    plant(folder, 0.5)
    assert cli("train", "recipe.yaml", "--run", "new", "task.model.logarithm=true", cwd=folder).returncode == 0


def test_a_learning_rate_that_explodes_is_called_that(folder: Path) -> None:
    done = cli("train", "recipe.yaml", "--run", "run", "optimizer.name=sgd", "optimizer.lr=1e6", cwd=folder)
    assert done.returncode == 2 and "the weights had grown: the largest is " in done.stderr
    assert "out of finite numbers" in reproduced(folder)
