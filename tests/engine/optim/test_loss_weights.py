"""The weights of loss terms: their formulas, what recipes may say of them, and that a stop does not show."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn

import isoscale
from isoscale.engine.config import Schedule, Train
from isoscale.engine.optim.loss_weights import Length, WeightCurve, last_weights, make_weights
from isoscale.engine.optim.schedules import LearningRate
from isoscale.errors import UserError
from isoscale.recipe.components import own_weights
from isoscale.recipe.load import load_recipe
from tests.engine.optim.own_parts import Late, counting, no_weight, sawtooth
from tests.helpers import first_step, sha, timeless
from tests.ranks import fit_on

OWN = "tests.engine.optim.own_parts"
LENGTH = Length(num_steps=100, steps_per_epoch=10)


def made(spec: Any, length: Length = LENGTH, schedule: Schedule | None = None) -> tuple[WeightCurve, list[str]]:
    """The curve of one weight, as a recipe writes it, and what is said of it."""
    said: list[str] = []
    train = Train.model_validate({"loss_weights": {"force": spec}})
    rate = LearningRate.make(schedule or Schedule(), 0.02, 64, length.num_steps)
    found = make_weights(train.loss_weights, own_weights(train), rate, length, said.append)
    assert last_weights(train.loss_weights, own_weights(train), length).keys() == {"force"}
    return found["force"], said


def curve(spec: Any, length: Length = LENGTH) -> list[float]:
    found, said = made(spec, length)
    assert not said
    return [found(step) for step in range(length.num_steps)]


class TestFormulas:
    """Against numpy, by hand."""

    T = np.linspace(0, 1, 100)

    def test_linear(self) -> None:
        assert curve({"start": 2.0, "end": 10.0}) == pytest.approx(2 + 8 * self.T)
        assert curve({"name": "linear", "start": 5, "end": 0})[-1] == 0.0

    def test_cosine(self) -> None:
        assert curve({"name": "cosine", "start": 1.0, "end": 5.0}) == pytest.approx(3 - 2 * np.cos(np.pi * self.T))

    @pytest.mark.parametrize(("center", "curvature"), [(0.5, 5e-7), (0.2, 1e-3), (0.9, 1e-12)])
    def test_sigmoid_is_the_formula_of_open_matsciml(self, center: float, curvature: float) -> None:
        one, other, k = 100.0, 1.0, curvature
        expected = (other * k**center + one * k**self.T) / (k**center + k**self.T)
        spec = {"name": "sigmoid", "start": one, "end": other, "center": center, "curvature": curvature}
        assert curve(spec) == pytest.approx(expected, rel=1e-12)

    def test_a_sigmoid_keeps_away_from_its_ends_unless_it_is_to_be_exact(self) -> None:
        plain = curve({"name": "sigmoid", "start": 10.0, "end": 0.0})
        exact = curve({"name": "sigmoid", "start": 10.0, "end": 0.0, "exact": True})
        assert 0.005 < plain[-1] < 0.01 and 9.99 < plain[0] < 9.995
        assert (exact[0], exact[-1]) == (10.0, 0.0)
        assert exact == pytest.approx(plain, abs=0.01)

    def test_step(self) -> None:
        spec = {"name": "step", "start": 1, "values": [{"at": 20, "value": 10}, {"at": 0.5, "value": 0}]}
        assert curve(spec) == [1.0] * 20 + [10.0] * 30 + [0.0] * 50
        again = {"name": "step", "values": [{"at": 0, "value": 1}, {"at": "2 epochs", "value": 10}]}
        assert curve(again) == [1.0] * 20 + [10.0] * 80

    def test_constant(self) -> None:
        assert curve(3) == curve({"name": "constant", "start": 3}) == [3.0] * 100

    def test_several_values_are_met_on_the_way(self) -> None:
        found = curve({"start": 0, "values": [{"at": 10, "value": 5}], "end": 1})
        assert found == pytest.approx(np.interp(np.arange(100), [0, 10, 99], [0, 5, 1]))

    def test_following_the_learning_rate(self) -> None:
        section = Schedule(name="exponential", end=1e-6, every=7, scale="linear", base_batch_size=32)
        rate = LearningRate.make(section, 0.02, 64, 100)
        found, _ = made({"start": 1000.0, "end": 1.0, "follows": "rate"}, schedule=section)
        assert [found(step) for step in range(100)] == pytest.approx([1 + 999 * rate(s) / 0.04 for s in range(100)])

    def test_own_functions_and_classes(self) -> None:
        assert curve({"class": f"{OWN}.sawtooth", "teeth": 4}) == [sawtooth(step, 100, 4) for step in range(100)]
        assert curve({"class": f"{OWN}.Late", "value": 3.0}) == [0.0] * 50 + [3.0] * 50
        inside = curve({"class": f"{OWN}.Late", "value": 3.0, "from": "2 epochs", "until": 40, "every": "epoch"})
        assert inside == [0.0] * 30 + [3.0] * 70


class TestSpans:
    """From when until when, per step and per epoch."""

    @pytest.mark.parametrize(
        ("begin", "end"), [(20, 61), ("20 steps", "61 steps"), ("2 epochs", "6.1 epochs"), (0.2, 0.61), (20, 0.61)]
    )
    def test_a_span_in_steps_epochs_or_parts_of_the_training(self, begin: Any, end: Any) -> None:
        found = curve({"start": 1, "end": 9, "from": begin, "until": end})
        assert found == pytest.approx(np.interp(np.arange(100), [20, 60], [1, 9]))

    def test_per_epoch_a_weight_is_constant_within_each(self) -> None:
        found = np.reshape(curve({"start": 1, "end": 10, "every": "epoch"}), (10, 10))
        assert found == pytest.approx(np.repeat(np.linspace(1, 10, 10)[:, None], 10, 1))
        part = np.reshape(curve({"start": 1, "end": 4, "every": "epoch", "from": 0.3, "until": "7 epochs"}), (10, 10))
        assert part[:, 0] == pytest.approx([1, 1, 1, 1, 2, 3, 4, 4, 4, 4]) and (part == part[:, :1]).all()

    def test_a_broken_last_epoch_is_one(self) -> None:
        found = curve({"start": 0, "end": 2, "every": "epoch"}, Length(25, 10))
        assert found == [0.0] * 10 + [1.0] * 10 + [2.0] * 5

    def test_one_step_has_the_first_value(self) -> None:
        assert curve({"start": 2.0, "end": 10.0}, Length(1, 1)) == [2.0]
        assert curve({"name": "step", "start": 2, "values": [{"at": 0.5, "value": 3}]}, Length(1, 1)) == [2.0]

    def test_a_warm_up(self) -> None:
        assert curve({"start": 0, "end": 10, "until": 11})[:12] == pytest.approx([*range(11), 10])

    def test_a_longer_training_moves_what_is_a_part_of_it_and_nothing_else(self) -> None:
        twice = Length(200, 10)
        assert curve({"start": 0, "end": 1}, twice)[99] == pytest.approx(99 / 199)
        fixed = {"start": 0, "end": 1, "until": "5 epochs"}
        assert curve(fixed, twice)[:100] == curve(fixed)

    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            ({"start": 0, "end": 1, "until": 400}, r"ends after 100 steps.*\(step 400\): its last value is 0.248"),
            ({"start": 0, "end": 1, "from": "20 epochs", "until": "30 epochs"}, "its last value is 0;"),
            ({"start": 0, "end": 1, "until": "12 epochs", "every": "epoch"}, r"ends after 10 epochs.*\(epoch 12\)"),
            ({"name": "step", "start": 1, "values": [{"at": 100, "value": 2}]}, r"\(step 101\): its last value is 1"),
            ({"start": 0, "end": 1, "from": 60, "values": [{"at": 0.5, "value": 2}]}, "not in the order of time"),
        ],
    )  # fmt: skip
    def test_what_a_training_is_too_short_for_is_said(self, spec: Any, words: str) -> None:
        said = made(spec)[1]
        assert len(said) == 1 and said[0].startswith("train.loss_weights.force: ")
        with pytest.raises(UserError, match=words):
            raise UserError(said[0])


numbers = some.floats(-1e6, 1e6)


@settings(max_examples=150, deadline=None)
@given(
    start=numbers, end=numbers, name=some.sampled_from(["linear", "cosine", "sigmoid"]), exact=some.booleans(),
    every=some.sampled_from(["step", "epoch"]), spans=some.tuples(some.integers(0, 80), some.integers(1, 80)),
    per_epoch=some.integers(1, 30), num_steps=some.integers(1, 90),
)  # fmt: skip
def test_any_curve_stays_between_its_ends_and_arrives(
    start: float, end: float, name: str, exact: bool, every: str, spans: tuple[int, int], per_epoch: int, num_steps: int
) -> None:
    exact = exact and name == "sigmoid"
    spec = {"name": name, "start": start, "end": end, "exact": exact, "every": every, "from": spans[0]}
    found, _ = made({**spec, "until": sum(spans)}, Length(num_steps, per_epoch))
    values = np.array([found(step) for step in range(300)])
    slack = 1e-9 * (1 + abs(start) + abs(end))
    assert (values >= min(start, end) - slack).all() and (values <= max(start, end) + slack).all()
    rising = np.diff(values) * np.sign(end - start)
    assert (rising >= -slack).all()
    if name != "sigmoid" or exact:
        assert values[0] == start and values[-1] == end
    if every == "epoch":
        assert all(values[step] == values[step - step % per_epoch] for step in range(300))


class TestBadInput:
    """What cannot be meant is said at once, with what to write instead."""

    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            ({"name": "sinus", "start": 0, "end": 1}, "name: expected constant, linear, cosine, sigmoid or step"),
            ({"name": "cosinus", "start": 0, "end": 1}, 'did you mean "cosine"'),
            ({"start": 0, "ende": 1}, 'ende: .*did you mean "end"'),
            ({"start": 0}, "needs end; a constant one is a number, 0"),
            ({"end": 1}, "needs start"),
            ({"name": "constant", "start": 1, "end": 2}, "constant weight has start and nothing else"),
            ({"name": "step", "start": 1, "end": 2}, r"needs values, such as \[{at: 0.5, value: 10}\]"),
            ({"name": "sigmoid", "start": 1, "end": 2, "values": [{"at": 1, "value": 1}]}, "values belong to"),
            ({"start": 1, "end": 2, "curvature": 1e-3}, "belong to name: sigmoid, and this is linear"),
            ({"start": 1, "values": [{"at": 50, "value": 1}, {"at": 20, "value": 2}]}, "but 20 does not come after 50"),
            ({"start": 1, "values": [{"at": 0.5, "value": 1}, {"at": 0.5, "value": 2}]}, "0.5 does not come after 0.5"),
            ({"start": 1, "values": [{"at": 0, "value": 1}]}, "leave out one of them"),
            ({"start": 1, "end": 2, "from": 50, "until": 50}, "from is 50 and until is 50"),
            ({"start": 1, "end": 2, "from": 50.0}, "50.0 is no moment of a training: write a number of steps"),
            ({"start": 1, "end": 2, "until": "2 weeks"}, "'2 weeks' is no moment"),
            ({"start": 1, "end": 2, "until": -3}, "-3 is no moment"),
            ({"start": 1, "end": 2, "every": "minute"}, "every: expected step or epoch"),
            ({"start": 1, "end": 2, "follows": "rate", "until": 7}, "alone: leave out until"),
            ({"name": "step", "values": [{"at": 0, "value": 1}], "until": 7}, "values say their own moments"),
            ({"class": f"{OWN}.sawtoth"}, 'did you mean "sawtooth"'),
            ({"class": f"{OWN}.sawtooth", "tooth": 3}, 'takes no such argument; did you mean "teeth"'),
            ({"class": "torch.optim.lr_scheduler.CosineAnnealingLR"}, "moves learning rates"),
            ({"class": f"{OWN}.sawtooth", "until": "x"}, "'x' is no moment"),
            ("x", "expected a number or a section of keys and values"),
        ],
    )  # fmt: skip
    def test_in_a_recipe(self, spec: Any, words: str) -> None:
        recipe = {"extends": "images/digits", "train": {"loss_weights": {"force": spec}}}
        with pytest.raises(UserError, match=words) as error:
            load_recipe(recipe, check_components=True)
        assert "train.loss_weights.force" in str(error.value)

    @pytest.mark.parametrize(
        ("function", "words"),
        [
            (counting, "gives 1 and then 2 for the same step 0"),
            (no_weight, "gives inf at step 0; expected a weight"),
            (partial(no_weight, 1), r"is called with \(step, num_steps\), and it takes others"),
            (Late, "gives '' at step 0"),
        ],
    )
    def test_a_function_that_gives_no_weight(self, function: Any, words: str) -> None:
        arguments = {"value": "xx"} if function is Late else {}
        weights = Train.model_validate({"loss_weights": {"force": {"class": f"{OWN}.counting"}}}).loss_weights
        rate = LearningRate.make(Schedule(), 0.02, 64, 100)
        with pytest.raises(UserError, match=rf"train\.loss_weights\.force: {OWN}.counting .*{words}"):
            make_weights(weights, {"force": partial(function, **arguments)}, rate, LENGTH)


class Terms(isoscale.Task):
    """Two terms with weights of their own, and one that is not finite."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.broken = nn.Linear(3, 1), broken

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        error = (self.net(batch["x"]).squeeze(1) - batch["y"]) ** 2
        terms = {"near": error.mean(), "far": isoscale.WeightedSum((error * batch["n"]).sum(), batch["n"].sum())}
        return {**terms, "bad": (self.net.weight * 0 - 1).sqrt().sum()} if self.broken else terms


