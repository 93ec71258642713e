"""A worker process that never comes back from a sample is named, with sample and line; training waits for it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from isoscale.data.batches import BatchPlan
from isoscale.data.feeds import hanging
from isoscale.data.feeds.host import HostFeed
from isoscale.data.feeds.workers import StartMethod, WorkerPool
from isoscale.data.order import Order
from isoscale.data.sources import DatasetSource, Subset
from tests import warm

pytestmark = pytest.mark.slow


class Stuck(Dataset):
    """Sample 7 is read as soon as a file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if index == 7:
            self.wait()
        return index

    def wait(self) -> None:
        while not self.file.exists():
            time.sleep(0.01)


def feed_of(dataset: Any, method: StartMethod, warn: Callable[[str], None]) -> HostFeed:
    source = DatasetSource(dataset, None)
    half = Subset(source, torch.arange(4, 16))  # sample 3 of it is number 7 of the dataset
    order, plan = Order(12, 0, shuffle=False), BatchPlan(12, 4)
    feed = HostFeed(half, order, plan, torch.device("cpu"))
    feed.read_with(WorkerPool(half, 0, 2, method, warn))
    return feed


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_a_worker_that_hangs_is_named_with_its_sample_and_line_and_waited_for(
    method: StartMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hanging, "PATIENCE", 0.5)
    said: list[str] = []

    def warn(text: str) -> None:
        if "has not begun to read" not in text:  # a spawned one takes a while
            said.append(text)
            (tmp_path / "back").touch()

    feed = feed_of(Stuck(tmp_path / "back"), method, warn)
    assert feed.parts(0)[0][0].batch.tolist() == [4, 5, 6, 7]
    assert feed.parts(1)[0][0].batch.tolist() == [8, 9, 10, 11]
    feed.close()
    first, last = said[0], said[-1]  # where there is much else to do, it may be named twice
    assert first.startswith("worker process 1 of 2 (process ")
    assert "has been reading sample 7 of Stuck for " in first and "was asked for samples 4, 5, 6, 7" in first
    assert f"\n  in wait, {__file__}:" in first and f"\n  in __getitem__, {__file__}:" in first
    assert "isoscale/data" not in first, "the lines of the dataset alone"
    assert "py-spy dump --pid" in first and "came back after " in last


def test_a_slow_dataset_that_gets_on_is_nothing_to_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hanging, "PATIENCE", 1.0)
    said: list[str] = []
    feed = feed_of(Slow(), "fork", said.append)
    assert feed.parts(0)[0][0].batch.tolist() == [4, 5, 6, 7]
    feed.close()
    assert not said


class Slow(Stuck):
    """A part takes longer than a sample may."""

    def __init__(self) -> None:
        super().__init__(Path())

    def wait(self) -> None:
        pass

    def __getitem__(self, index: int) -> int:
        time.sleep(0.4)
        return index


def test_a_worker_that_is_stopped_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hanging, "PATIENCE", 0.5)
    monkeypatch.setattr(hanging, "TO_ANSWER", 0.1)
    said: list[str] = []

    def warn(text: str) -> None:
        said.append(text)
        os.kill(int(re.findall(r"\(process (\d+)\)", text)[0]), signal.SIGCONT)

    feed = feed_of(Stopping(tmp_path), "fork", warn)
    assert feed.parts(0)[0][0].batch.tolist() == [4, 5, 6, 7]
    feed.close()
    assert "it was stopped (SIGSTOP)" in said[0]


class Stopping(Stuck):
    def wait(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


DATA = """
import multiprocessing, os, time, torch, isoscale
from torch.utils.data import Dataset

class Hangs(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        while index == 40 and multiprocessing.parent_process() and not os.path.exists("back"):
            time.sleep(0.01)
        return {"input": torch.full((3,), float(index)), "target": torch.tensor([1.0])}

def load():
    return isoscale.Sources(train=Hangs())
"""
RECIPE = """
task: {class: supervised, model: {class: torch.nn.Linear, in_features: 3, out_features: 1}, loss: mse}
data: {class: hangs.load, batch_size: 8, workers: 1}
train: {epochs: 1, threads: 1}
observe: {tensorboard: 0}
"""
IMPATIENT = """
from isoscale.data.feeds import hanging
hanging.PATIENCE = 0.5
from isoscale.__main__ import run
run()
"""


def test_a_training_says_it_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(DATA)
    (tmp_path / "hangs.yaml").write_text(RECIPE)
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    process = warm.Popen(
        [sys.executable, "impatient.py", "train", "hangs.yaml", "--run", "run"], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    text = ""
    while "has been reading sample 40 of Hangs" not in text:
        line = process.stdout.readline()
        assert line, text
        text += line
    (tmp_path / "back").touch()
    rest = process.stdout.read()
    assert process.wait(60) == 0 and "came back after" in rest, rest
    assert re.search(r"in __getitem__, \S*hangs.py:\d+", text + rest), rest
    assert "has been reading sample 40" in (tmp_path / "run/log.txt").read_text()
