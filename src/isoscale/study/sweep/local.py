"""A sweep on this machine: a training for each point, several at a time, in processes of their own."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from isoscale.errors import DONE, START_AGAIN
from isoscale.launch.local import num_cores
from isoscale.runs.directory import SUBMITTED, RunDirectory, provenance
from isoscale.study.runner import Process, Study
from isoscale.study.sweep.display import Display
from isoscale.study.sweep.plan import Point, Sweep
from isoscale.study.sweep.states import STARTING, WAITING, Logged, State, state_of
from isoscale.system.files import open_own, own_folder

LOGS = "logs"
"""What the processes of the points write, a file each."""
LINES_KEPT = 5


@dataclass(frozen=True)
class Crew:
    """How many trainings run at a time, and how many ranks each has."""

    workers: int = 1
    devices: int = 1
    is_trusted: bool = False
    """Whether points may name any class: the user has just written them, or said so."""

    def variables(self, slot: int) -> dict[str, str]:
        """Cores and GPUs of one of the workers, so that they share the machine."""
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // (self.workers * self.devices)))
        from isoscale.system.devices import visible_gpus

        return {"OMP_NUM_THREADS": threads, **self.gpus(slot, visible_gpus())}

    def gpus(self, slot: int, visible: Sequence[str]) -> dict[str, str]:
        """The GPUs of a worker, each its own as far as there are enough."""
        if self.workers == 1 or len(visible) < 2:
            return {}
        first = slot * self.devices
        own = dict.fromkeys(visible[number % len(visible)] for number in range(first, first + self.devices))
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


class _Training(Process):
    """The process that trains a point."""

    def __init__(self, sweep: Sweep, point: Point, crew: Crew, slot: int) -> None:
        self._folder = sweep.folder(point)
        self._recipe = (self._folder / "recipe.yaml").read_text(encoding="utf-8")
        self._log = sweep.path / LOGS / f"{point.name}.txt"
        self.logged = Logged(sweep, point)
        words = [sys.argv[0], "train", *sweep.changes, "--run", str(self._folder)]
        words += ["--devices", str(crew.devices)] if crew.devices > 1 else []
        words += ["--trust"] * crew.is_trusted
        with open_own(self._log, "ab") as output:
            self._start = output.tell()
            super().__init__(words, crew.variables(slot), output)

    def close(self) -> None:
        """A training that failed before it began has removed its directory, or left it as it was: write that down."""
        directory = RunDirectory(self._folder)
        if self.code in (DONE, START_AGAIN) or (directory.exists and directory.read().get("status") != SUBMITTED):
            return
        if self._folder.exists() and not (directory.recipe.exists() or directory.is_free):
            return  # somebody put something else there
        if not directory.exists:
            directory.create(self._recipe)
        if not self.was_told:
            directory.update(**provenance(["isoscale", "sweep"]), status="failed", message=self._last_lines())

    def _last_lines(self) -> str:
        with self._log.open("rb") as file:
            file.seek(self._start)
            lines = file.read().decode(errors="replace").strip().splitlines()
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        told = lines[errors[-1] :] if errors else lines[-LINES_KEPT:]
        return "\n".join(told).removeprefix("error: ") or f"exit code {self.code}"


class LocalSweep(Study[Point]):
    """The trainings of a sweep, and how they stand."""

    command = "sweep"
    stopping = "the trainings save and end"

    def __init__(self, sweep: Sweep, points: Sequence[Point], crew: Crew, display: Display) -> None:
        """Prepare the points that are to be trained, where somebody has removed their directories."""
        self.path, self.at_once = sweep.path, crew.workers
        self._sweep, self._crew, self._display = sweep, crew, display
        self._trainings: dict[str, _Training] = {}
        self._states = {point.name: state_of(sweep, point) for point in sweep.points}
        self._states |= {point.name: State(point, WAITING) for point in points}
        own_folder(sweep.path / LOGS)
        sweep.restore(points)

    @property
    def states(self) -> list[State]:
        """How all points of the sweep stand."""
        return list(self._states.values())

    def start(self, point: Point, slot: int) -> Process:
        """Start a training on its share of the machine."""
        training = self._trainings[point.name] = _Training(self._sweep, point, self._crew, slot)
        return training

    def end(self, point: Point, process: Process) -> bool:
        """Others follow, whatever became of this one."""
        training = self._trainings.pop(point.name)
        training.close()
        self._states[point.name] = state_of(self._sweep, point, training.logged)
        return True

    def show(self) -> None:
        """Until a process has written down that it trains, its directory tells of an earlier end."""
        for name, training in self._trainings.items():
            state = state_of(self._sweep, self._states[name].point, training.logged)
            self._states[name] = state if state.status == "running" else replace(state, status=STARTING)
        self._display.show(self.states)

    def say(self, text: str) -> None:
        """Beside the table."""
        self._display.say(text)
