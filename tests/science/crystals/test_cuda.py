"""Crystals on a GPU: captured steps of all shapes have the bits of eager ones, and memory does not grow."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import sha, timeless, train
from tests.science.crystals.made_alloys import made, small

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Forty steps in batches of several shapes."""
    found = small(made(tmp_path_factory.mktemp("alloys") / "alloys.npz", count=60))
    found["train"] |= {"steps": 40, "evaluate": "20 steps"}
    return {**found, "parallel": {}, "checkpoint": {"every": "10 steps"}, "observe": {"every": 10}}


@pytest.mark.parametrize("precision", ["32", "64", "tf32"])
@pytest.mark.parametrize("network", ["painn", "schnet"])
def test_captured_steps_are_those_of_eager_execution(
    recipe: dict[str, Any], tmp_path: Path, network: str, precision: str
) -> None:
    keys = {"train__precision": precision, "task__model__class": network}
    captured = [train(tmp_path / str(number), recipe, **keys) for number in range(2)]
    assert captured[0].record["decided"]["program"] == "graphed"
    assert sha(captured[0]) == sha(captured[1])
    eager = train(tmp_path / "eager", recipe, train__program="eager", **keys)
    assert sha(eager) == sha(captured[0]) and timeless(eager) == timeless(captured[0])


@pytest.mark.parametrize("place", ["host", "disk"])
def test_where_structures_live_is_not_seen(recipe: dict[str, Any], tmp_path: Path, place: str) -> None:
    runs = [train(tmp_path / each, recipe, data__residency=each) for each in ("device", place)]
    assert sha(runs[0]) == sha(runs[1]) and timeless(runs[0]) == timeless(runs[1])


def test_a_network_of_pyg_is_captured(recipe: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("torch_geometric")
    network = {"class": "torch_geometric.nn.models.SchNet", "hidden_channels": 16, "cutoff": 3.5}
    task = {"class": "crystal", "model": {"class": "pyg_network", "network": network}, "targets": ["energy", "forces"]}
    weights = {**recipe["train"], "loss_weights": {"forces": 10}}
    run = train(tmp_path / "run", {**recipe, "task": task, "train": weights})
    assert run.record["decided"]["program"] == "graphed"


def test_memory_does_not_grow_with_epochs(recipe: dict[str, Any], tmp_path: Path) -> None:
    peaks = []
    for steps in (20, 80):
        torch.cuda.reset_peak_memory_stats()
        train(tmp_path / str(steps), recipe, train__steps=steps)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 1.05 * peaks[0]
