"""Losses of several named terms, from the training step to the validation's summary."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isoscale

RECIPE: dict[str, Any] = {
    "data": {"batch_size": 16},
    "train": {"steps": 6, "epochs": None, "precision": "64", "loss_weights": {"far": {"start": 1.0, "end": 3.0}}},
    "optimizer": {"name": "adamw", "weight_decay": 0.5},
    "observe": {"every": 1, "tensorboard": 0, "level": "error"},
}


class TwoTerms(isoscale.Task):
    """A network with a part that no loss reaches, and a loss of two terms, one of them weighted by other things."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.idle = nn.Linear(3, 1), nn.Linear(3, 1)
        self.sizes: list[int] = []
        """Of the parts that it was trained on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training:
            self.sizes.append(len(batch["y"]))
        error = (self.used(batch["x"]).squeeze(1) - batch["y"]) ** 2
        return {"near": error.mean(), "far": isoscale.WeightedSum((error * batch["n"]).sum(), batch["n"].sum())}


def data() -> isoscale.Sources:
    generator = torch.Generator().manual_seed(1)
    rows = {
        "x": torch.randn(40, 3, generator=generator, dtype=torch.float64),
        "y": torch.randn(40, generator=generator, dtype=torch.float64),
        "n": torch.randint(1, 9, (40,), generator=generator),
    }
    return isoscale.Sources(train=rows, val=rows)


def trained(path: Path, **train: Any) -> tuple[isoscale.Run, TwoTerms]:
    task = TwoTerms()
    recipe = {**RECIPE, "train": {**RECIPE["train"], **train}}
    return isoscale.Trainer(recipe, run=path).fit(task, data()), task


def test_the_losses_of_training_and_validation_are_the_weighted_sum_of_their_terms(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, evaluate="1 steps")
    history = {name: dict(run.history(name)) for name in run.metrics}
    for step in range(1, 7):
        weight = 1 + 2 * (step - 1) / 5
        for stage in ("train", "val"):
            near, far = history[f"{stage}/near"][step], history[f"{stage}/far"][step]
            assert history[f"{stage}/loss"][step] == pytest.approx(near + weight * far, rel=1e-6)


def test_a_test_weighs_the_terms_as_the_last_step_did(tmp_path: Path) -> None:
    run, _ = trained(tmp_path)
    values = isoscale.test(run, data=data().val)
    assert values["test/loss"] == pytest.approx(values["test/near"] + 3 * values["test/far"], rel=1e-6)


def test_micro_batches_train_to_the_same_weights_and_leave_idle_ones_alone(tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "whole")
    _, cut = trained(tmp_path / "cut", accumulate=3)
    assert whole.sizes == [16, 16, 8] * 2 and cut.sizes == [5, 5, 6, 5, 5, 6, 2, 3, 3] * 2
    for one, two in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=1e-9, atol=1e-12)
    assert torch.equal(cut.idle.weight, TwoTerms().idle.weight.double())
