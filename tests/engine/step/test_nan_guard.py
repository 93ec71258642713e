"""What becomes of a step whose gradients are NaN or infinite: stopped at, skipped, mended, or gone back behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoscale
from isoscale.engine.metrics.windows import NotFinite
from isoscale.engine.state.checkpoint import read_weights
from tests.helpers import QUIET, sha, timeless

pytestmark = pytest.mark.slow

BAD = 37
"""The sample that holds a NaN."""


class Averaged(nn.Module):
    """A network with batch norm, whose running statistics a NaN would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Predict."""
        result: Tensor = self.layers(inputs)
        return result


def rows(bad: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    if bad:
        inputs[BAD] = float("nan")
    return {"input": inputs, "target": targets}


def fit(path: Path, bad: bool = True, data: dict[str, Tensor] | None = None, **keys: Any) -> isoscale.Run:
    options = {"data.batch_size": 10, "train.epochs": 3, "data.shuffle": False, "observe.every": 3, "train.threads": 1}
    torch.manual_seed(0)
    task = isoscale.Supervised(Averaged(), loss="mse")
    return isoscale.Trainer(run=path, **{**QUIET, **options, **keys}).fit(task, data or rows(bad))


def weights(run: isoscale.Run) -> dict[str, Tensor]:
    return read_weights(run.checkpoint("last"))


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop", "adamax"])
@pytest.mark.parametrize("reduce", ["flat", "tree"])
def test_a_skipped_step_is_as_if_it_had_not_been(optimizer: str, reduce: str, tmp_path: Path) -> None:
    keys = {"optimizer.name": optimizer, "parallel.reduce": reduce, "train.ema": 0.9, "train.nan": "skip"}
    if reduce == "tree":
        keys["data.batch_size"] = 20
    run = fit(tmp_path / "run", **keys)
    assert [value for _, value in run.history("train/not_finite")] == [1.0] * 3
    size = keys.get("data.batch_size", 10)
    good = [row for row in range(60) if row // size != BAD // size]
    without = fit(tmp_path / "without", data={name: tensor[good] for name, tensor in rows(bad=True).items()}, **keys)
    expected = weights(without)
    for name, tensor in weights(run).items():
        assert "num_batches" in name or torch.equal(tensor, expected[name]), name
    loss = [value for _, value in run.history("train/loss_epoch")]
    assert len(loss) == 3 and loss == pytest.approx([value for _, value in without.history("train/loss_epoch")])


def test_skipping_leaves_the_weights_where_they_were(tmp_path: Path) -> None:
    """Three batches before the bad one, then that one alone: the weights do not move any more."""
    keys = {"train.nan": "skip", "optimizer.name": "adam", "train.epochs": 1, "train.ema": 0.9}
    before = weights(fit(tmp_path / "before", **keys, **{"train.steps": 3}))
    after = weights(fit(tmp_path / "after", **keys, **{"train.steps": 4}))
    assert all(torch.equal(before[name], after[name]) for name in before if "num_batches" not in name)


def test_where_all_is_finite_skip_and_zero_change_nothing(tmp_path: Path) -> None:
    runs = [fit(tmp_path / policy, bad=False, **{"train.nan": policy, "train.accumulate": 2})
            for policy in ("stop", "skip", "zero")]  # fmt: skip
    assert len({sha(run) for run in runs}) == 1
    assert timeless(runs[0]) == timeless(runs[1]) == timeless(runs[2])


def test_zeroed_gradients_let_the_rest_of_the_training_go_on(tmp_path: Path) -> None:
    run = fit(tmp_path / "run", **{"train.nan": "zero", "optimizer.lr": 0.01})
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())
    assert [value for _, value in run.history("train/not_finite")] == [1.0] * 3
    loss = [value for _, value in run.history("train/loss_epoch")]
    assert len(loss) == 3 and loss[2] < loss[1] < 0.9 * loss[0]


def test_stop_is_the_default_and_saves_nothing_that_is_spoilt(tmp_path: Path) -> None:
    with pytest.raises(NotFinite):
        fit(tmp_path / "run", **{"checkpoint.every": "1 steps", "observe.every": 1})
    assert all(torch.isfinite(tensor).all() for tensor in weights(isoscale.Run(tmp_path / "run")).values())


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_rolling_back_leaves_out_the_step_and_goes_on(optimizer: str, tmp_path: Path) -> None:
    keys = {"train.nan": "rollback", "optimizer.name": optimizer, "checkpoint.every": "1 epoch"}
    run = fit(tmp_path / "run", **keys)
    assert run.status == "done"
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())
    steps = [step for step, _ in run.history("train/loss")]
    assert steps == sorted(set(steps))  # the log goes on without a repeated step
    assert len(run.record["rolled_back"]) == 3  # once an epoch


def test_a_run_that_rolled_back_continues_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    keys = {"train.nan": "rollback", "checkpoint.every": "2 steps"}
    whole = fit(tmp_path / "whole", **keys)
    for epochs in (1, 2, 3):
        parts = fit(tmp_path / "parts", **{**keys, "train.epochs": epochs})
    assert sha(parts) == sha(whole)
    assert timeless(parts) == timeless(whole)


def test_fp16_and_manual_updates_have_ways_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(isoscale.UserError, match="fp16 skips steps in its own way"):
        fit(tmp_path / "run", **{"train.nan": "skip", "train.precision": "fp16"})


@pytest.mark.parametrize("policy", ["skip", "zero", "rollback"])
def test_a_training_that_never_recovers_ends(policy: str, tmp_path: Path) -> None:
    """The weights are huge after the first step, and leaving out all that follows is no training."""
    with pytest.raises(NotFinite):
        fit(tmp_path / "run", bad=False, **{"train.nan": policy, "optimizer.name": "sgd", "optimizer.lr": 1e30,
                                            "train.epochs": 20})  # fmt: skip
    assert isoscale.Run(tmp_path / "run").status == "failed"
