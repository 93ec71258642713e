"""The laws on alloys of many sizes: ranks, residency, a stop and a capture are not seen in what a network learned."""

from pathlib import Path

import numpy as np
import pytest

import isoscale
from tests.engine.step.recorded_graphs import recorded_graphs
from tests.helpers import cli, first_step, sha, timeless, train
from tests.laws.test_stop_is_invisible import continued_at
from tests.ranks import train_on
from tests.science.crystals.made_alloys import made, small

__all__ = ["recorded_graphs"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Structures of 1 to 32 atoms."""
    return made(tmp_path_factory.mktemp("alloys") / "alloys.npz")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    """The run that others are compared with: one rank, from its first step to its last."""
    return train(tmp_path_factory.mktemp("whole") / "run", small(data), data__residency="device")


def assert_equal(one: isoscale.Run | Path, other: isoscale.Run | Path) -> None:
    assert timeless(one) == timeless(other)
    assert sha(one) == sha(other)


def test_two_ranks_learn_the_same_to_the_bit(data: Path, whole: isoscale.Run, tmp_path: Path) -> None:
    assert_equal(train_on(2, tmp_path / "2", small(data)), whole)


def test_where_the_structures_live_is_not_seen(data: Path, whole: isoscale.Run, tmp_path: Path) -> None:
    for place in ("host", "disk"):
        assert_equal(train(tmp_path / place, small(data), data__residency=place), whole)


@pytest.mark.parametrize("step", [2, 5, 7])
def test_a_run_goes_on_in_the_middle(step: int, whole: isoscale.Run, tmp_path: Path) -> None:
    again = train(continued_at(step, whole.path, tmp_path / "again"), recipe=None)
    assert first_step(again) == step
    assert_equal(again, whole)


@pytest.mark.usefixtures("recorded_graphs")
@pytest.mark.parametrize("network", ["painn", "schnet"])
def test_captured_steps_give_the_bits_of_eager_ones(network: str, data: Path, tmp_path: Path) -> None:
    recipe = {**small(data, network), "parallel": {"reduce": "flat"}, "checkpoint": {"every": "9 steps"}}
    runs = [train(tmp_path / program, recipe, train__program=program) for program in ("eager", "graphed")]
    assert_equal(*runs)


def test_predictions_are_the_same_on_two_ranks(whole: isoscale.Run, tmp_path: Path) -> None:
    for devices in ("1", "2"):
        done = cli(
            "predict", str(whole.path), "--split", "val", "--out", f"{devices}.npz", "--devices", devices, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    one, two = (np.load(tmp_path / f"{devices}.npz") for devices in ("1", "2"))
    assert sorted(one.files) == sorted(two.files)
    for name in one.files:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-5, atol=1e-6, err_msg=name)
