"""What is watched over a run: the best value, early stopping, and the moving average of the weights."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isoscale.engine import config
from isoscale.engine.metrics.monitors import BestTracker, EarlyStopping
from isoscale.engine.optim.ema import EMA

values = st.lists(st.floats(-10, 10) | st.just(math.nan), max_size=20)


@given(values, st.sampled_from(["min", "max"]))
def test_the_best_is_the_extreme_of_what_was_seen_and_its_first_step(seen: list[float], mode: str) -> None:
    best = BestTracker("val/loss", mode)
    flags = [best.watch({"val/loss": value, "other": -99.0}, step) for step, value in enumerate(seen)]
    numbers = [value for value in seen if not math.isnan(value)]
    extreme = (min if mode == "min" else max)(numbers) if numbers else None
    assert best.value == extreme
    assert best.step == (seen.index(extreme) if extreme is not None else None)
    assert max((step for step, flag in enumerate(flags) if flag), default=None) == best.step
    assert not best.watch({"other": -99.0}, 99)


def stops_at(seen: list[float], section: config.EarlyStopping, cut: int | None = None) -> int | None:
    """The evaluation after which training ends; with a restart after `cut` of them."""
    patience = EarlyStopping(section)
    for number, value in enumerate(seen):
        if number == cut:
            stored = json.loads(json.dumps(patience.state()[1], allow_nan=False))
            patience = EarlyStopping(section)
            patience.load({}, stored)
        if patience.watch({section.monitor: value}):
            return number
    return None


@pytest.mark.parametrize(
    ("seen", "options", "end"),
    [
        ([3, 2, 1, 1, 1], {"patience": 2}, 4),
        ([3, 2, 2.5, 1, 1.5, 0.5], {"patience": 2}, None),
        ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max"}, 4),
        ([3, 2.95, 2.9, 2.85], {"patience": 2, "min_delta": 0.5}, 2),
        ([math.nan, math.nan, 1], {"patience": 2}, 1),
        ([math.nan, 3, 2, 1, 0.5], {"patience": 2}, None),
    ],
)
def test_training_ends_after_so_many_evaluations_without_improvement(
    seen: list[float], options: dict[str, object], end: int | None
) -> None:
    assert stops_at(seen, config.EarlyStopping.model_validate(options)) == end


@given(values, st.integers(1, 4), st.integers(0, 20))
def test_a_restart_changes_nothing_about_early_stopping(seen: list[float], patience: int, cut: int) -> None:
    section = config.EarlyStopping(patience=patience)
    assert stops_at(seen, section, cut) == stops_at(seen, section)


def test_without_early_stopping_or_its_metric_nothing_ends() -> None:
    assert not any(EarlyStopping(None).watch({"val/loss": 1.0}) for _ in range(99))
    patience = EarlyStopping(config.EarlyStopping(patience=1))
    assert not any(patience.watch({"train/loss_epoch": 1.0}) for _ in range(99))


def test_the_average_follows_its_formula_and_is_swapped_in_only_for_a_while() -> None:
    model = nn.Linear(3, 2).double()
    average = EMA(model, 0.9)
    expected = model.weight.detach().clone()
    for step in range(5):
        with torch.no_grad():
            model.weight.add_(step)
        average.update()
        expected = 0.9 * expected + 0.1 * model.weight.detach()
    torch.testing.assert_close(average.state()[0]["weight"], expected, rtol=1e-12, atol=1e-12)
    live = model.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), average.swapped_in():
        torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-12, atol=1e-12)
        raise ZeroDivisionError
    assert torch.equal(model.weight, live)
    again = EMA(nn.Linear(3, 2).double(), 0.9)
    again.load(*average.state())
    assert torch.equal(again.state()[0]["weight"], average.state()[0]["weight"])
