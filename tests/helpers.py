"""What several tests use: runs in Python and on the command line, and what they must have in common."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

import isoscale
from isoscale.cli.main import app
from tests import warm

QUIET = {"observe.level": "error", "observe.tensorboard": 0}


def needs(package: str, how: str) -> pytest.MarkDecorator:
    """Skips where a package is missing; unlike importorskip it imports nothing, which takes seconds for some."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}: {how}")


def first_of(cases: Sequence[Any], *first: Any) -> list[Any]:
    """All cases of a test, a tuple for several arguments: `make test` runs the first, and `make full` the others."""
    assert all(case in cases for case in first)
    return [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=[] if case in first else pytest.mark.full)
        for case in cases
    ]


def commands() -> list[tuple[str, ...]]:
    """The words of every command that there is."""

    def below(command: Any, *words: str) -> list[tuple[str, ...]]:
        inner = getattr(command, "commands", {})
        return [found for word, each in inner.items() for found in below(each, *words, word)] or [words]

    return below(typer.main.get_command(app))


def train(path: Path, recipe: Any = "images/digits", **overrides: Any) -> isoscale.Run:
    """Train quietly into a directory; keys are written with double underscores for points."""
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return isoscale.train(recipe, run=path, **{**QUIET, **keys})


def sha(run: isoscale.Run | Path) -> str:
    """The hash of a run's final weights."""
    found = run if isinstance(run, isoscale.Run) else isoscale.Run(run)
    return str(found.summary()["weights_sha256"])


def timeless(run: isoscale.Run | Path) -> list[dict[str, Any]]:
    """Every logged value, wall-clock ones left out."""
    path = run.path if isinstance(run, isoscale.Run) else run
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key != "time"}
        for line in lines
        if not line["name"].startswith("time/")
    ]


def first_step(run: isoscale.Run | Path) -> int:
    """The step at which the last start of a run began: 0 for one that began anew instead of going on."""
    found = run if isinstance(run, isoscale.Run) else isoscale.Run(run)
    return int(found.record["stretches"][-1]["first_step"])


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint that lies in a run; 0 where there is none."""
    return max((int(path.name.removeprefix("step_")) for path in run.glob("checkpoints/step_*")), default=0)


def command(*words: str, **environment: str) -> list[str]:
    """A command line that runs this isoscale."""
    return [sys.executable, "-m", "isoscale", *words]


def cli(*words: str, cwd: Path, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run isoscale as a process, forked from one that has imported torch."""
    return warm.run(
        command(*words),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
