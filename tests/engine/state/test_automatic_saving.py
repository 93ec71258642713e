"""Saving takes a small share of the time, and what is put off is not lost."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isoscale
from isoscale.engine.state.checkpoint import Checkpoints
from isoscale.engine.state.writer import SHARE, Saver

X = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
DATA = isoscale.Sources(train=(X, X.sum(1, keepdim=True)), val=(X[:64], X[:64].sum(1, keepdim=True)))
NUM_EPOCHS = 12


def recipe(**checkpoint: Any) -> dict[str, Any]:
    """Epochs of a few milliseconds, the best of which is not the last: the learning rate is too high in the end."""
    return {
        "data": {"batch_size": 64}, "optimizer": {"name": "sgd", "lr": 0.05}, "train": {"epochs": NUM_EPOCHS},
        "checkpoint": checkpoint, "observe": {"every": 4},
    }  # fmt: skip


class Line(isoscale.Supervised):
    """Becomes worse after some epochs, and may fail."""

    worse_after, fail_after = 8, None

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 1))
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        if self.fail_after is not None and int(self.steps) > 4 * self.fail_after:
            raise RuntimeError("broken on purpose")
        loss = super().training_step(batch, batch_idx)
        return isoscale.WeightedSum(-loss.sum, loss.weight) if int(self.steps) > 4 * self.worse_after else loss


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Step of every checkpoint, and whether it is the best, each of which takes as long as several epochs."""
    found, write = [], Checkpoints.write

    def slow(self: Checkpoints, step: int, state: Any, best: bool = False, *more: Any) -> Path:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        found.append((step, best))
        return write(self, step, state, best, *more)

    monkeypatch.setattr(Checkpoints, "write", slow)
    return found


def trained(path: Path, **checkpoint: Any) -> isoscale.Run:
    return isoscale.Trainer(recipe(**checkpoint), run=path).fit(Line(), DATA)


def weights(run: isoscale.Run, name: str) -> dict[str, torch.Tensor]:
    """Of the checkpoint that a pointer names."""
    from safetensors.torch import load_file

    return load_file(run.path / "checkpoints" / name / "model.safetensors")


@pytest.mark.slow
def test_epochs_that_are_shorter_than_saving_are_not_all_saved_and_the_best_is_the_same(tmp_path: Path, written):
    every = trained(tmp_path / "every", every="1 epoch")
    assert len(written) == NUM_EPOCHS
    written.clear()
    few = trained(tmp_path / "few")
    assert [step for step, _ in written] == sorted(step for step, _ in written)
    assert len(written) <= 4 and written[-1] == (4 * NUM_EPOCHS, False)
    for name in ("best", "last"):
        torch.testing.assert_close(weights(few, name), weights(every, name), rtol=0, atol=0)
    best = json.loads((few.path / "run.json").read_text())["best"]
    assert best["step"] == 32 and (few.path / "checkpoints/best").resolve().name == "step_00000032"
    assert "saving after every epoch would take more than 5 % of the time" in (few.path / "log.txt").read_text()


@pytest.mark.slow
def test_a_failure_leaves_the_best_state_that_was_not_written_yet(tmp_path: Path, written, monkeypatch):
    monkeypatch.setattr(Line, "fail_after", 6)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        trained(tmp_path / "run")
    assert (tmp_path / "run/checkpoints/best").resolve().name == "step_00000024"


def test_where_saving_is_quick_every_epoch_is_saved(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Saver, "is_early", lambda self, seconds: False)
    found, write = [], Checkpoints.write
    monkeypatch.setattr(
        Checkpoints, "write", lambda self, step, *more: (found.append(step), write(self, step, *more))[1]
    )
    trained(tmp_path / "run")
    assert found == [4 * epoch for epoch in range(1, NUM_EPOCHS + 1)]


def test_the_share_of_saving_is_what_decides():
    saver = Saver(None)  # type: ignore[arg-type]
    assert not saver.is_early(0.0), "the first one is never early"
    saver._spent = saver._last_spent = 1.0
    assert saver.is_early(1.9 / SHARE) and not saver.is_early(2.1 / SHARE)
