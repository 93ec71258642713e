"""Learning rate schedules against their formulas, and against torch's own where torch has the same."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.optim import lr_scheduler

from isoscale.engine.config import Schedule
from isoscale.engine.optim.schedules import LearningRate

STEPS = 100
LR = 0.02


def curve(num_steps: int = STEPS, lr: float = LR, batch_size: int = 64, **section: Any) -> list[float]:
    rate = LearningRate.make(Schedule(**section), lr, batch_size, num_steps)
    return [rate(step) for step in range(num_steps)]


def torchs(make: Any, num_steps: int = STEPS, lr: float = LR) -> list[float]:
    """The learning rate that torch's scheduler gives each step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(optimizer)
    found = []
    for _ in range(num_steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


SAME_AS_TORCH = {
    "constant": (
        {"name": "constant"},
        lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=1.0),
    ),
    "cosine": (
        {"name": "cosine", "end": 1e-4},
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 1, eta_min=1e-4),
    ),
    "linear": (
        {"name": "linear", "end": LR / 10},
        lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS - 1),
    ),
    "exponential": (
        {"name": "exponential", "gamma": 0.97, "every": 1},
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.97),
    ),
    "step": (
        {"name": "step", "gamma": 0.5, "every": 13},
        lambda optimizer: lr_scheduler.StepLR(optimizer, 13, 0.5),
    ),
    "milestones": (
        {"name": "step", "milestones": [10, 40, 41]},
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [10, 40, 41], 0.1),
    ),
}


@pytest.mark.parametrize("shape", list(SAME_AS_TORCH))
def test_a_schedule_gives_the_learning_rates_of_torchs_own(shape: str) -> None:
    section, make = SAME_AS_TORCH[shape]
    assert curve(**section) == pytest.approx(torchs(make), rel=1e-12)


def test_onecycle_gives_the_learning_rates_of_torchs_own() -> None:
    def make(optimizer: Any) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, LR, STEPS, pct_start=0.3, final_div_factor=1e3)

    theirs = torchs(make, STEPS - 1)  # torch refuses the step after the last
    assert curve(name="onecycle", end=LR / 25 / 1e3)[:-1] == pytest.approx(theirs, rel=1e-9)


def test_onecycle_starts_low_rises_to_the_peak_once_and_ends_at_the_end() -> None:
    rates = curve(name="onecycle", start=1e-3, end=1e-6, warmup=20)
    assert rates[0] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-6)
    assert rates.count(max(rates)) == 1 and rates.index(max(rates)) == 19
    assert max(rates) == pytest.approx(LR)
    default = curve(name="onecycle")
    assert default[0] == pytest.approx(LR / 25) and default[-1] == pytest.approx(LR / 1e4)


ENDING = ["cosine", "linear", "exponential"]


@pytest.mark.parametrize("name", ENDING)
def test_start_and_end_are_the_rates_of_the_first_and_the_last_step(name: str) -> None:
    rates = curve(name=name, start=0.5, end=0.003)
    assert rates[0] == 0.5
    assert rates[-1] == pytest.approx(0.003, rel=1e-12)
    assert rates == sorted(rates, reverse=True)


def test_exponential_with_an_end_is_a_straight_line_in_the_logarithm() -> None:
    logarithms = [math.log(rate) for rate in curve(name="exponential", end=1e-5)]
    differences = [two - one for one, two in pairwise(logarithms)]
    assert differences == pytest.approx([math.log(1e-5 / LR) / (STEPS - 1)] * (STEPS - 1))


def test_exponential_with_gamma_is_a_staircase_with_a_floor() -> None:
    rates = curve(name="exponential", gamma=0.1, every=10, end=LR / 500)
    assert rates[9] == LR and rates[10] == pytest.approx(LR / 10) and rates[29] == pytest.approx(LR / 100)
    assert set(rates[30:]) == {LR / 500}


