"""A long training that is interrupted again and again ends as one that never was: real processes, real signals."""

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests import warm
from tests.helpers import QUIET, cli, command, sha, timeless

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

EPOCHS = 100
INTERRUPTIONS = {9: signal.SIGTERM, 27: signal.SIGKILL, 48: signal.SIGKILL, 66: signal.SIGTERM, 85: signal.SIGKILL}
"""By the epoch in which each one comes."""


def words(folder: Path) -> list[str]:
    keys = {"train.epochs": EPOCHS, "data.path": folder, "train.threads": 1, **QUIET}
    return ["train", "electronic/be2", *(f"{key}={value}" for key, value in keys.items()), "--run", "run"]


def epoch_of(run: Path) -> int:
    """The last one that is written down."""
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines()[:-1] if log.exists() else []  # the last may be half written
    return max((json.loads(line)["epoch"] for line in lines[-20:]), default=-1)


def interrupt(folder: Path, words: list[str], epoch: int, number: int, delay: float) -> int:
    """Start or go on, send a signal some time after an epoch has begun, and return the exit code."""
    process = warm.Popen(command(*words), cwd=folder)
    until = time.monotonic() + 120
    while process.poll() is None and epoch_of(folder / "run") < epoch and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(delay)
    process.send_signal(number)
    return process.wait(60)


def test_a_hundred_epochs_interrupted_five_times(shared: Path, tmp_path: Path) -> None:
    recipe = words(shared / "data/electronic/Be2")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    began = time.monotonic()
    assert cli(*recipe, cwd=whole).returncode == 0
    print(f"uninterrupted: {time.monotonic() - began:.1f} s")
    delays = random.Random(0)
    for epoch, number in INTERRUPTIONS.items():
        code = interrupt(parts, recipe, epoch, number, delays.uniform(0, 0.3))
        print(f"{signal.Signals(number).name} in epoch {epoch_of(parts / 'run')}, code {code}")
        assert code == (75 if number == signal.SIGTERM else -number)
    assert cli(*recipe, cwd=parts).returncode == 0
    print(f"in all: {time.monotonic() - began:.1f} s, weights {sha(parts / 'run')}")
    assert sha(parts / "run") == sha(whole / "run")
    assert timeless(parts / "run") == timeless(whole / "run")
    assert any(line["name"] == "val/band_energy" for line in timeless(parts / "run"))