def sources() -> isoscale.Sources:
    generator = torch.Generator().manual_seed(1)
    rows = {
        "x": torch.randn(40, 3, generator=generator),
        "y": torch.randn(40, generator=generator),
        "n": torch.randint(1, 9, (40,), generator=generator),
    }
    return isoscale.Sources(train=rows, val=rows)


def task_and_data() -> tuple[Any, Any]:
    return Terms(), sources()


OPTIONS: dict[str, Any] = {"data__batch_size": 16, "train__epochs": 3, "observe__every": 1, "train__device": "cpu",
                           "observe__tensorboard": 0, "observe__level": "error", "train__threads": 1}  # fmt: skip
KINDS: dict[str, Any] = {
    "linear": {"start": 1.0, "end": 0.0},
    "cosine per epoch": {"name": "cosine", "start": 1.0, "end": 5.0, "every": "epoch"},
    "sigmoid": {"name": "sigmoid", "start": 1.0, "end": 20.0},
    "step": {"name": "step", "start": 1.0, "values": [{"at": "1 epochs", "value": 3.0}, {"at": 7, "value": 0.0}]},
    "own": {"class": f"{OWN}.sawtooth", "from": 2, "until": "2 epochs"},
    "rate": {"start": 1.0, "end": 9.0, "follows": "rate"},
}