@pytest.mark.parametrize("name", ["constant", *ENDING, "plateau"])
def test_warm_up_rises_in_equal_parts_to_the_peak_and_the_shape_follows(name: str) -> None:
    rates = curve(name=name, warmup=10, end=1e-5)
    assert rates[:10] == pytest.approx([LR * (step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(LR)
    assert rates[10:] == pytest.approx(curve(STEPS - 10, name=name, end=1e-5))


@given(st.integers(2, 500), st.floats(0.0, 0.99))
def test_a_warm_up_that_is_a_fraction_is_that_share_of_the_steps(num_steps: int, share: float) -> None:
    rate = LearningRate.make(Schedule(name="cosine", warmup=share), LR, 64, num_steps)
    assert rate.num_warmup == round(share * num_steps)
    assert all(0 <= rate(step) <= LR * (1 + 1e-12) for step in range(num_steps))


def test_milestones_are_steps_of_the_run_also_with_a_warm_up() -> None:
    rates = curve(name="step", milestones=[50], warmup=20)
    assert rates[49] == LR and rates[50] == pytest.approx(LR / 10)


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_the_scaling_rule_compares_the_batch_with_the_base_batch(scale: str, factor: float) -> None:
    rates = curve(name="cosine", scale=scale, base_batch_size=64, batch_size=256, warmup=5)
    assert max(rates) == pytest.approx(LR * factor)
    assert rates[0] == pytest.approx(LR * factor / 5)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"scale": "sqrt"}, "base_batch_size"),
        ({"name": "step"}, "every .* or milestones"),
        ({"name": "step", "every": 2, "milestones": [3]}, "every .* or milestones"),
        ({"name": "exponential"}, "needs end"),
        ({"name": "exponential", "gamma": 0.9}, "every"),
        ({"name": "cosin"}, "cosine"),
        ({"warmup": 1.5}, "warmup"),
    ],
)
def test_an_incomplete_schedule_is_refused_with_what_it_lacks(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Schedule(**section)


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=40),
    st.integers(0, 4),
    st.sampled_from(["min", "max"]),
    st.sampled_from([0.0, 1e-4, 0.05]),
)
def test_plateau_drops_when_torchs_plateau_does(
    values: list[float], patience: int, mode: str, threshold: float
) -> None:
    section = Schedule(name="plateau", gamma=0.5, patience=patience, mode=mode, threshold=threshold, end=1e-3)
    ours = LearningRate.make(section, LR, 64, STEPS)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    theirs = lr_scheduler.ReduceLROnPlateau(optimizer, mode, 0.5, patience, threshold=threshold, min_lr=1e-3, eps=0.0)
    for value in values:
        ours.watch({"val/loss": value})
        theirs.step(value)
        assert ours(0) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=30), st.data())
def test_plateau_goes_on_after_a_restart_as_if_there_had_been_none(values: list[float], data: st.DataObject) -> None:
    section = Schedule(name="plateau", patience=1)
    straight = LearningRate.make(section, LR, 64, STEPS)
    expected = [straight.watch({"val/loss": value}) for value in values]
    cut = data.draw(st.integers(0, len(values)))
    first = LearningRate.make(section, LR, 64, STEPS)
    found = [first.watch({"val/loss": value}) for value in values[:cut]]
    second = LearningRate.make(section, LR, 64, STEPS)
    second.load({}, json.loads(json.dumps(first.state()[1], allow_nan=False)))
    found += [second.watch({"val/loss": value}) for value in values[cut:]]
    assert found == expected
    assert second(7) == straight(7)


def test_plateau_counts_a_nan_as_no_improvement_and_ignores_other_metrics() -> None:
    rate = LearningRate.make(Schedule(name="plateau", patience=1, gamma=0.5), LR, 64, STEPS)
    assert not any(rate.watch({"val/accuracy": 1.0}) for _ in range(5))
    assert [rate.watch({"val/loss": math.nan}) for _ in range(2)] == [False, True]
    assert rate(0) == LR / 2
    assert not rate.watch({"val/loss": 1.0})


def test_only_plateau_listens_to_metrics() -> None:
    rate = LearningRate.make(Schedule(name="cosine"), LR, 64, STEPS)
    assert not any(rate.watch({"val/loss": value}) for value in (1.0, 2.0, 3.0) * 10)


def test_a_staircase_reaches_its_end() -> None:
    found = curve(name="exponential", end=LR / 1000, every=7)
    ratio = 0.001 ** (7 / STEPS)
    assert found == [pytest.approx(max(LR * ratio ** (step // 7), LR / 1000)) for step in range(STEPS)]
    assert len(set(found)) == math.ceil(STEPS / 7)
    whole = curve(name="exponential", end=LR / 1000, every=10)
    assert whole[-1] == pytest.approx(LR / 1000 / 0.001 ** (10 / STEPS))


def test_drops_come_after_as_many_samples_as_with_the_smaller_batch() -> None:
    small = curve(name="step", gamma=0.5, every=20, warmup=8, batch_size=32)
    large = curve(name="step", gamma=0.5, every=20, warmup=8, batch_size=128, scale_steps=True, base_batch_size=32)
    assert large[2:25] == small[8:100:4]
    drops = curve(name="step", gamma=0.5, milestones=[40, 80], batch_size=64, scale_steps=True, base_batch_size=32)
    assert (drops[19], drops[20], drops[40]) == (LR, LR / 2, LR / 4)
    with pytest.raises(ValidationError, match="scale_steps needs base_batch_size"):
        Schedule(scale_steps=True)
