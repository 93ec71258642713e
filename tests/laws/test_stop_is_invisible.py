"""Law 2 on one rank: a run that was stopped or killed ends as one that never was."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import isoscale
from isoscale.errors import Stopped
from tests import warm
from tests.helpers import QUIET, cli, command, first_step, sha, timeless, train

EVERYTHING = {
    "train__accumulate": 2,
    "train__clip": 1.0,
    "train__ema": 0.99,
    "data__subset": 150,
    "data__batch_size": 32,
    "train__epochs": 3,
    "observe__every": 3,
    "optimizer__name": "adam",
    "optimizer__weight_decay": 0.0,
}
"""15 steps with a ragged last batch, dropout, accumulation, clipping and a moving average."""


def continued_at(step: int, whole: Path, into: Path) -> Path:
    """A copy of a run as it was when the checkpoint of `step` was the newest."""
    shutil.copytree(whole, into, symlinks=True)
    for checkpoint in (into / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    for pointer in ("best", "last"):
        (into / "checkpoints" / pointer).unlink(missing_ok=True)
    return into


@pytest.mark.slow
@pytest.mark.parametrize("reduce", [pytest.param("flat", marks=pytest.mark.nightly), "tree"])
def test_restoring_at_every_step_gives_the_same_remainder(reduce: str, tmp_path: Path) -> None:
    options = {**EVERYTHING, "parallel__reduce": reduce, "checkpoint__every": "1 steps", "checkpoint__keep": 100}
    whole = train(tmp_path / "whole", **options)
    for step in range(1, 15):
        again = train(continued_at(step, whole.path, tmp_path / str(step)), recipe=None)
        assert first_step(again) == step
        assert sha(again) == sha(whole), f"continued at step {step}"
        assert timeless(again) == timeless(whole), f"continued at step {step}"


def test_a_run_without_any_checkpoint_starts_again_from_the_beginning(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", **EVERYTHING)
    shutil.copytree(whole.path, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints")
    again = train(tmp_path / "again", recipe=None)
    assert first_step(again) == 0
    assert sha(again) == sha(whole)
    assert timeless(again) == timeless(whole)


LONG = ["train.epochs=60", "checkpoint.every=31 steps", *(f"{key}={value}" for key, value in QUIET.items())]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert cli("train", "--run", "run", *LONG, cwd=folder).returncode == 0
    return folder / "run"


def interrupt(folder: Path, number: int, delay: float) -> int:
    """Start or continue the run, send a signal after a while, and return the exit code."""
    process = warm.Popen(command("train", "--run", "run", *LONG), cwd=folder, stdout=subprocess.DEVNULL)
    log = folder / "run" / "metrics.jsonl"
    size = log.stat().st_size if log.exists() else 0
    deadline = time.monotonic() + 60
    while process.poll() is None and (not log.exists() or log.stat().st_size <= size) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(delay)
    process.send_signal(number)
    return process.wait(60)


LIKE_TERM = (signal.SIGINT, signal.SIGUSR1)
"""Signals that are handled as SIGTERM is."""


@pytest.mark.full
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(each, marks=pytest.mark.nightly) for each in (signal.SIGTERM, *LIKE_TERM))],
)
def test_signals_at_random_moments_leave_no_trace(number: int, uninterrupted: Path, tmp_path: Path) -> None:
    delays = random.Random(int(number))
    for _ in range(4):
        code = interrupt(tmp_path, number, delays.uniform(0, 0.5))
        assert code in (0, -number if number == signal.SIGKILL else 75)
    assert cli("train", "--run", "run", *LONG, cwd=tmp_path).returncode == 0
    assert sha(tmp_path / "run") == sha(uninterrupted)
    assert timeless(tmp_path / "run") == timeless(uninterrupted)


class DrawsOnTheHost(isoscale.Supervised):
    """Mixes samples with numbers of Python and numpy, as many augmentations do; has no hooks."""

    def __init__(self, stops_at: int | None = None) -> None:
        super().__init__(nn.Linear(3, 1), "mse")
        self.stops_at = stops_at

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if batch_idx == self.stops_at:
            os.kill(os.getpid(), signal.SIGTERM)
        factor = float(np.random.beta(0.5, 0.5)) + random.random()
        return super().training_step({**batch, "input": factor * batch["input"]}, batch_idx)


def test_generators_of_the_host_go_on_where_they_were(tmp_path: Path) -> None:
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    rows = {"input": inputs, "target": inputs[:, :1]}
    data = isoscale.Sources(train=rows, val=rows)
    keys = {"train.epochs": 2, "data.batch_size": 8, "observe.every": 1, **QUIET}

    def fitted(name: str, stops_at: int | None = None) -> isoscale.Run:
        torch.manual_seed(0)
        return isoscale.Trainer(run=tmp_path / name, **keys).fit(DrawsOnTheHost(stops_at), data)

    whole = fitted("whole")
    with pytest.raises(Stopped):
        fitted("stopped", stops_at=5)
    assert timeless(fitted("stopped")) == timeless(whole)


TASK = '''
import os, signal
from pathlib import Path
from isoscale.science.images import Classifier

class Mortal(Classifier):
    """Sends its own process a signal in the step that KILL_AT names, once."""
    calls = 0
    def training_step(self, batch, batch_idx):
        type(self).calls += 1
        if os.environ.get("KILL_AT") == str(type(self).calls) and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        return super().training_step(batch, batch_idx)
    def validation_step(self, batch, batch_idx):
        wanted = {"evaluation": 30, "last evaluation": 91}.get(os.environ.get("KILL_AT"), 1000)
        if type(self).calls > wanted and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        return super().validation_step(batch, batch_idx)
'''
SHORT = [
    "task.class=mortal.Mortal", "train.epochs=4", "checkpoint.every=7 steps", "observe.every=5",
    *(f"{key}={value}" for key, value in QUIET.items()),
]  # fmt: skip
MOMENTS = ["1", "7", "13", "23", "40", "evaluation", "last evaluation"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moments"),
    [
        (signal.SIGTERM, ["7", "23", "evaluation", "last evaluation"]),
        (signal.SIGKILL, ["13"]),
        *(pytest.param(each, MOMENTS, marks=pytest.mark.full) for each in (signal.SIGTERM, signal.SIGKILL)),
    ],
)
def test_a_signal_inside_a_given_step_or_an_evaluation_leaves_no_trace(
    number: int, moments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mortal.py").write_text(TASK)
    assert cli("train", "--run", "whole", *SHORT, cwd=tmp_path).returncode == 0
    for moment in moments:
        (tmp_path / "killed").unlink(missing_ok=True)
        first = cli("train", "--run", moment, *SHORT, cwd=tmp_path, KILL_AT=moment, SIGNAL=str(int(number)))
        assert first.returncode == (75 if number == signal.SIGTERM else -number), first.stderr
        second = cli("train", "--run", moment, *SHORT, cwd=tmp_path)
        assert second.returncode == 0, second.stderr
        assert number != signal.SIGTERM or first_step(tmp_path / moment) > 0, moment
        assert sha(tmp_path / moment) == sha(tmp_path / "whole"), moment
        assert timeless(tmp_path / moment) == timeless(tmp_path / "whole"), moment
