"""People's imports and recipes go on working under the names that modules had once."""

import importlib
import importlib.util

import pytest

from isoscale.recipe.components import resolve
from isoscale.system.moved import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_is_not_that_of_another_module_and_leads_to_one_that_is_there(old: str):
    assert importlib.util.find_spec(f"isoscale.{MOVED[old]}") is not None
    with pytest.warns(DeprecationWarning, match=rf"isoscale\.{old} is now isoscale\.{MOVED[old]}"):
        assert importlib.util.find_spec(f"isoscale.{old}") is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_old_module_is_the_new_one_itself():
    before, now = importlib.import_module("isoscale.engine.pairs"), importlib.import_module(MODULE)
    assert before is now and now.__spec__ is not None and now.__spec__.name == MODULE


MODULE = "isoscale.engine.metrics.weighted_sum"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("isoscale.engine.pairs.WeightedSum", f"{MODULE}.WeightedSum"),
        ("isoscale.engine.step.Step", "isoscale.engine.step.step.Step"),
        ("isoscale.engine.metrics.MetricStates", "isoscale.engine.metrics.torchmetrics.MetricStates"),
        ("isoscale.observe.tensorboard.TensorBoard", "isoscale.observe.tensorboard.observer.TensorBoard"),
        ("isoscale.data.shuffle.shuffle_files", "isoscale.data.tools.shuffle.shuffle_files"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_recipe_may_name_a_class_by_its_old_path(old: str, new: str):
    assert resolve(old) is resolve(new)


def test_a_name_that_never_was_is_said_to_be_missing():
    with pytest.raises(ImportError):
        importlib.import_module("isoscale.engine.nothing")
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        importlib.import_module("isoscale.engine.step").Nothing  # noqa: B018
