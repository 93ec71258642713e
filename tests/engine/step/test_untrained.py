"""A training in which nothing is trained does not end as though something were."""

import copy
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import isoscale
from isoscale.errors import Stopped, UserError
from tests.engine.lightning import habits
from tests.engine.lightning.test_lightning import fit
from tests.helpers import QUIET, cli
from tests.ranks import fit_on

BAD = {"train.nan": "skip", "train.epochs": 3, "data.batch_size": 8, "observe.every": 3, **QUIET}


def linear() -> isoscale.Supervised:
    torch.manual_seed(0)
    return isoscale.Supervised(nn.Linear(4, 1), loss="mse")


def samples(num_bad: int) -> isoscale.Sources:
    """48 samples, six steps per epoch, of which the last are bad."""
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    target = inputs.sum(1, keepdim=True)
    inputs[len(inputs) - num_bad :] = torch.nan
    return isoscale.Sources(train={"input": inputs, "target": target})


def trained(path: Path, data: Any, **more: Any) -> isoscale.Run:
    return isoscale.Trainer(run=path, **{**BAD, **more}).fit(linear(), data)


def test_a_training_of_which_every_step_is_left_out_fails_and_names_the_cause(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing was trained: all 18 steps were left out") as failure:
        trained(tmp_path / "run", samples(48))
    assert "the data itself holds NaN, in input" in str(failure.value)
    record = isoscale.Run(tmp_path / "run").record
    assert record["status"] == "failed" and "all 18 steps were left out" in record["message"]


def test_so_does_one_that_was_stopped_and_goes_on(tmp_path: Path) -> None:
    task = linear()
    plain, calls = task.training_step, []

    def stopped(batch: Any, batch_idx: int) -> Any:
        calls.append(batch_idx)
        if len(calls) == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(batch, batch_idx)

    object.__setattr__(task, "training_step", stopped)
    with pytest.raises(Stopped):
        isoscale.Trainer(run=tmp_path / "run", **BAD).fit(task, samples(48))
    with pytest.raises(UserError, match="nothing was trained: all 18 steps were left out"):
        trained(tmp_path / "run", samples(48))


@pytest.mark.slow
def test_several_ranks_say_it_too(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nothing was trained: all 18 steps were left out"):
        fit_on(2, tmp_path / "run", _bad, **{key.replace(".", "__"): value for key, value in BAD.items()})


def _bad() -> tuple[Any, Any]:
    return linear(), samples(48)


def test_a_few_steps_that_count_are_a_training(tmp_path: Path) -> None:
    assert trained(tmp_path / "run", samples(4)).record["status"] == "done"


@pytest.mark.slow
def test_an_epoch_without_a_step_that_counts_is_said(tmp_path: Path) -> None:
    inputs = np.full((48, 4), np.nan, dtype="float32")
    np.save(tmp_path / "input.npy", inputs)
    np.save(tmp_path / "target.npy", np.ones((48, 1), dtype="float32"))
    (tmp_path / "recipe.yaml").write_text(
        "task: {class: supervised, model: {class: torch.nn.Linear, in_features: 4, out_features: 1}, loss: mse}\n"
        "data: {class: isoscale.data.file_sources.Files, columns: {input: input.npy, target: target.npy}, "
        "on_nan: keep, batch_size: 8, split: {train: 1.0}}\n"
        "train: {epochs: 2, nan: skip}\nobserve: {every: 4, tensorboard: 0}\n"
    )
    done = cli("train", "recipe.yaml", "--run", "run", cwd=tmp_path)
    assert done.returncode == 2 and "nothing was trained: all 12 steps were left out" in done.stderr, done
    assert "input.npy, row" in done.stderr
    assert "no step of epoch 0 counts" in done.stdout + done.stderr, done.stdout


class PartlyOptimised(habits.Net):
    """A backbone that nobody froze and no optimizer has."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Frozen(PartlyOptimised):
    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)


class CopiedInFitStart(habits.Net):
    """A copy of one's own, beside the network, that is not to be trained."""

    def on_fit_start(self) -> None:
        self.copied = copy.deepcopy(self.head)


class NoUpdate(habits.ManualAccumulation):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        (habits.Net, None),
        (Frozen, None),
        (PartlyOptimised, "in no optimizer, and so not trained: backbone.0.weight, backbone.1.weight, backbone.1.bias"),
        (CopiedInFitStart, "in no optimizer, and so not trained: copied.weight, copied.bias"),
        (NoUpdate, "in 16 steps no optimizer of configure_optimizers made one"),
    ],
)
def test_what_may_be_meant_is_said_and_trained(
    habit: Any, words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fit(*habits.made(habit), tmp_path / "run", 2, **{"observe.level": "info"})
    said = " ".join(capsys.readouterr().out.split())
    assert run.record["status"] == "done"
    assert words in said if words else "no optimizer" not in said, said


class ReplacedInAStep(habits.Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 15:
            self.head.weight = nn.Parameter(torch.zeros_like(self.head.weight))


def test_a_layer_that_is_replaced_in_the_last_step_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"head\.weight was replaced"):
        fit(*habits.made(ReplacedInAStep), tmp_path / "run", 2)
