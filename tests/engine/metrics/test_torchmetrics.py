"""torchmetrics objects count what a direct computation counts, over every sample once, and survive a stop."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics import classification, regression

import isoscale
from isoscale.engine.metrics.torchmetrics import MetricStates, adds_up, compute, reset, update
from tests.engine.lightning.modules import CLASSES, FEATURES, points

pytestmark = pytest.mark.slow


def multiclass(cls: Any, **options: Any) -> Any:
    return cls(task="multiclass", num_classes=CLASSES, **options)


def metrics() -> list[Any]:
    return [
        multiclass(torchmetrics.Accuracy),
        multiclass(torchmetrics.F1Score, average="macro"),
        multiclass(torchmetrics.AUROC),  # keeps every prediction
        multiclass(torchmetrics.ConfusionMatrix),  # has one value for each pair of classes
    ]


def fit(task: nn.Module, run: Path, steps: int, **overrides: Any) -> isoscale.Run:
    recipe = {
        "train": {"epochs": None, "steps": steps, "device": "cpu", "threads": 1},
        "data": {"batch_size": 8, "eval_batch_size": 7},
        "observe": {"every": 1, "tensorboard": 0, "level": "warning"},
    }
    data = isoscale.Sources(points(60), points(30, seed=1))
    return isoscale.Trainer(recipe, run=run, **overrides).fit(task, data)


def supervised(metrics: list[Any]) -> Any:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    return isoscale.Supervised(net, "cross_entropy", metrics)


def logged(run: Path) -> list[tuple[Any, ...]]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "epoch", "name", "value")
    return [tuple(entry[key] for key in keys) for entry in entries if not entry["name"].startswith("time/")]


def test_validation_metrics_equal_a_direct_computation_over_the_whole_set(tmp_path: Path) -> None:
    task = supervised(metrics())
    run = fit(task, tmp_path / "run", 16)
    inputs, labels = points(30, seed=1).tensors
    with torch.no_grad():
        scores = task(inputs)
    names = ("accuracy", "f1score", "auroc")
    for name, metric in zip(names, metrics(), strict=False):
        found = [value for key, value in run.metrics.items() if key.startswith("val/") and name in key]
        assert found == pytest.approx([float(metric(scores, labels))], abs=1e-6), name
    matrix = multiclass(torchmetrics.ConfusionMatrix)(scores, labels).flatten().tolist()
    found = [value for key, value in run.metrics.items() if key.startswith("val/") and "confusion" in key]
    assert found == matrix


def test_training_metrics_begin_anew_each_epoch(tmp_path: Path) -> None:
    run = fit(supervised([multiclass(torchmetrics.ConfusionMatrix)]), tmp_path / "run", 24)
    sums: dict[int, float] = {}
    for step, _, name, value in logged(run.directory.path):
        if name.startswith("train/") and "confusion" in name:
            sums[step] = sums.get(step, 0.0) + value
    assert sums == {8: 60, 16: 60, 24: 60}


@pytest.mark.parametrize("stop", [3, 8, 11])
def test_metrics_survive_a_stop_in_the_middle_of_an_epoch(stop: int, tmp_path: Path) -> None:
    straight = supervised(metrics())
    first, second = deepcopy(straight), deepcopy(straight)
    fit(straight, tmp_path / "straight", 20)
    fit(first, tmp_path / "stopped", stop)
    fit(second, tmp_path / "stopped", 20)
    for (name, one), two in zip(straight.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    whole, pieces = logged(tmp_path / "straight"), logged(tmp_path / "stopped")
    extra = [line for line in pieces if line not in whole]  # the end of the shorter run is evaluated
    assert all(line[0] == stop and line[2].startswith("val/") for line in extra)
    assert [line for line in pieces if line not in extra] == whole


def cases() -> dict[str, tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(5, 20, CLASSES, generator=generator)
    labels = torch.randint(CLASSES, (5, 20), generator=generator)
    values, targets = torch.randn(5, 20, generator=generator), torch.randn(5, 20, generator=generator)
    classes, numbers = list(zip(scores, labels, strict=True)), list(zip(values, targets, strict=True))
    return {
        "accuracy": (multiclass(torchmetrics.Accuracy), classes),
        "accuracy of each class": (multiclass(torchmetrics.Accuracy, average="none"), classes),
        "macro f1": (multiclass(torchmetrics.F1Score, average="macro"), classes),
        "confusion": (multiclass(torchmetrics.ConfusionMatrix), classes),
        "auroc, all kept": (multiclass(torchmetrics.AUROC), classes),
        "auroc, binned": (multiclass(torchmetrics.AUROC, thresholds=20), classes),
        "calibration": (classification.MulticlassCalibrationError(num_classes=CLASSES), classes),
        "squared error": (regression.MeanSquaredError(), numbers),
        "absolute error": (regression.MeanAbsoluteError(), numbers),
        "r2": (regression.R2Score(), numbers),
        "pearson": (regression.PearsonCorrCoef(), numbers),  # its state is merged, not added
        "largest": (LargestError(), numbers),
    }


class LargestError(torchmetrics.Metric):
    """A state that is a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.zeros(()), dist_reduce_fx="max")

    def update(self, prediction: torch.Tensor, target: torch.Tensor) -> None:
        self.largest = torch.maximum(self.largest, (prediction - target).abs().max())

    def compute(self) -> torch.Tensor:
        return self.largest


