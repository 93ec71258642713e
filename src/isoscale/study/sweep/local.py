"""A sweep on this machine: a training for each point, several at a time, in processes of their own."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from isoscale.errors import DONE, START_AGAIN, RunGone
from isoscale.launch.local import TO_OBEY, command_of, end_with_parent, num_cores
from isoscale.runs.directory import SUBMITTED, RunDirectory, provenance
from isoscale.runs.lock import Place
from isoscale.study.sweep.display import Display
from isoscale.study.sweep.plan import Point, Sweep
from isoscale.study.sweep.states import STARTING, WAITING, Logged, State, state_of
from isoscale.system import signals
from isoscale.system.files import open_own, own_folder

LOGS = "logs"
"""What the processes of the points write, a file each."""
LINES_KEPT = 5
LOOK_EVERY = 0.1
SHOW_EVERY = 0.5


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
        return {"OMP_NUM_THREADS": threads, **self.gpus(slot, _visible_gpus())}

    def gpus(self, slot: int, visible: Sequence[str]) -> dict[str, str]:
        """The GPUs of a worker, each its own as far as there are enough."""
        if self.workers == 1 or len(visible) < 2:
            return {}
        first = slot * self.devices
        own = dict.fromkeys(visible[number % len(visible)] for number in range(first, first + self.devices))
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _visible_gpus() -> list[str]:
    import torch

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(torch.cuda.device_count())] if chosen is None else chosen.split(",")


class _Training:
    """The process that trains a point."""

    def __init__(self, sweep: Sweep, point: Point, crew: Crew, slot: int) -> None:
        self.point, self.slot = point, slot
        self._folder = sweep.folder(point)
        self._recipe = (self._folder / "recipe.yaml").read_text(encoding="utf-8")
        self._log = sweep.path / LOGS / f"{point.name}.txt"
        self._was_told = False
        self.logged = Logged(sweep, point)
        words = [sys.argv[0], "train", *sweep.changes, "--run", str(self._folder)]
        words += ["--devices", str(crew.devices)] if crew.devices > 1 else []
        words += ["--trust"] * crew.is_trusted
        with open_own(self._log, "ab") as output:
            self._start = output.tell()
            # In a group of its own, it gets a Ctrl-C of the terminal once, from here, and not twice.
            self._process = subprocess.Popen(
                command_of(words), env={**os.environ, **crew.variables(slot)}, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, process_group=0, preexec_fn=end_with_parent(os.getpid()),
            )  # fmt: skip

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def tell(self, number: int) -> None:
        if not self.has_ended:
            self._was_told = True
            self._process.send_signal(number)

    def close(self) -> None:
        """A training that failed before it began has removed its directory, or left it as it was: write that down."""
        code = self._process.wait()
        directory = RunDirectory(self._folder)
        if code in (DONE, START_AGAIN) or (directory.exists and directory.read().get("status") != SUBMITTED):
            return
        if self._folder.exists() and not (directory.recipe.exists() or directory.is_free):
            return  # somebody put something else there
        if not directory.exists:
            directory.create(self._recipe)
        if not self._was_told:
            directory.update(**provenance(["isoscale", "sweep"]), status="failed", message=self._last_lines(code))

    def _last_lines(self, code: int) -> str:
        with self._log.open("rb") as file:
            file.seek(self._start)
            lines = file.read().decode(errors="replace").strip().splitlines()
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        told = lines[errors[-1] :] if errors else lines[-LINES_KEPT:]
        return "\n".join(told).removeprefix("error: ") or f"exit code {code}"


class Runner:
    """Trains points, a few at a time, and passes on what somebody asks for."""

    def __init__(self, sweep: Sweep, points: Sequence[Point], crew: Crew, display: Display) -> None:
        """Nothing is started yet."""
        self._sweep, self._crew, self._display = sweep, crew, display
        self._waiting = list(points)
        self._trainings: list[_Training] = []
        self._requests = signals.Requests()
        self._deadline: float | None = None
        self._next_show = 0.0
        self._states = {point.name: state_of(sweep, point) for point in sweep.points}
        self._states |= {point.name: State(point, WAITING) for point in points}
        self.was_stopped = False
        """Whether somebody asked to stop."""

    def run(self) -> list[State]:
        """Train all points, or as far as to where someone asks to stop; how all points of the sweep stand then."""
        own_folder(self._sweep.path / LOGS)
        self._sweep.restore(self._waiting)
        watched = closing(Place(self._sweep.path, "the folder of the sweep"))
        with signals.hearing(self._requests.keep), self._display, watched as place:
            try:
                while self._trainings or (self._waiting and not self.was_stopped):
                    if not place.is_here:
                        self._give_up(place)
                    self._look()
                    time.sleep(LOOK_EVERY)
            finally:
                for training in self._trainings:
                    training.tell(signal.SIGKILL)
            self._show()
        return list(self._states.values())

    def _give_up(self, place: Place) -> None:
        """Let all trainings save, which find out where, and write down nothing where the folder was."""
        for training in self._trainings:
            training.tell(signal.SIGTERM)
        while not all(training.has_ended for training in self._trainings):
            self._pass_signals_on()
            time.sleep(LOOK_EVERY)
        try:
            place.check()
        except RunGone as gone:
            moved = place.moved_to()
            gone.add_note(f"go on there: isoscale sweep --run {shlex.quote(str(moved))}" if moved else "it ends here")
            raise

    def _look(self) -> None:
        self._pass_signals_on()
        ended = [training for training in self._trainings if training.has_ended]
        for training in ended:
            self._trainings.remove(training)
            training.close()
            self._states[training.point.name] = state_of(self._sweep, training.point, training.logged)
        while self._waiting and len(self._trainings) < self._crew.workers and not self.was_stopped:
            self._trainings.append(_Training(self._sweep, self._waiting.pop(0), self._crew, self._free_slot()))
        if ended or time.monotonic() >= self._next_show:
            self._show()

    def _free_slot(self) -> int:
        taken = {training.slot for training in self._trainings}
        return next(slot for slot in range(self._crew.workers) if slot not in taken)

    def _show(self) -> None:
        for training in self._trainings:
            self._states[training.point.name] = self._state_while_on(training)
        self._display.show(list(self._states.values()))
        self._next_show = time.monotonic() + SHOW_EVERY

    def _state_while_on(self, training: _Training) -> State:
        """Until a process has written down that it trains, its directory tells of an earlier end."""
        state = state_of(self._sweep, training.point, training.logged)
        return state if state.status == "running" else replace(state, status=STARTING)

    def _pass_signals_on(self) -> None:
        """The first request lets all trainings save; after a second Ctrl-C they end at once."""
        while self._requests.kept:
            number, meaning = self._requests.kept.pop(0)
            if meaning == "again":
                continue
            at_once = meaning == "now"
            if at_once:
                self._deadline = time.monotonic() + TO_OBEY
            self._display.say(
                "stopping now; the last checkpoints are the place to go on from" if at_once
                else f"{signal.Signals(number).name}: the trainings save and end; Ctrl-C again stops now"
            )  # fmt: skip
            self.was_stopped = True
            for training in self._trainings:
                training.tell(signal.SIGINT if at_once else signal.SIGTERM)
        if self._deadline is not None and time.monotonic() > self._deadline:
            for training in self._trainings:
                training.tell(signal.SIGKILL)