def fit(path: Path, task: nn.Module | None = None, **keys: Any) -> isoscale.Run:
    overrides = {key.replace("__", "."): value for key, value in {**OPTIONS, **keys}.items()}
    return isoscale.Trainer({}, run=path, **overrides).fit(task or Terms(), sources())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_in_the_middle_does_not_show(kind: str, tmp_path: Path) -> None:
    keys = {"train__loss_weights": {"far": KINDS[kind]}, "schedule__name": "cosine"}
    whole = fit(tmp_path / "whole", **keys)

    class Stopping(Terms):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.stops and self.seen == 4:
                raise KeyboardInterrupt
            self.seen += 1

        stops, seen = True, 0

    with pytest.raises((isoscale.errors.Stopped, KeyboardInterrupt)):
        fit(tmp_path / "cut", Stopping(), checkpoint__every="1 steps", **keys)
    task = Stopping()
    task.stops = False
    cut = fit(tmp_path / "cut", task, checkpoint__every="1 steps", **keys)
    assert 0 < first_step(cut) < 9
    assert sha(cut) == sha(whole)
    assert timeless(cut) == timeless(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_moving_weight_is_logged_and_weighs(kind: str, tmp_path: Path) -> None:
    run = fit(tmp_path, train__loss_weights={"far": KINDS[kind], "near": 2.0}, schedule__name="cosine")
    history = {name: [value for _, value in run.history(name)] for name in run.metrics}
    weights = [value for _, value in run.history("loss_weight/far")]
    assert len(weights) == 9 and "loss_weight/near" not in history and len(set(weights)) > 1
    terms = (history[f"train/{name}"] for name in ("loss", "near", "far"))
    for loss, near, far, weight in zip(*terms, weights, strict=True):
        assert loss == pytest.approx(2 * near + weight * far, rel=1e-5)


@pytest.mark.slow
def test_two_ranks_weigh_as_one_does(tmp_path: Path) -> None:
    weights = {"far": KINDS["cosine per epoch"], "near": KINDS["step"]}
    keys = {**OPTIONS, "parallel__reduce": "tree", "train__loss_weights": weights}
    runs = [fit_on(world, tmp_path / str(world), task_and_data, **keys) for world in (1, 2)]
    assert sha(runs[0]) == sha(runs[1])
    assert timeless(runs[0]) == timeless(runs[1])


@pytest.mark.parametrize("keys", [{}, {"train__accumulate": 2}], ids=["whole", "parts"])
def test_a_term_that_weighs_0_may_be_infinite(keys: dict[str, Any], tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", **keys)
    run = fit(tmp_path / "run", Terms(broken=True), train__loss_weights={"bad": 0}, **keys)
    assert sha(run) == sha(plain)
    assert run.metrics["val/loss"] == plain.metrics["val/loss"]
    assert math.isnan(run.metrics["train/bad"])
    with pytest.raises(UserError, match="NaN or infinite"):
        fit(tmp_path / "bad", Terms(broken=True), **keys)


@pytest.mark.parametrize(("weight", "is_said"), [(KINDS["linear"], True), (KINDS["own"], True), (2.0, False)])
def test_a_loss_that_cannot_be_compared_decides_about_checkpoints_with_a_warning(
    weight: Any, is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"train__loss_weights": {"far": weight}, "train__epochs": 1, "observe__level": "info"}
    fit(tmp_path / "run", **keys)
    words = "checkpoint.monitor is val/loss, whose weights move (train.loss_weights.far)"
    said = " ".join(capsys.readouterr().out.split())
    assert (words in said) == is_said
    fit(tmp_path / "far", **keys, checkpoint__monitor="val/far")
    assert words not in " ".join(capsys.readouterr().out.split())


def test_not_every_term_may_weigh_0(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gives every term of the loss the weight 0"):
        fit(tmp_path, train__loss_weights={"near": 0, "far": 0})


def test_a_test_weighs_as_the_last_step_did(tmp_path: Path) -> None:
    weights = {"near": KINDS["sigmoid"], "far": {"class": f"{OWN}.Late", "value": 3.0}}
    run = fit(tmp_path, train__loss_weights=weights)
    values, (_, last) = isoscale.test(run, data=sources().val), run.history("loss_weight/near")[-1]
    assert 19.9 < last < 20
    assert values["test/loss"] == pytest.approx(last * values["test/near"] + 3 * values["test/far"], rel=1e-6)
