import math

import pytest

from isoscale.recipe.compare import ABSENT, Difference, describe, differences, harmful
from isoscale.recipe.load import load_recipe


def changed(*overrides, old=()):
    return differences(load_recipe("images/digits", old).values, load_recipe("images/digits", overrides).values)


def test_equal_recipes_do_not_differ():
    assert changed() == []
    assert differences({"a": math.nan, "b": [math.nan]}, {"a": math.nan, "b": [math.nan]}) == []


def test_differences_name_the_key_and_both_values():
    assert changed("optimizer.lr=1", "task.model.widths=[1]") == [
        Difference(("task", "model", "widths"), [64, 256, 256, 10], [1]),
        Difference(("optimizer", "lr"), 2e-3, 1.0),
    ]


def test_a_key_that_only_one_recipe_has_is_a_difference():
    assert differences({"a": 1}, {"b": 2}) == [Difference(("b",), ABSENT, 2), Difference(("a",), 1, ABSENT)]
    assert differences({"a": {"b": 1}}, {"a": 1}) == [Difference(("a",), {"b": 1}, 1)]
    assert describe(differences({}, {"b": 2})) == "  b: (not set) → 2"


def test_true_is_not_one():
    assert differences({"a": True}, {"a": 1}) != []


@pytest.mark.parametrize(
    "override",
    [
        "train.epochs=61",
        "train.epochs=null",
        "observe.every=3",
        "observe.level=debug",
        "checkpoint.every=5 minutes",
        "train.steps_per_launch=4",
        "data.residency=host",
        "name=other",
    ],
)
def test_longer_training_and_other_logging_are_harmless(override):
    found = changed(override, "train.steps=200", old=["train.steps=100"])
    assert len(found) == 2
    assert harmful(found) == []


@pytest.mark.parametrize(
    "override", ["seed=1", "data.batch_size=2", "optimizer.lr=1", "train.accumulate=2", "parallel.reduce=tree"]
)
def test_what_changes_the_result_is_harmful(override):
    assert harmful(changed(override)) == changed(override) != []


@pytest.mark.parametrize("override", ["train.epochs=29", "train.steps=10"])
def test_shorter_training_is_harmful_and_says_so(override):
    found = harmful(changed(override))
    assert len(found) == 1
    assert "a run can be made longer, not shorter" in describe(found)


def test_the_description_is_a_line_a_key():
    text = describe(changed("seed=1", "optimizer.name=sgd", "task.model.widths=[1, 2]"))
    assert text.splitlines() == [
        "  seed: 0 → 1",
        "  task.model.widths: [64, 256, 256, 10] → [1, 2]",
        '  optimizer.name: "adamw" → "sgd"',
    ]
