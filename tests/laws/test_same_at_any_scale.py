"""Law 1 on one rank: where the data lives and how many steps a launch has do not change a bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoscale
from isoscale.engine.state.checkpoint import read_weights
from isoscale.engine.step.programs import EagerProgram
from tests.helpers import QUIET, first_of, sha, timeless, train

SHORT = {"train__epochs": 3, "observe__every": 7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reduce", "accumulate"), first_of([("flat", 1), ("tree", 3), ("flat", 3), ("tree", 1)], ("flat", 1), ("tree", 3))
)
def test_residency_does_not_change_a_bit(reduce: str, accumulate: int, tmp_path: Path) -> None:
    options = {**SHORT, "parallel__reduce": reduce, "train__accumulate": accumulate}
    on_device = train(tmp_path / "device", data__residency="device", **options)
    on_host = train(tmp_path / "host", data__residency="host", **options)
    assert [run.record["decided"]["residency"] for run in (on_device, on_host)] == ["device", "host"]
    assert sha(on_device) == sha(on_host)
    assert timeless(on_device) == timeless(on_host)


@pytest.mark.slow
def test_the_number_of_steps_a_launch_does_not_change_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, plain = [], EagerProgram.run

    def run(self: EagerProgram, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        def begin() -> bool:
            begun.append(1)
            return interrupted()

        return plain(self, start, stop, begin)

    monkeypatch.setattr(EagerProgram, "run", run)
    runs = [train(tmp_path / str(count), train__steps_per_launch=count, **SHORT) for count in (1, 10)]
    assert len(begun) == 69 + 15, "one for each step; one between two logs, and for each last batch of an epoch"
    assert sha(runs[0]) == sha(runs[1])
    assert timeless(runs[0]) == timeless(runs[1])


@pytest.mark.slow
def test_logging_checkpoints_and_evaluation_do_not_change_the_weights(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", train__epochs=3, checkpoint__every="never", train__evaluate="never")
    often = {"checkpoint__every": "2 steps", "observe__every": 1, "train__evaluate": "5 steps"}
    busy = train(tmp_path / "busy", train__epochs=3, **often)
    counts = [[len(run.history(name)) for name in ("train/loss", "val/loss")] for run in (plain, busy)]
    assert counts == [[4, 0], [69, 14]]
    assert len(list(plain.path.glob("checkpoints/step_*"))) == 1 < len(list(busy.path.glob("checkpoints/step_*")))
    assert sha(plain) == sha(busy)


class Parts(isoscale.Task):
    """Remembers how many samples each part of a batch has; in its loss some samples weigh more than others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.sizes: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> isoscale.WeightedSum:
        self.sizes.append(len(batch["input"]))
        errors = (self.model(batch["input"]) - batch["target"]).square()
        return isoscale.WeightedSum((batch["weight"] * errors).sum(), batch["weight"].sum())


def trained_in_parts(path: Path, **overrides: Any) -> tuple[Parts, list[float], dict[str, Tensor]]:
    """The task after six steps on batches of 10, 10 and 7 samples, with its losses and its weights.

    The optimizer is one whose steps grow with the gradient, so that a gradient that is too large is seen.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {"input": (27, 3), "target": (27, 1), "weight": (27, 1)}
    data = {name: torch.rand(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    recipe = {
        "train": {"epochs": 2, "precision": "64", "evaluate": "never"},
        "data": {"batch_size": 10},
        "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.5},
        "observe": {"every": 1},
    }
    task = Parts()
    run = isoscale.Trainer(recipe, run=path, **{**QUIET, **overrides}).fit(task, isoscale.Sources(train=data))
    return task, [value for _, value in run.history("train/loss")], read_weights(run.checkpoint("last"))


@pytest.mark.parametrize("cut", [{"train.accumulate": 4}, {"parallel.reduce": "tree", "parallel.shards": 4}], ids=str)
def test_a_batch_in_parts_agrees_with_the_whole_batch_to_rounding(cut: dict[str, Any], tmp_path: Path) -> None:
    whole, losses, weights = trained_in_parts(tmp_path / "whole")
    parts, losses_in_parts, weights_in_parts = trained_in_parts(tmp_path / "parts", **cut)
    assert whole.sizes == [10, 10, 7] * 2
    assert parts.sizes == [2, 3, 2, 3, 2, 3, 2, 3, 1, 2, 2, 2] * 2
    assert len(losses) == 6 and losses_in_parts == pytest.approx(losses, rel=1e-12)
    for name, tensor in weights.items():
        torch.testing.assert_close(weights_in_parts[name], tensor, rtol=1e-12, atol=1e-14)


def test_the_seed_changes_everything_and_the_same_seed_nothing(tmp_path: Path) -> None:
    runs = [train(tmp_path / str(number), seed=seed, **SHORT) for number, seed in enumerate((0, 0, 1))]
    assert sha(runs[0]) == sha(runs[1])
    assert sha(runs[0]) != sha(runs[2])
