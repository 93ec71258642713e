"""Whoever uses a run gets its best weights, also where those of its end are worthless."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

import isoscale as package
from isoscale.engine.state.checkpoint import read_weights
from isoscale.runs.export import load_task
from isoscale.runs.init_from import load_weights
from tests.helpers import train

BEST, LAST = 46, 115
"""Steps: two epochs of learning, then three at a rate that destroys what was learned."""


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(
        tmp_path_factory.mktemp("spoiled") / "run", task__model__widths=[64, 16, 10], optimizer__lr=0.02,
        schedule={"name": "step", "milestones": [BEST], "gamma": 100.0}, train__epochs=5, checkpoint__keep=2,
    ).path  # fmt: skip


class ByHand(NamedTuple):
    """What weights make of a part of the data, by plain torch."""

    probabilities: Tensor
    accuracy: float


def by_hand(run: Path, step: int, split: str) -> ByHand:
    weights = read_weights(run / "checkpoints" / f"step_{step:08d}")
    source = getattr(package.Run(run).data(), split)
    batch = source.fetch(torch.arange(len(source)))
    hidden = batch["input"].float().flatten(1) / 16
    for layer in ("0", "3"):
        hidden = functional.linear(hidden, *(weights[f"model.layers.{layer}.{name}"] for name in ("weight", "bias")))
        hidden = hidden.relu() if layer == "0" else hidden
    right = hidden.argmax(1) == batch["target"]
    return ByHand(hidden.softmax(1), float(right.double().mean()))


@pytest.fixture
def run(spoiled: Path, tmp_path: Path) -> Path:
    """A copy of that run, for commands in this folder."""
    return Path(shutil.copytree(spoiled, tmp_path / "run", symlinks=True)).relative_to(tmp_path)


def assert_best(found: dict[str, Tensor], run: Path) -> None:
    """These are the weights of the best step, and not of the last."""
    best, last = (read_weights(run / "checkpoints" / f"step_{step:08d}") for step in (BEST, LAST))
    assert found.keys() == best.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in best.items())
    assert not any(torch.equal(found[name], tensor) for name, tensor in last.items())


def test_the_best_checkpoint_is_kept_and_pointed_to_after_worse_ones(spoiled: Path):
    run = package.Run(spoiled)
    assert by_hand(spoiled, BEST, "val").accuracy > 0.8 > 0.3 > by_hand(spoiled, LAST, "val").accuracy
    assert {name: os.readlink(spoiled / "checkpoints" / name) for name in ("best", "last")} == {
        "best": f"step_{BEST:08d}",
        "last": f"step_{LAST:08d}",
    }
    assert run.has_best and run.checkpoint().name == f"step_{BEST:08d}"
    assert run.checkpoint_words() == f"best checkpoint, step {BEST}"
    assert_best(run.task().state_dict(), spoiled)
    assert_best(load_weights(str(spoiled)), spoiled)


def test_the_summary_of_a_run_has_the_metric_of_its_best_weights(isoscale, run: Path):
    value = by_hand(run, BEST, "val").accuracy
    best = package.Run(run).summary()["best"]
    assert best == {"name": "val/accuracy", "value": pytest.approx(value, rel=1e-12), "step": BEST}
    line = f"  best          val/accuracy {value:.4f}"
    assert f"{line} at step {BEST}\n" in isoscale("runs", "show", str(run)).out
    assert f"{line} at epoch 2, step {BEST}\n" in (run / "log.txt").read_text()


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_test_measures_the_best_weights(isoscale, run: Path, split: str):
    found = json.loads(isoscale("test", str(run), "--role", split, "--json").out)
    assert found[f"{split}/accuracy"] == pytest.approx(by_hand(run, BEST, split).accuracy, rel=1e-12)
    last = json.loads(isoscale("test", str(run), "--role", split, "--checkpoint", "last", "--json").out)
    assert last[f"{split}/accuracy"] == pytest.approx(by_hand(run, LAST, split).accuracy, rel=1e-12)


def test_predictions_are_those_of_the_best_weights(isoscale, run: Path):
    for words, step in (([], BEST), (["--checkpoint", "last"], LAST)):
        assert isoscale("predict", str(run), "--out", "found.npz", *words).code == 0
        with np.load("found.npz") as found:
            wanted = by_hand(run, step, "test").probabilities
            np.testing.assert_allclose(found["probability"], wanted, rtol=1e-5, atol=1e-6)


def test_figures_show_the_best_weights(spoiled: Path):
    counts = package.figures(spoiled, split="val")["confusion"].counts
    assert counts.trace() / counts.sum() == pytest.approx(by_hand(spoiled, BEST, "val").accuracy, rel=1e-12)


def test_an_exported_file_has_the_best_weights(isoscale, run: Path):
    for name in ("found.safetensors", "found.pt"):
        written = isoscale("export", str(run), "--out", name)
        assert written.code == 0 and f"best checkpoint, step {BEST}: written to {name}" in written.out
    assert_best(load_task(Path("found.safetensors")).state_dict(), run)
    with safe_open("found.safetensors", "pt") as file:
        assert file.metadata()["step"] == str(BEST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.load("found.pt")
    assert_best({f"model.{name}": tensor for name, tensor in script.state_dict().items()}, run)
