"""What several tests use: runs in Python and on the command line, and what they must have in common."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import isoscale

QUIET = {"observe.level": "error", "observe.tensorboard": 0}


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
    """Run isoscale as a process."""
    return subprocess.run(
        command(*words),
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
