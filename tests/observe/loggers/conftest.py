"""What the tests of loggers share: no home to write to, a short run to tell, and readers of what was written."""

import json
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoscale.observe.events import Ended, EpochEnded, Event, FiguresMade, Logged, Started
from isoscale.observe.figures import Histogram, Matrix

SETTINGS = {"seed": 0, "optimizer.lr": 0.1, "data.subset": None, "data.split": [8, 1, 1]}


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty databases are kept for all tests, and nobody is logged in anywhere."""
    home = tmp_path_factory.getbasetemp() / "home"
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "COMET_API_KEY", "NEPTUNE_API_TOKEN", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run's directory before its first event."""
    path = tmp_path / "runs" / "digits-1"
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text("seed: 0\n")
    return path


def start(directory: Path, step: int = 0, **settings: Any) -> Started:
    rows = [("device", "cpu"), ("model", "MLP")]
    return Started("digits", str(directory), rows, step, 40, 10, {**SETTINGS, **settings})


def steps(first: int, last: int) -> list[Event]:
    """What is told of the steps in between: a log and an evaluation every ten."""
    events: list[Event] = []
    for step in range(first, last + 1, 10):
        events.append(Logged(step, step // 10 - 1, {"train/loss": 1 / step, "lr": 0.1}))
        events.append(EpochEnded(step, step // 10 - 1, {"val/loss": 2 / step}, 1.0))
    return events


def figures(step: int) -> FiguresMade:
    matrix = Matrix(np.eye(3, dtype=np.int64), ["a", "b", "c"])
    histogram = Histogram(np.ones(2), np.arange(3.0))
    return FiguresMade(step, step // 10 - 1, {"val/confusion": matrix, "parameters/weight": histogram})


def end(status: Any = "done", step: int = 40) -> Ended:
    return Ended(status, step, values={"val/loss": 2 / step, "best/val/loss": 0.05})


def tell(logger: Any, *events: Event) -> None:
    for event in events:
        logger.notify(event)
    logger.close()


def wandb_records(directory: Path) -> list[list[Any]]:
    """The records of every start, from the files that `wandb sync` reads; a process of wandb's ends them soon."""
    files = sorted(directory.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.parent.name)
    return [_ended_records(path) for path in files]


def _ended_records(path: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    for _ in range(200):
        records = [wandb_internal_pb2.Record.FromString(data) for data in _blocks(path.read_bytes())]
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.05)
    raise AssertionError(f"{path} has no end")


def _blocks(data: bytes) -> list[bytes]:
    """The records of a log: blocks of 32 KiB, in which each part has a checksum, a length and a kind."""
    position, records, parts = 7, [], b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(parts)
            parts = b""
    return records


def comet_messages(archive: Path) -> list[dict[str, Any]]:
    with zipfile.ZipFile(archive) as opened:
        return [json.loads(line) for line in opened.read("messages.json").splitlines()]
