"""The laws on boxes: no number of ranks, no place of the data and no stop is seen in what a network learned."""

from pathlib import Path
from typing import Any

import pytest

import isoscale
from tests.helpers import first_of, first_step, sha, timeless, train
from tests.laws.test_stop_is_invisible import continued_at
from tests.ranks import train_on
from tests.science.cosmology import made_boxes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return made_boxes.recipe(tmp_path_factory.mktemp("boxes"))


@pytest.fixture(scope="module")
def whole(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    """The run that others are compared with: one rank, from its first step to its last."""
    return train(tmp_path_factory.mktemp("whole") / "run", recipe, data__residency="device")


def assert_equal(one: isoscale.Run | Path, other: isoscale.Run | Path) -> None:
    assert timeless(one) == timeless(other)
    assert sha(one) == sha(other)


def test_the_run_that_others_are_compared_with_has_learned(whole: isoscale.Run) -> None:
    losses = [line["value"] for line in timeless(whole) if line["name"] == "val/loss"]
    assert len(losses) >= 3 and losses[-1] < 0.98 * losses[0]


@pytest.mark.parametrize("place", ["host", "disk"])
def test_where_the_boxes_are_is_not_seen(
    place: str, recipe: dict[str, Any], whole: isoscale.Run, tmp_path: Path
) -> None:
    assert_equal(train(tmp_path / "run", recipe, data__residency=place), whole)


@pytest.mark.parametrize("place", ["device", "host"])
def test_boxes_in_half_precision_are_the_same_everywhere(place: str, recipe: dict[str, Any], tmp_path: Path) -> None:
    runs = [train(tmp_path / each, recipe, data__dtype="bfloat16", data__residency=each) for each in (place, "disk")]
    assert_equal(*runs)


@pytest.mark.parametrize("world", first_of((2, 4), 2))
def test_several_ranks_learn_the_same_to_the_bit(
    world: int, recipe: dict[str, Any], whole: isoscale.Run, tmp_path: Path
) -> None:
    assert_equal(train_on(world, tmp_path / "run", recipe, data__residency="host"), whole)


@pytest.mark.parametrize("step", first_of((1, 4, 8), 4))
def test_a_run_goes_on_with_the_same_crops_and_symmetries(step: int, whole: isoscale.Run, tmp_path: Path) -> None:
    again = train(continued_at(step, whole.path, tmp_path / "again"), recipe=None)
    assert first_step(again) == step
    assert_equal(again, whole)
