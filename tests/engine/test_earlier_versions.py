"""What was written for earlier versions goes on working: hooks, names, keywords, states."""

from typing import Any

import pytest
import torch
from torch import nn

import isoscale
from isoscale.engine.state.registry import ModuleState
from isoscale.engine.task import OLD_HOOKS

X = torch.linspace(-1, 1, 64)[:, None]
DATA = isoscale.Sources(train=(X, 2 * X), val=(X[:16], 2 * X[:16]), test=(X[:8], 2 * X[:8]))
RECIPE = {"train": {"epochs": 1}, "data": {"batch_size": 16}}


def line(**hooks: Any) -> type[isoscale.Supervised]:
    """A class of tasks with some hooks of its own."""
    return type("Line", (isoscale.Supervised,), hooks)


@pytest.mark.parametrize("old", sorted(set(OLD_HOOKS) - {"survey_is_enough"}))
def test_an_old_hook_is_called(old: str, tmp_path):
    called = []

    def hook(self: Any, *given: Any) -> Any:
        called.append(given)
        return given[0] if old == "prepare" else {} if old == "survey" else None

    with pytest.warns(FutureWarning, match=f"Line.{old} is now called {OLD_HOOKS[old]}"):
        task = line(**{old: hook})
    run = isoscale.Trainer(RECIPE, run=tmp_path / "run").fit(task(nn.Linear(1, 1)), DATA)
    if old == "conclude":
        isoscale.predict(run)
    assert called


def test_an_old_hook_may_call_the_one_that_it_replaces():
    def measure(self: isoscale.Supervised, training: Any) -> None:
        isoscale.Supervised.measure(self, training)
        assert super(type(self), self).measure.__func__ is isoscale.Supervised.fit_statistics

    with pytest.warns(FutureWarning):
        line(measure=measure)(nn.Linear(1, 1)).fit_statistics(lambda count: (X[:count], X[:count]))


def test_hooks_by_their_new_names_are_taken_without_a_word(recwarn):
    line(fit_statistics=lambda self, training: None, evaluate_dataset=lambda self, dataset: {})
    assert not recwarn.list


def test_a_network_may_measure_its_inputs_by_the_old_name():
    class Scaled(nn.Linear):
        def measure(self, sample: Any) -> None:
            self.seen = sample(3)

    network = Scaled(1, 1)
    with pytest.warns(FutureWarning, match="Scaled.measure is now called fit_statistics"):
        isoscale.Supervised(network).fit_statistics(lambda count: (X[:count], X[:count]))
    torch.testing.assert_close(network.seen, X[:3])


def test_old_public_names_and_keywords_are_taken_with_a_warning(tmp_path):
    run = isoscale.Trainer(RECIPE, run=tmp_path / "run").fit(isoscale.Supervised(nn.Linear(1, 1)), DATA)
    with pytest.warns(DeprecationWarning, match=r"predict\(role=…\) is now predict\(split=…\)"):
        found = isoscale.predict(run, role="val")["prediction"]
    torch.testing.assert_close(found, isoscale.predict(run, split="val")["prediction"])
    with pytest.warns(DeprecationWarning, match=r"isoscale\.Pair is now isoscale\.WeightedSum"):
        assert isoscale.Pair is isoscale.WeightedSum
    with pytest.warns(DeprecationWarning, match=r"isoscale\.exhibits is now isoscale\.figures"):
        assert isoscale.exhibits is isoscale.figures


def test_a_state_from_before_losses_were_saved_is_taken():
    task = isoscale.Supervised(nn.Linear(1, 2), loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])))
    tensors, values = ModuleState(task).state()
    assert "criterion.weight" in tensors
    earlier = {name: tensor.clone() + 1 for name, tensor in tensors.items() if not name.startswith("criterion.")}
    ModuleState(task).load(earlier, values)
    torch.testing.assert_close(task.model.weight.detach(), earlier["model.weight"])
    torch.testing.assert_close(task.criterion.weight, torch.tensor([1.0, 3.0]))
