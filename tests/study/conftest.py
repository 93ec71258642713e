"""Runs to study: written by hand where only their files matter, trained where their weights do."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isoscale.recipe.load import load_recipe
from isoscale.runs.run import Run
from tests.helpers import train

RECORD = {
    "isoscale": "0.1.0",
    "python": "3.12.1",
    "packages": {"torch": "2.13.0+cpu"},
    "host": "here",
    "command": ["isoscale", "train"],
    "started": "2026-03-01T12:00:00+0000",
    "name": "digits",
    "seed": 0,
    "data": {"train": "aa", "val": "bb"},
    "status": "done",
    "message": "",
    "decided": {"device": "cpu", "threads": 1, "precision": "32", "program": "eager"},
    "num_steps": 40,
    "step": 40,
    "seconds": 8.0,
}
LOSSES = [2.0, 1.0, 0.5, 0.4]


def rows(name: str, values: list[float], every: int = 10, seconds: float = 2.0, clock: bool = True) -> list[dict]:
    """One metric, logged every few steps and seconds; without `clock`, as if the training time was not logged."""
    found = []
    for number, value in enumerate(values, start=1):
        where = {"step": every * number, "epoch": number - 1, "time": 1000.0 + 3 * number}
        text = {} if math.isfinite(value) else {"text": str(value)}
        found.append({**where, "name": name, "value": None if text else value, **text})
        if clock:
            found.append({**where, "name": "time/seconds", "value": seconds * number})
    return found


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Write a run by hand below an empty folder, which is also the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, logged: list[dict] | None = None, overrides: Any = (), **record: Any) -> Run:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        values = {key: value for key, value in {**RECORD, **record}.items() if value is not None}
        (folder / "run.json").write_text(json.dumps(values))
        (folder / "recipe.yaml").write_text(load_recipe("images/digits", overrides).to_yaml())
        logged = rows("val/loss", LOSSES) if logged is None else logged
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
        return Run(folder.relative_to(tmp_path))

    return write


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A real run of two epochs."""
    return train(tmp_path_factory.mktemp("study") / "digits-1", train__epochs=2)
