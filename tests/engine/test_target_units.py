"""Targets that are transformed for training: predictions and metrics are in stored units, the loss is what it was."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import isoscale
from isoscale.data.transforms import Divide, Flatten, Noise, Normalize, Scale
from isoscale.engine.target_units import TargetUnits
from isoscale.errors import UserError
from tests.helpers import QUIET, sha

generator = torch.Generator().manual_seed(0)
X = torch.randn(160, 3, generator=generator)
TRUTH = X @ torch.randn(3, 2, generator=generator)
Y = 100 + 10 * TRUTH
NAMED = {
    "scale": {"class": "scale", "key": "y"},
    "minmax": {"class": "scale", "kind": "minmax", "per": "whole", "key": "y"},
    "normalize": {"class": "normalize", "mean": 100, "std": 10, "key": "y"},
    "channels": {"class": "normalize", "mean": [100, 90], "std": [10, 5], "key": "y"},
    "divide": {"class": "divide", "by": 7, "key": "y"},
    "noise": {"class": "noise", "deviation": 0.1, "key": "y"},
    "flatten": {"class": "flatten", "key": "y"},
}
STANDING = {"train": {"epochs": 2}, "optimizer": {"name": "sgd", "lr": 1e-30}}
"""The network stays as it is, so that what a training logs can be computed by hand."""


def worst(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).abs().mean()


def task(*metrics: Any, model: nn.Module | None = None) -> isoscale.Supervised:
    torch.manual_seed(0)
    return isoscale.Supervised(model or nn.Linear(3, 2), "mse", metrics or ["mae"], input="x", target="y")


def fit(
    path: Path, transforms: list[Any], made: nn.Module | None = None, target: Tensor = Y, **sections: Any
) -> isoscale.Run:
    rows = {"x": X, "y": target}
    recipe = {**STANDING, "data": {"batch_size": 40, "transforms": transforms}, **sections}
    data = isoscale.Sources(train=rows, val=rows, test=rows)
    return isoscale.Trainer(recipe, run=path, **QUIET).fit(made or task(), data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["scale"], ["minmax"], ["normalize"], ["channels"], ["divide"], ["normalize", "scale"], ["scale", "divide"],
        ["divide", "channels", "minmax"], ["scale", "noise"], ["flatten", "divide"], ["minmax", "normalize", "divide"],
    ],
    ids="-".join,
)  # fmt: skip
def test_predictions_and_metrics_are_in_stored_units_whatever_was_done_to_the_target(names: list[str], tmp_path: Path):
    run = fit(tmp_path / "run", [NAMED[name] for name in names], task("mae", worst))
    found = isoscale.predict(run)["prediction"]
    learned = torch.nn.functional.linear(X, *run.model().parameters()).detach()
    spread = (found.amax() - found.amin()) / (learned.amax() - learned.amin())
    assert spread > 1.5, "it is stretched as the target was"
    apart = float((found.double() - Y).abs().mean())
    values = {**run.metrics, **isoscale.test(run)}
    rough = 0.2 if "noise" in names else 1e-5
    for name in ("train/mae", "train/worst"):
        assert values[name] == pytest.approx(apart, rel=rough)
    for name in ("val/mae", "val/worst", "test/mae", "test/worst"):
        assert values[name] == pytest.approx(apart, rel=1e-5), name
    assert values["val/loss"] != pytest.approx(float((found - Y).square().mean()), rel=0.01), (
        "the loss is what is optimised"
    )


@pytest.mark.parametrize("target", [Y[:, 0], Y[:, :1]], ids=["numbers", "columns"])
@pytest.mark.parametrize("name", ["scale", "minmax", "normalize"])
def test_targets_may_be_one_number_a_sample(target: Tensor, name: str, tmp_path: Path):
    model = nn.Sequential(nn.Linear(3, 1), *([nn.Flatten(0)] if target.dim() == 1 else []))
    run = fit(tmp_path / "run", [NAMED[name]], task(model=model), target)
    found = isoscale.predict(run)["prediction"]
    assert found.shape == target.shape
    assert run.metrics["val/mae"] == pytest.approx(float((found - target).abs().mean()), rel=1e-5)


class Shown(isoscale.Supervised):
    def show_results(self, source: Any, outputs: dict[str, Tensor]) -> dict[str, Any]:
        self.seen = outputs["prediction"]
        return {}


def test_a_task_that_shows_its_predictions_sees_them_in_stored_units(tmp_path: Path):
    made = Shown(nn.Linear(3, 2), input="x", target="y")
    run = fit(tmp_path / "run", [NAMED["normalize"]], made)
    isoscale.figures(run)
    assert made.seen.equal(isoscale.predict(run)["prediction"])


def test_neither_losses_nor_weights_depend_on_metrics(tmp_path: Path):
    sections = {"train": {"epochs": 3}, "optimizer": {"lr": 0.05}}
    bare = fit(
        tmp_path / "bare", [NAMED["scale"]], isoscale.Supervised(task().model, input="x", target="y"), **sections
    )
    full = fit(tmp_path / "full", [NAMED["scale"]], task("mae", worst), **sections)
    assert sha(bare) == sha(full)
    assert bare.history("train/loss") == full.history("train/loss")
    assert bare.history("val/loss") == full.history("val/loss")


def test_a_small_error_of_large_numbers_keeps_its_digits(tmp_path: Path):
    energies = -1e6 + TRUTH.double()
    run = fit(tmp_path / "run", [{**NAMED["scale"]}], target=energies)
    scale = Scale(key="y")
    scale.fit([{"y": energies}])
    with torch.no_grad():
        learned = run.model()(X)
    apart = (scale.inverse(learned.double()) - energies).abs().mean()
    assert run.metrics["val/mae"] == pytest.approx(float(apart), rel=1e-4)


def test_objects_of_torchmetrics_count_in_stored_units(tmp_path: Path):
    metrics = torchmetrics.MeanAbsoluteError(), torchmetrics.PearsonCorrCoef(num_outputs=2)
    run = fit(tmp_path / "run", [NAMED["normalize"]], task(*metrics))
    apart = isoscale.predict(run)["prediction"] - Y
    for name in ("train/meanabsoluteerror_epoch", "val/meanabsoluteerror"):
        assert run.metrics[name] == pytest.approx(float(apart.abs().mean()), rel=1e-5)
    assert isoscale.test(run)["test/meanabsoluteerror"] == pytest.approx(float(apart.abs().mean()), rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "64"])
def test_metrics_and_predictions_are_right_in_every_precision(precision: str, tmp_path: Path):
    run = fit(tmp_path / "run", [NAMED["normalize"]], train={"epochs": 1, "precision": precision})
    found = isoscale.predict(run)["prediction"]
    assert found.dtype == (torch.float64 if precision == "64" else torch.float32)
    assert run.metrics["val/mae"] == pytest.approx(float((found - Y).abs().mean()), rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("name", ["scale", "normalize", "channels", "divide"])
def test_a_compiled_step_logs_the_same(name: str, tmp_path: Path):
    eager, compiled = (
        fit(tmp_path / program, [NAMED[name]], train={"epochs": 2, "program": program})
        for program in ("eager", "compiled")
    )
    assert compiled.metrics["train/mae"] == pytest.approx(eager.metrics["train/mae"], rel=1e-6)


class Logarithm:
    key = "y"

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "y": batch["y"].log()}


class Undone(Logarithm):
    def inverse(self, values: Tensor) -> Tensor:
        return values.exp()


class Unsaid:
    """Does not say what it changes."""

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "y": batch["y"].log()}


class InPlace:
    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["y"] -= 3
        return batch


class OfInputs:
    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**batch, "x": batch["x"] * 2}


HERE = __name__


class TestTransformsOfOnesOwn:
    def test_are_undone_if_they_say_how(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        positive = Y.abs() + 1
        run = fit(tmp_path / "run", [f"{HERE}.Undone", NAMED["divide"]], target=positive)
        with torch.no_grad():
            by_hand = (run.model()(X) * 7).exp()
        torch.testing.assert_close(isoscale.predict(run)["prediction"], by_hand)
        assert run.metrics["val/mae"] == pytest.approx(float((by_hand - positive).abs().mean()), rel=1e-5)
        assert "units" not in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["Logarithm", "Unsaid", "InPlace"])
    def test_are_named_if_predictions_are_in_their_units(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        run = fit(tmp_path / "run", [f"{HERE}.{name}", NAMED["divide"]], target=Y.abs() + 1)
        found = isoscale.predict(run)["prediction"]
        with torch.no_grad():
            torch.testing.assert_close(found, run.model()(X) * 7, msg="what came after it is undone")
        said = capsys.readouterr().err
        assert f"predictions are in the units that {name} leaves 'y' in" in said and "`inverse(values)`" in said

    def test_are_named_if_nobody_can_see_what_they_change(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        run = fit(tmp_path / "run", [f"{HERE}.OfInputs"])
        isoscale.predict(run, data=X)
        assert "if OfInputs changes 'y', predictions are in the units that it leaves" in capsys.readouterr().err

    def test_of_the_input_need_no_words(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
        run = fit(tmp_path / "run", [f"{HERE}.OfInputs", NAMED["divide"]])
        isoscale.predict(run)
        assert "units" not in capsys.readouterr().err


def likelihood(prediction: Tensor, target: Tensor) -> Tensor:
    mean, deviation = prediction[:, :2], prediction[:, 2:].exp()
    return ((mean - target) / deviation).square().mean() + deviation.log().mean()


@pytest.mark.parametrize("name", ["scale", "normalize"])
def test_outputs_of_another_shape_are_left_as_they_are(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    made = isoscale.Supervised(nn.Linear(3, 4), likelihood, [likelihood], input="x", target="y")
    run = fit(tmp_path / "run", [NAMED[name]], made)
    assert run.metrics["val/likelihood"] == pytest.approx(run.metrics["val/loss"])
    with torch.no_grad():
        torch.testing.assert_close(isoscale.predict(run)["prediction"], run.model()(X))
    assert "predictions (4,) have another shape than 'y' (2,)" in capsys.readouterr().err


def test_a_transform_that_cannot_be_undone_keeps_those_before_it():
    units = TargetUnits(task(), [Divide(2, key="y"), Logarithm(), Normalize(1, 4, key="y"), Noise(1, key="y")])
    assert isinstance(units.kept, Logarithm)
    assert units.stored(torch.tensor([1.0])).tolist() == [5.0]
    assert units.learned(torch.tensor([5.0])).tolist() == [1.0]
    assert TargetUnits(task(), [Flatten(key="y"), Divide(2)]).kept is None


@pytest.mark.parametrize(
    "transform", [Divide(2), Normalize(0, 1), Flatten(), Scale()], ids=lambda each: type(each).__name__
)
def test_a_batch_without_the_name_that_a_transform_wants_is_refused_in_words(transform: Any):
    with pytest.raises(
        UserError, match=r"changes 'input' of a batch, but a batch is a tuple, .*: give the data as a dict"
    ):
        transform((X, Y))
    with pytest.raises(UserError, match="changes 'input' of a batch, but a batch has 'x', 'y': set its `key`"):
        transform({"x": X, "y": Y})
