"""Runs the points of a study on this machine: a few at a time, each in a process of its own, until somebody stops it.

What is done stands on disk, so that the same command goes on with the rest. Sweeps and scaling studies differ in what a
point is, and in what is shown of it. As a job, a study goes through `launch.submission`.
"""

import os
import shlex
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Generic, TypeVar

from isoscale.errors import RunGone
from isoscale.launch.local import TO_OBEY, command_of, end_with_parent
from isoscale.runs.lock import Place
from isoscale.system import signals

LOOK_EVERY = 0.1
SHOW_EVERY = 0.5
Point = TypeVar("Point")


class Process:
    """The process of a point."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], output: IO[bytes] | None = None) -> None:
        """Call isoscale with those words; what it writes goes to the terminal unless there is a file for it."""
        self.was_told = False
        """Whether it was asked to end."""
        # In a group of its own, it gets a Ctrl-C of the terminal once, from here, and not twice.
        self._process = subprocess.Popen(
            command_of(words), env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=None if output is None else subprocess.STDOUT, process_group=0,
            preexec_fn=end_with_parent(os.getpid()),
        )  # fmt: skip

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._process.poll() is not None

    @property
    def code(self) -> int:
        """The exit code, once it has ended."""
        return self._process.wait()

    def tell(self, number: int) -> None:
        """Send a signal to a process that still runs."""
        if not self.has_ended:
            self.was_told = True
            self._process.send_signal(number)


class Study(ABC, Generic[Point]):
    """What a runner has to know of a study: how a point is started, and what becomes of it."""

    command: str
    """The command that goes on with it."""
    path: Path
    at_once: int = 1
    """How many points run at the same time."""
    stopping: str
    """What its processes do when they are asked to stop."""

    @abstractmethod
    def start(self, point: Point, slot: int) -> Process:
        """Start a point; `slot` tells it from others that run at the same time."""

    @abstractmethod
    def end(self, point: Point, process: Process) -> bool:
        """Write down what became of a point; whether others are to follow."""

    @abstractmethod
    def show(self) -> None:
        """Show how the points stand, from time to time."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Say a word to the user."""


class Runner(Generic[Point]):
    """Runs points, and passes on what somebody asks for."""

    def __init__(self, study: Study[Point], points: Sequence[Point]) -> None:
        """Nothing is started yet."""
        self._study = study
        self._waiting = list(points)
        self._running: dict[int, tuple[Point, Process]] = {}
        self._requests = signals.Requests()
        self._deadline: float | None = None
        self._next_show = 0.0
        self.was_stopped = False
        """Whether somebody asked to stop."""

    def run(self) -> None:
        """Run all points, or as far as to where someone asks to stop, or the study itself ends it."""
        watched = closing(Place(self._study.path, f"the folder of the {self._study.command}"))
        with signals.hearing(self._requests.keep), watched as place:
            try:
                while self._running or (self._waiting and not self.was_stopped):
                    if not place.is_here:
                        self._give_up(place)
                    self._look()
                    time.sleep(LOOK_EVERY)
            finally:
                self._tell(signal.SIGKILL)
        self._study.show()

    def _give_up(self, place: Place) -> None:
        """Let all processes save, which find out where, and write down nothing where the folder was."""
        self._tell(signal.SIGTERM)
        while not all(process.has_ended for _, process in self._running.values()):
            self._pass_signals_on()
            time.sleep(LOOK_EVERY)
        try:
            place.check()
        except RunGone as gone:
            moved = place.moved_to()
            again = f"go on there: isoscale {self._study.command} --run {shlex.quote(str(moved))}"
            gone.add_note(again if moved else "it ends here")
            raise

    def _look(self) -> None:
        self._pass_signals_on()
        ended = [slot for slot, (_, process) in self._running.items() if process.has_ended]
        for slot in ended:
            if not self._study.end(*self._running.pop(slot)):
                self._waiting.clear()
        while self._waiting and len(self._running) < self._study.at_once and not self.was_stopped:
            slot = next(slot for slot in range(self._study.at_once) if slot not in self._running)
            point = self._waiting.pop(0)
            self._running[slot] = point, self._study.start(point, slot)
        if ended or time.monotonic() >= self._next_show:
            self._study.show()
            self._next_show = time.monotonic() + SHOW_EVERY

    def _tell(self, number: int) -> None:
        for _, process in self._running.values():
            process.tell(number)

    def _pass_signals_on(self) -> None:
        """The first request lets all processes save; after a second Ctrl-C they end at once."""
        while self._requests.kept:
            number, meaning = self._requests.kept.pop(0)
            if meaning == "again":
                continue
            at_once = meaning == "now"
            if at_once:
                self._deadline = time.monotonic() + TO_OBEY
            self._study.say(
                "stopping now; the last checkpoints are the place to go on from" if at_once
                else f"{signal.Signals(number).name}: {self._study.stopping}; Ctrl-C again stops now"
            )  # fmt: skip
            self.was_stopped = True
            self._tell(signal.SIGINT if at_once else signal.SIGTERM)
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._tell(signal.SIGKILL)
