"""A potential on a GPU: captured steps have the bits of eager ones, and two trainings those of each other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from isoscale.engine.state.checkpoint import read_weights
from tests.helpers import sha, timeless, train
from tests.ranks import train_on
from tests.science.potentials.test_laws import small

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 40


@pytest.fixture(scope="module")
def recipe(shared: Path) -> dict[str, Any]:
    made = small(shared / "data/potentials/water")
    made["train"] |= {"steps": STEPS, "evaluate": "20 steps"}
    made["checkpoint"] = {"every": "10 steps"}
    made["observe"]["every"] = 10
    return {**made, "parallel": {}}


@pytest.mark.parametrize("precision", ["32", "64", "tf32"])
@pytest.mark.parametrize("batch_size", [1, 4, [3, 8]])
def test_captured_steps_are_those_of_eager_execution(
    recipe: dict[str, Any], tmp_path: Path, precision: str, batch_size: Any
) -> None:
    keys = {"train__precision": precision, "data__batch_size": batch_size}
    captured = [train(tmp_path / str(number), recipe, **keys) for number in range(2)]
    assert captured[0].record["decided"]["program"] == "graphed"
    assert sha(captured[0]) == sha(captured[1])
    eager = train(tmp_path / "eager", recipe, train__program="eager", **keys)
    assert sha(eager) == sha(captured[0]) and timeless(eager) == timeless(captured[0])


@pytest.mark.parametrize("place", ["host", "disk"])
def test_where_frames_live_is_not_seen(recipe: dict[str, Any], tmp_path: Path, place: str) -> None:
    runs = [train(tmp_path / each, recipe, data__residency=each) for each in ("device", place)]
    assert sha(runs[0]) == sha(runs[1]) and timeless(runs[0]) == timeless(runs[1])


def test_mixed_frames_are_captured(recipe: dict[str, Any], tmp_path: Path) -> None:
    run = train(tmp_path / "run", recipe, data__batches="mixed")
    assert run.record["decided"]["program"] == "graphed"


@pytest.mark.parametrize("reduce", ["flat", "tree"])
def test_a_rank_without_frames_takes_part(recipe: dict[str, Any], tmp_path: Path, reduce: str) -> None:
    """Of a batch of one frame on two ranks, which share the device."""
    keys = {"data__batch_size": 1, "train__device": "cuda", "train__precision": "64", "train__steps": 12}
    one = train(tmp_path / "one", recipe, parallel__reduce=reduce, **keys)
    two = train_on(2, tmp_path / "two", recipe, parallel__reduce=reduce, **keys)
    if reduce == "tree":
        assert sha(two) == sha(one) and timeless(two) == timeless(one)
    else:
        first, second = (read_weights(run.checkpoint("last")) for run in (one, two))
        for name, weights in first.items():
            torch.testing.assert_close(second[name], weights, rtol=1e-6, atol=1e-9)


def test_a_type_without_neighbours_is_captured(recipe: dict[str, Any], tmp_path: Path) -> None:
    keys = {"task__model__descriptor__sel": [0, 92], "task__allow_more_neighbours": True}
    captured, eager = (train(tmp_path / each, recipe, train__program=each, **keys) for each in ("graphed", "eager"))
    assert sha(eager) == sha(captured) and timeless(eager) == timeless(captured)