@pytest.mark.parametrize("name", list(cases()))
def test_an_update_in_place_equals_a_plain_one(name: str) -> None:
    metric, batches = cases()[name]
    plain = deepcopy(metric)
    addresses = {key: getattr(metric, key).data_ptr() for key in metric._defaults} if adds_up(metric) else {}
    for _ in range(2):
        for batch in batches:
            update(metric, *batch)
            plain.update(*batch)
        expected = plain.compute().flatten().tolist()
        assert list(compute(metric).values()) == pytest.approx(expected, rel=1e-6)
        assert all(getattr(metric, key).data_ptr() == address for key, address in addresses.items())
        reset(metric)
        plain.reset()


def test_only_states_that_are_sums_are_added() -> None:
    added = {name for name, (metric, _) in cases().items() if adds_up(metric)}
    assert {"accuracy", "macro f1", "confusion", "auroc, binned", "squared error", "r2"} <= added
    assert not {"auroc, all kept", "pearson", "largest"} & added


@pytest.mark.parametrize("name", list(cases()))
def test_a_state_that_is_saved_and_loaded_goes_on_to_the_same_value(name: str) -> None:
    metric, batches = cases()[name]
    holder, fresh = nn.ModuleDict({"metric": deepcopy(metric)}), nn.ModuleDict({"metric": deepcopy(metric)})
    for batch in batches[:2]:
        update(holder["metric"], *batch)
    tensors, values = MetricStates(holder, {"seen": holder["metric"]}).state()
    names: dict[str, Any] = {}
    MetricStates(fresh, names).load(
        {key: value.clone() for key, value in tensors.items()}, json.loads(json.dumps(values))
    )
    assert names == {"seen": fresh["metric"]}
    for batch in batches[2:]:
        update(holder["metric"], *batch)
        update(fresh["metric"], *batch)
    assert compute(holder["metric"]) == compute(fresh["metric"])


class Collected(isoscale.Supervised):
    """A collection whose metrics share their state."""

    def __init__(self) -> None:
        super().__init__(supervised([]).model, "cross_entropy")
        self.collection = torchmetrics.MetricCollection(
            {
                name: multiclass(cls, average="macro")
                for name, cls in (("f1", torchmetrics.F1Score), ("recall", torchmetrics.Recall))
            }
        )

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = self.split(batch)
        self.collection.update(self(inputs), labels)
        for name, metric in self.collection.items(keep_base=True, copy_state=False):
            self.log(name, metric)


def test_metrics_that_share_their_state_are_all_read_before_any_forgets(tmp_path: Path) -> None:
    task = Collected()
    run = fit(task, tmp_path / "run", 16)
    inputs, labels = points(30, seed=1).tensors
    with torch.no_grad():
        scores = task(inputs)
    for name, cls in (("f1", torchmetrics.F1Score), ("recall", torchmetrics.Recall)):
        expected = float(multiclass(cls, average="macro")(scores, labels))
        assert run.metrics[f"val/{name}"] == pytest.approx(expected, abs=1e-6)
