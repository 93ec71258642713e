"""The directory that holds all there is to know of one training."""

import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from isoscale._version import __version__
from isoscale.engine.state.checkpoint import Checkpoints
from isoscale.engine.state.writer import Output
from isoscale.errors import RunGone, UserError
from isoscale.observe.metric_log import MetricLog
from isoscale.recipe.seal import adopted, with_seal
from isoscale.runs.git import code
from isoscale.runs.record import rebuilt
from isoscale.system import devices
from isoscale.system.files import sync_folder, write_aside

ROOT = Path("runs")
SUBMITTED = "submitted"
"""The status of a directory that waits for its job."""
REBUILT = "rebuilt"
"""The entry of a record that was rebuilt, which says why; it is not written."""
_LEFT = re.compile(r"\.lock(-[0-9a-f]+)?|run\.json|\.(run\.json|recipe\.yaml)-\d+")
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
        self.guard: Callable[[], None] = lambda: None
        """Raises where the run is no longer this process's to write; asked before everything that is."""
        self._was_created = False
        self._written: dict[str, Any] = {}
        """What was written to run.json, to be put into checkpoints too."""

    @classmethod
    def fresh(cls, name: str, job: str = "", root: Path = ROOT) -> "RunDirectory":
        """A new directory below `runs`, named after the recipe and the batch job, or the time where there is none."""
        suffix = job or time.strftime("%Y%m%d-%H%M%S")
        return cls(next(path for path in _candidates(root, name, suffix) if _claim(path)))

    @classmethod
    def of_job(cls, name: str, job: str, root: Path = ROOT) -> list["RunDirectory"]:
        """The directories that a batch job has given to runs of a recipe, oldest first."""
        return [cls(path) for path in takewhile(Path.exists, _candidates(root, name, job))]

    @property
    def exists(self) -> bool:
        """Whether a run was started here; one that has lost its run.json has checkpoints."""
        return self.recipe.is_file() and (self.record.is_file() or bool(self.checkpoints().all()))

    @property
    def is_free(self) -> bool:
        """Whether a run can begin here: nothing is there but what a start that was killed has left."""
        left = all(_LEFT.fullmatch(path.name) for path in self.path.iterdir())
        return left and (not self.record.exists() or not self.record.stat().st_size or "isoscale" in self.read())

    def check(self) -> None:
        """Raise where the run is not this process's to write any more, or what makes it a run is gone."""
        self.guard()
        if self._was_created and not self.recipe.exists():
            raise RunGone(f"what was in the run directory {self.path} was deleted while it was trained in")

    def check_saved(self) -> None:
        """Raise where there is nothing to go on from in the run, or not even the run."""
        self.check()
        if self.checkpoints().pointed("last") is None:
            raise RunGone(f"the checkpoints in the run directory {self.path} were deleted while it was trained in")

    def checkpoints(self, keep: int = 2) -> Checkpoints:
        """The run's checkpoints."""
        return Checkpoints(self.path / "checkpoints", keep, self.check, self._record_text)

    def output(self, keep: int, metric_log: MetricLog | None) -> Output:
        """Where a training in this directory writes."""
        return Output(self.checkpoints(keep), metric_log, self.path, self.check, self.trace, self.update)

    def _record_text(self) -> str:
        return json.dumps(self._written, indent=1) if self._written else ""

    def create(self, recipe_yaml: str) -> None:
        """Make the directory and write the recipe, sealed as this user's."""
        self.guard()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for killed in (*self.path.glob(".recipe.yaml-*"), *self.path.glob(".run.json-*")):
                killed.unlink()
            write_aside(self.recipe, with_seal(recipe_yaml))
            sync_folder(self.path.parent)
            self._was_created = True
        except OSError as error:
            raise UserError(
                f"cannot write the run directory {self.path}: {error.strerror or error}; "
                "choose another one with --run DIR"
            ) from None

    def adopt(self) -> None:
        """Make the recipe of somebody else this user's own, who trusts it."""
        if self.recipe.is_file():
            write_aside(self.recipe, adopted(self.recipe.read_text(encoding="utf-8")))

    def read(self) -> dict[str, Any]:
        """run.json; empty before the first start, and rebuilt from the checkpoints where a power cut has spoilt it."""
        try:
            found = json.loads(self.record.read_text())
            if isinstance(found, dict):
                return found
            why = f"holds a {type(found).__name__}"
        except FileNotFoundError:
            if not self.exists:
                return {}
            why = "is missing"
        except OSError as error:
            raise UserError(f"cannot read {self.record}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            why = f"is damaged ({error})" if self.record.stat().st_size else "is empty"
        record, source = rebuilt(self.checkpoints(), self.recipe)
        return record | {REBUILT: f"{self.record} {why}; what it said is taken from {source}"}

    def update(self, **values: Any) -> None:
        """Change entries of run.json."""
        self.guard()
        before = self.read()
        if before.pop(REBUILT, None) is not None:
            self._set_damaged_aside()
            before = self._written or before
        self._written = {**before, **values}
        write_aside(self.record, json.dumps(self._written, indent=1))

    def _set_damaged_aside(self) -> None:
        """Keep what is left of a run.json that was rebuilt: a person may read more in it."""
        if self.record.exists() and self.record.stat().st_size:
            self.record.replace(self.record.with_suffix(".json.damaged"))

    def continue_in(self, other: "RunDirectory") -> None:
        """Write what makes this a run to another directory, which becomes the same run."""
        write_aside(other.record, self._record_text())
        other._written = self._written


def _candidates(root: Path, name: str, suffix: str) -> Iterator[Path]:
    """Where the runs of one job, or of one second, go."""
    stem = f"{name.replace('/', '-')}-{suffix}"
    yield root / stem
    yield from (root / f"{stem}-{number}" for number in range(2, 1000))


def _claim(path: Path) -> bool:
    """Make a directory that nobody else has: of two who start within one second, each gets its own."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError:
        pass  # whoever writes there says why it cannot be
    return True


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
    instructions = torch.backends.cpu.get_cpu_capability()
    return {"processor": _processor(), "instructions": instructions, "device": devices.find().name}


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
