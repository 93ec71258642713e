"""The directory that holds all there is to know of one training."""

import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from isoscale._version import __version__
from isoscale.engine.checkpoint import Checkpoints
from isoscale.engine.git import code
from isoscale.errors import UserError

ROOT = Path("runs")
_LEFT = re.compile(r"\.lock|run\.json|\.(run\.json|recipe\.yaml)-\d+")
"""What is there before a run has its recipe, which comes last."""
_PACKAGES = ("torch", "numpy", "safetensors", "pydantic", "lightning", "torchmetrics")


class RunDirectory:
    """Paths and provenance of a run."""

    def __init__(self, path: Path) -> None:
        """The run in `path`, which may not exist yet."""
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.record = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        self.tensorboard = path / "tensorboard"
        self.trace = path / "profile" / "trace.json"

    @classmethod
    def fresh(cls, name: str, job: str = "") -> "RunDirectory":
        """A new directory below `runs`, named after the recipe and the batch job, or the time where there is none."""
        return cls(next(path for path in _candidates(name, job or time.strftime("%Y%m%d-%H%M%S")) if _claim(path)))

    @classmethod
    def of_job(cls, name: str, job: str) -> list["RunDirectory"]:
        """The directories that a batch job has given to runs of a recipe, oldest first."""
        return [cls(path) for path in takewhile(Path.exists, _candidates(name, job))]

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.record.is_file() and self.recipe.is_file()

    @property
    def is_free(self) -> bool:
        """Whether a run can begin here: nothing is there but what a start that was killed has left."""
        left = all(_LEFT.fullmatch(path.name) for path in self.path.iterdir())
        return left and (not self.record.exists() or "isoscale" in self.read())

    def checkpoints(self, keep: int = 2) -> Checkpoints:
        """The run's checkpoints."""
        return Checkpoints(self.path / "checkpoints", keep)

    def create(self, recipe_yaml: str) -> None:
        """Make the directory and write the recipe."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for killed in (*self.path.glob(".recipe.yaml-*"), *self.path.glob(".run.json-*")):
                killed.unlink()
            write_aside(self.recipe, recipe_yaml)
        except OSError as error:
            raise UserError(
                f"cannot write the run directory {self.path}: {error.strerror or error}; "
                "choose another one with --run DIR"
            ) from None

    def read(self) -> dict[str, Any]:
        """run.json; empty before the first start."""
        if not self.record.is_file():
            return {}
        try:
            return dict(json.loads(self.record.read_text()))
        except (RecursionError, TypeError, ValueError) as error:
            raise UserError(f"{self.record} is damaged: {error}") from None

    def update(self, **values: Any) -> None:
        """Change entries of run.json."""
        write_aside(self.record, json.dumps({**self.read(), **values}, indent=1))


def _candidates(name: str, suffix: str) -> Iterator[Path]:
    """Where the runs of one job, or of one second, go."""
    stem = f"{name.replace('/', '-')}-{suffix}"
    yield ROOT / stem
    yield from (ROOT / f"{stem}-{number}" for number in range(2, 1000))


def _claim(path: Path) -> bool:
    """Make a directory that nobody else has: of two who start within one second, each gets its own."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError:
        pass  # whoever writes there says why it cannot be
    return True


def write_aside(path: Path, text: str) -> None:
    """Write a file so that a reader never sees half of it."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        aside.write_text(text)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def provenance(command: list[str]) -> dict[str, Any]:
    """Where a run comes from: versions, machine, command and the state of the user's code."""
    return {
        "isoscale": __version__,
        "python": platform.python_version(),
        "packages": package_versions(_PACKAGES),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "hardware": hardware(),
        "command": command,
        "folder": os.getcwd(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "code": code(),
    }


def hardware() -> dict[str, str]:
    """What decides about the last bits of a result besides versions: the processor and the device."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {"processor": _processor(), "instructions": torch.backends.cpu.get_cpu_capability(), "device": device}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def package_versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    return {name: found for name in names if (found := _version(name))}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def command_line() -> list[str]:
    """The command that started this process."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
