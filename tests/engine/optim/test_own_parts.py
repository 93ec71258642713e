"""Optimizers, schedules, losses and metrics by class path: a user's own, or any of torch's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.optim import SGD, lr_scheduler

import isoscale
from isoscale.engine.config import ScheduleClass
from isoscale.engine.optim.schedules import LearningRate, make_rate
from isoscale.errors import UserError
from isoscale.recipe.components import prepared
from isoscale.recipe.load import load_recipe
from isoscale.recipe.problems import RecipeError
from isoscale.recipe.trust import Trust, is_harmless
from tests.helpers import cli, first_step, sha, timeless, train
from tests.laws.test_stop_is_invisible import continued_at
from tests.ranks import on_ranks

OWN = "tests.engine.optim.own_parts"
TORCH = "torch.optim.lr_scheduler"
SMALL = {"data__subset": 150, "data__batch_size": 32, "train__epochs": 3, "observe__every": 3}
"""15 steps with a ragged last batch."""
FITS = {"task": {"model": {"class": "mlp", "widths": [3, 1]}}}
HOARDER = {"class": f"{OWN}.Hoarder", "lr": 0.05, "groups": [{"match": ["*.bias"], "noise": 0.0}]}


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Any]:
    """A recipe of a small regression, on data in a file."""
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    np.savez(tmp_path / "rows.npz", input=x.numpy(), target=(x @ torch.ones(3, 1)).numpy())
    return {
        "task": {"model": {"class": "mlp", "widths": [3, 8, 1]}},
        "data": {"class": "arrays", "path": str(tmp_path / "rows.npz"), "batch_size": 16,
                 "split": {"train": 48, "val": 16}},
        "train": {"epochs": 3}, "observe": {"level": "error", "tensorboard": 0},
    }  # fmt: skip


def fit(recipe: dict[str, Any], run: Path, **sections: Any) -> isoscale.Run:
    merged = {key: {**recipe.get(key, {}), **value} for key, value in sections.items()}
    return isoscale.train({**recipe, **merged}, run=run)


# --- optimizers


@pytest.mark.parametrize("name", ["RAdam", "Adam", "SGD", "Muon"])
def test_a_class_of_torch_trains_as_by_its_name(name: str, tmp_path: Path) -> None:
    by_name = train(tmp_path / "name", optimizer={"name": name.lower(), "lr": 0.01}, **SMALL)
    by_class = train(tmp_path / "class", optimizer={"class": f"torch.optim.{name}", "lr": 0.01}, **SMALL)
    assert sha(by_name) == sha(by_class)


def test_an_optimizer_of_ones_own_learns_with_groups(rows: dict[str, Any], tmp_path: Path) -> None:
    section = {"class": f"{OWN}.Lion", "lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1,
               "groups": [{"match": ["*.bias"], "weight_decay": 0}]}  # fmt: skip
    run = fit(rows, tmp_path / "run", optimizer=section, train={"epochs": 30})
    assert run.metrics["val/loss"] < 0.5
    assert load_recipe(run.path / "recipe.yaml").values["optimizer"]["class"] == f"{OWN}.Lion"


@pytest.mark.parametrize("step", [1, 7, 14])
@pytest.mark.parametrize("optimizer", [HOARDER, {"class": f"{OWN}.Slowing", "lr": 0.1}], ids=["Hoarder", "Slowing"])
@pytest.mark.slow
def test_all_that_an_optimizer_keeps_is_restored_to_the_bit(
    step: int, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    options = {**SMALL, "optimizer": optimizer, "checkpoint__every": "1 steps", "checkpoint__keep": 100}
    whole = train(tmp_path / "whole", **options)
    again = train(continued_at(step, whole.path, tmp_path / "again"), recipe=None)
    assert first_step(again) == step
    assert sha(again) == sha(whole)
    assert timeless(again) == timeless(whole)


def hoard(path: Path) -> str:
    return sha(train(path, **SMALL, optimizer=HOARDER, parallel__reduce="tree"))


@pytest.mark.slow
def test_an_optimizer_that_draws_noise_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    assert set(on_ranks(2, hoard, tmp_path / "two")) == {hoard(tmp_path / "one")}


def test_a_step_that_is_left_out_leaves_no_trace_in_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    run = train(tmp_path / "run", **SMALL, optimizer={"class": f"{OWN}.Lion"}, train__nan="skip")
    assert np.isfinite(run.metrics["val/loss"])


def test_what_cannot_be_saved_is_said(rows: dict[str, Any], tmp_path: Path) -> None:
    fit(rows, tmp_path / "run", optimizer={"class": f"{OWN}.Claims"}, observe={"level": "info"})
    assert "checkpoints do not hold Claims.generator" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"class": "torch.optim.LBFGS"}, "optimizer.class: LBFGS evaluates the loss several times"),
        ({"class": "torch.optim.SparseAdam"}, "optimizer.class: SparseAdam takes sparse gradients only"),
        ({"class": f"{OWN}.WithClosure"}, "optimizer.class: the step of WithClosure needs closure"),
        ({"class": f"{OWN}.NoRate"}, "optimizer.class: NoRate takes no lr"),
        ({"class": "torch.nn.Linear"}, "optimizer.class: Linear is not an optimizer"),
        ({"class": f"{OWN}.ramp"}, "optimizer.class: ramp is not an optimizer"),
        ({"class": f"{OWN}.Loin"}, 'has no "Loin"; did you mean "Lion"?'),
        (
            {"class": f"{OWN}.Lion", "beta": [0.1, 0.2]},
            'optimizer.beta: Lion takes no such argument; did you mean "beta',
        ),
        ({"class": f"{OWN}.Lion", "weight_decay": "x"}, 'optimizer.weight_decay: expected a number, found "x"'),
        ({"class": f"{OWN}.Lion", "params": []}, "optimizer.params: isoscale supplies this"),
        ({"class": f"{OWN}.Lion", "capturable": True}, "optimizer.capturable: isoscale decides this"),
        ({"class": f"{OWN}.Lion", "name": "adam"}, "optimizer.name: stands beside class, and one is enough"),
        ({"class": f"{OWN}.Lion", "lr": -1}, "optimizer.lr: expected a number above 0, found -1"),
        ({"name": f"{OWN}.Lion"}, "a class of your own is optimizer.class=package.module.Class"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused_before_training(section: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({**FITS, "optimizer": section}, check_components=True)
    assert words in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_rate_that_is_not_among_the_defaults_is_refused(rows: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="HiddenRate has no lr among its defaults"):
        fit(rows, tmp_path / "run", optimizer={"class": f"{OWN}.HiddenRate"})


def test_a_recipe_is_checked_without_importing_the_optimizer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\nraise SystemExit(3)\nclass Mine(torch.optim.Optimizer):\n"
                                      "    def __init__(self, params, lr, speed: float = 1.0): pass\n")  # fmt: skip
    ok = cli("recipe", "check", "images/digits", "optimizer={class: mine.Mine, speed: 2.0}", cwd=tmp_path)
    assert ok.returncode == 0, ok.stderr
    wrong = cli("recipe", "check", "images/digits", "optimizer={class: mine.Mine, sped: 2.0}", cwd=tmp_path)
    assert wrong.returncode == 2 and 'did you mean "speed"?' in wrong.stderr


def test_a_class_takes_the_place_of_a_named_optimizer_in_the_recipe_that_is_extended(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        f"extends: images/digits\noptimizer: {{_target_: {OWN}.Lion, lr: 0.01}}\n"
        f"schedule: {{class_path: {OWN}.Wave, init_args: {{periods: 2}}}}\n"
    )
    values = load_recipe(tmp_path / "mine.yaml", check_components=True).values
    assert values["optimizer"] == {"class": f"{OWN}.Lion", "lr": 0.01, "groups": []}
    assert values["schedule"]["periods"] == 2 and "name" not in values["schedule"]
    (tmp_path / "back.yaml").write_text("extends: mine.yaml\noptimizer: {name: sgd}\nschedule: {name: cosine}\n")
    values = load_recipe(tmp_path / "back.yaml", check_components=True).values
    assert values["optimizer"] == {"name": "sgd", "lr": 1e-3, "groups": []}
    assert values["schedule"]["name"] == "cosine" and "class" not in values["schedule"]


def test_classes_of_torch_are_harmless_in_a_recipe_of_somebody_else_and_others_are_not(tmp_path: Path) -> None:
    for name in ("torch.optim.RAdam", f"{TORCH}.StepLR", "torch.nn.functional.huber_loss", "torch.nn.HuberLoss"):
        assert is_harmless(name), name
    for name in ("torch.optim.lr_scheduler.wraps", "torch.nn.functional.handle_torch_function", "os.system"):
        assert not is_harmless(name), name
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.parent.mkdir()
    (recipe.parent / "run.json").write_text("{}")
    for text in ("optimizer: {class: shutil.rmtree}", "schedule: {class: os.system}", "task: {loss: os.system}",
                 "task: {metrics: [accuracy, os.system]}"):  # fmt: skip
        recipe.write_text(text)
        with pytest.raises(RecipeError, match="was not written by you"):
            load_recipe(recipe, check_components=True, trust=Trust.NAMED)


# --- schedules


def rate_of(spec: dict[str, Any], num_steps: int = 20, lr: float = 0.1, **ours: Any) -> LearningRate:
    section = ScheduleClass(**{**spec, **ours})
    return make_rate(section, lr, 64, num_steps, prepared({"class": section.class_, **section.arguments}))


@pytest.mark.parametrize(
    ("name", "arguments", "supplied"),
    [
        ("CosineAnnealingLR", {"T_max": 7, "eta_min": 0.01}, {}),
        ("CosineAnnealingLR", {}, {"T_max": 20}),
        ("OneCycleLR", {"max_lr": 0.3}, {"total_steps": 20, "cycle_momentum": False}),
        ("OneCycleLR", {}, {"max_lr": 0.1, "total_steps": 20, "cycle_momentum": False}),
        ("ExponentialLR", {"gamma": 0.9}, {}),
        ("StepLR", {"step_size": 3, "gamma": 0.5}, {}),
        ("MultiStepLR", {"milestones": [2, 9]}, {}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.2, "mode": "triangular2"}, {"cycle_momentum": False}),
        ("CosineAnnealingWarmRestarts", {"T_0": 4}, {}),
        ("PolynomialLR", {"total_iters": 12, "power": 2.0}, {}),
    ],
)
def test_a_scheduler_of_torch_gives_the_rates_that_it_gives_there(
    name: str, arguments: dict[str, Any], supplied: dict[str, Any]
) -> None:
    optimizer = SGD([torch.zeros(1)], lr=0.1)
    theirs = getattr(lr_scheduler, name)(optimizer, **arguments, **supplied)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    rate = rate_of({"class": f"{TORCH}.{name}", **arguments})
    assert [rate(step) for step in range(20)] == expected
    again = rate_of({"class": f"{TORCH}.{name}", **arguments})
    assert [again(step) for step in (13, 2, 19)] == [expected[13], expected[2], expected[19]]


def test_a_function_a_class_and_a_lambda_are_factors_of_the_rate_after_the_warm_up() -> None:
    rate = rate_of({"class": f"{OWN}.ramp", "low": 0.5}, num_steps=14, warmup=4)
    assert [rate(step) for step in range(4)] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert [rate(4), rate(9)] == pytest.approx([0.05, 0.075])
    assert rate_of({"class": f"{OWN}.Wave", "periods": 1})(10) == pytest.approx(0.0)
    assert rate_of({"class": f"{TORCH}.LambdaLR", "lr_lambda": f"{OWN}.half_life"})(10) == pytest.approx(0.05)
    scaled = rate_of({"class": f"{OWN}.ramp"}, scale="linear", base_batch_size=16)
    assert scaled.peak == pytest.approx(0.4)


@pytest.mark.parametrize(
    "schedule",
    [{"class": f"{OWN}.Wave", "warmup": 3}, {"class": f"{TORCH}.CosineAnnealingLR"}, {"class": f"{TORCH}.OneCycleLR"}],
)
@pytest.mark.slow
def test_a_run_goes_on_along_the_same_curve(schedule: dict[str, Any], tmp_path: Path) -> None:
    options = {**SMALL, "schedule": schedule, "checkpoint__every": "1 steps", "checkpoint__keep": 100}
    whole = train(tmp_path / "whole", **options)
    again = train(continued_at(8, whole.path, tmp_path / "again"), recipe=None)
    assert first_step(again) == 8
    assert sha(again) == sha(whole)
    assert timeless(again) == timeless(whole)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"class": f"{TORCH}.ReduceLROnPlateau"}, "use schedule={name: plateau, monitor: val/loss"),
        ({"class": f"{TORCH}.SequentialLR"}, "SequentialLR takes other schedulers"),
        ({"class": f"{TORCH}.StepLR", "step_size": 3, "gama": 1}, 'did you mean "gamma"?'),
        ({"class": f"{TORCH}.StepLR"}, 'schedule: StepLR needs the argument "step_size"'),
        ({"class": f"{TORCH}.OneCycleLR", "cycle_momentum": True}, "schedule.cycle_momentum: isoscale supplies this"),
        ({"class": f"{OWN}.ramp", "lo": 0.1}, 'schedule.lo: ramp takes no such argument; did you mean "low"?'),
        ({"class": f"{OWN}.ramp", "low": "x"}, 'schedule.low: expected a number, found "x"'),
        ({"class": f"{OWN}.Lion"}, "schedule.class: Lion is no schedule"),
        ({"class": f"{OWN}.nothing"}, 'has no "nothing"'),
        ({"class": f"{OWN}.ramp", "name": "cosine"}, "schedule.name: stands beside class"),
        ({"class": f"{OWN}.ramp", "scale": "sqrt"}, "scale: sqrt needs base_batch_size"),
        ({"class": f"{OWN}.ramp", "warmup": -1}, "schedule.warmup: expected"),
        ({"gama": 0.1}, 'schedule.gama: unknown key; did you mean "gamma"?'),
    ],
)
def test_schedules_that_do_not_fit_are_refused_before_training(section: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe({**FITS, "schedule": section}, check_components=True)
    assert words in str(caught.value)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("falls_below", "gives -18.0 at step 19; expected a factor, finite and not below 0"),
        ("words", "gives 'slow' at step 0; expected a factor"),
        ("of_step_only", "is called with (step, num_steps)"),
        ("Stateful", "it must be a function of the step alone"),
    ],
)
def test_what_is_no_schedule_is_refused_at_the_start(name: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        rate_of({"class": f"{OWN}.{name}"})
    assert words in str(caught.value)


def test_a_rate_that_is_not_a_number_ends_the_training_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"breaks gives nan at step 3; expected a factor"):
        train(tmp_path / "run", **SMALL, schedule={"class": f"{OWN}.breaks"})


# --- losses and metrics


@pytest.mark.parametrize(
    "loss",
    [
        {"class": "torch.nn.HuberLoss", "delta": 0.5},
        {"class": "torch.nn.functional.huber_loss", "delta": 0.5},
        "torch.nn.functional.mse_loss",
        "torch.nn.MSELoss",
        f"{OWN}.asinh",
        {"class": f"{OWN}.asinh", "scale": 0.1},
        {"class": f"{OWN}.make_loss", "power": 3},
    ],
)
def test_a_loss_is_any_class_or_function(loss: Any, rows: dict[str, Any], tmp_path: Path) -> None:
    task = {**rows["task"], "loss": loss, "metrics": ["mae", f"{OWN}.bias", {"class": "torchmetrics.MeanSquaredError"}]}
    run = fit(rows, tmp_path / "run", task=task)
    assert {"val/mae", "val/bias", "val/meansquarederror"} <= set(run.metrics)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["value"] for line in lines if line["name"] == "val/loss"]
    assert losses[-1] < losses[0]


def test_a_huber_loss_by_class_and_by_function_are_the_same(rows: dict[str, Any], tmp_path: Path) -> None:
    specs = ({"class": "torch.nn.HuberLoss", "delta": 0.5}, {"class": "torch.nn.functional.huber_loss", "delta": 0.5})
    runs = [fit(rows, tmp_path / str(i), task={**rows["task"], "loss": spec}) for i, spec in enumerate(specs)]
    assert sha(runs[0]) == sha(runs[1])


def test_what_a_loss_learns_is_trained_and_saved(rows: dict[str, Any], tmp_path: Path) -> None:
    task = {**rows["task"], "loss": {"class": f"{OWN}.Learned", "start": 2.0}}
    run = fit(rows, tmp_path / "run", task=task, optimizer={"lr": 0.01})
    assert float(load_file(run.path / "checkpoints/last/model.safetensors")["criterion.width"]) != 2.0


@pytest.mark.slow
def test_a_classifier_takes_losses_and_metrics_too(tmp_path: Path) -> None:
    accuracy = {"class": "torchmetrics.Accuracy", "task": "multiclass", "num_classes": 10}
    loss = {"class": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1}
    run = train(tmp_path / "run", **SMALL, task__loss=loss, task__label_smoothing=0, task__metrics=[accuracy])
    assert run.metrics["val/multiclassaccuracy"] == pytest.approx(run.metrics["val/accuracy"])
    same = train(tmp_path / "same", **SMALL, task__label_smoothing=0.1)
    assert same.metrics["val/accuracy"] == run.metrics["val/accuracy"]
    with pytest.raises(UserError, match=r"use task\.label_smoothing=0"):
        train(tmp_path / "refused", **SMALL, task__loss=loss)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (f"{OWN}.asinhh", 'task.loss: tests.engine.optim.own_parts has no "asinhh"; did you mean "asinh"?'),
        ({"class": f"{OWN}.asinh", "scal": 1}, 'task.loss.scal: asinh takes no such argument; did you mean "scale"?'),
        ({"class": "torch.nn.HuberLoss", "delta": "x"}, 'task.loss.delta: expected a number, found "x"'),
        ({"class": f"{OWN}.asinh", "prediction": 1}, "task.loss.prediction: isoscale supplies this argument itself"),
    ],
)
def test_losses_that_do_not_fit_are_refused_before_training(loss: Any, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("images/digits", {"task.loss": loss}, check_components=True)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [f"{OWN}.without_target", "torch.nn.CTCLoss", "torch.nn.TripletMarginLoss"])
def test_a_loss_that_is_not_called_with_prediction_and_target_says_so(
    name: str, rows: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"is called with \(prediction, target\)"):
        fit(rows, tmp_path / "run", task={**rows["task"], "loss": name})


# --- a newcomer


@pytest.mark.slow
def test_an_optimizer_in_a_file_of_ones_own_needs_no_more_than_its_name(tmp_path: Path) -> None:
    source = Path(sys.modules[isoscale.__name__].__file__ or "").parents[2] / "tests/engine/optim/own_parts.py"
    (tmp_path / "my_file.py").write_text(source.read_text())
    words = ("optimizer={class: my_file.Lion, lr: 1e-3}", "schedule={class: my_file.ramp}", "train.epochs=1")
    done = cli("train", "images/digits", "--run", "run", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tested = cli("test", "run", "--json", cwd=tmp_path)
    assert tested.returncode == 0 and isinstance(tested, subprocess.CompletedProcess)
