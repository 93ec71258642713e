"""Where the time of a training goes: phases of the step by the device's own clock, the rest by the host's."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from isoscale.observe.tables import Action
from isoscale.system.devices import Accelerator, Cuda, Moment
from isoscale.system.files import failures_in_words, own_folder, refuse_link, written_aside

TRACED_FROM = 200
"""The trace begins after so many steps, or half-way through a shorter run: programs have settled by then."""
TRACED_STEPS = 50
OF_STEPS = ("data", "forward", "backward", "waiting", "reduce", "communication", "optimizer", "step")

Marks = list[tuple[str, Any]]
"""Events on the device's stream, each with the name of what it ends; the first one begins a step."""

Travels = list[tuple[Moment, Moment]]
"""When the gradients of a step began to travel, and when they had arrived."""


class Profile:
    """Adds up how often and how long each thing was done.

    A step calls `begin`, then names each phase when it is over. On a CUDA device the marks are events on the stream,
    also inside a captured step, so that the phases are those of the device and not of the host that issues them.
    """

    def __init__(self, accelerator: Accelerator, trace: Path | None = None, tracing: bool | None = None) -> None:
        """`trace` is where torch's trace of a few steps goes; `tracing` says whether any rank writes one.

        All ranks pause before and after it, so that they ask for votes equally often.
        """
        for path in (trace.parent, trace) if trace is not None else ():
            refuse_link(path)  # now, and not in the middle of the training
        self._accelerator = accelerator
        self._trace = trace
        self._tracing = trace is not None if tracing is None else tracing
        self._seconds: dict[str, float] = {}
        self._calls: dict[str, int] = {}
        self._marks: Marks = []
        self._external = False
        self._travels: list[Travels] = []
        self.travelled, self.exposed = 0.0, 0.0
        """Seconds that gradients travelled while others were computed, and how much of it nothing was left to do."""
        self._began = self._last = time.perf_counter()

    def start_clock(self) -> None:
        """Training begins now."""
        self._began = time.perf_counter()

    def begin(self) -> None:
        """A step begins."""
        self._mark("")

    def __call__(self, phase: str) -> None:
        """What was done since the last mark was `phase`."""
        self._mark(phase)

    def _mark(self, phase: str) -> None:
        if isinstance(self._accelerator, Cuda):
            options = {"external": True} if self._external else {}
            self._marks.append((phase, self._accelerator.recorded(enable_timing=True, **options)))
            return
        self._accelerator.synchronize()
        now = time.perf_counter()
        if phase:
            self._add(phase, now - self._last)
        self._last = now

    @contextmanager
    def captured(self) -> Iterator[Marks]:
        """Marks that become part of a graph; give them to `replayed` after each replay."""
        before, self._marks, self._external = self._marks, [], True
        marks = self._marks
        try:
            yield marks
        finally:
            self._marks, self._external = before, False

    def replayed(self, marks: Marks) -> None:
        """Add the phases of a replay; waits for it, because the next one writes to the same events."""
        if marks:
            marks[-1][1].synchronize()
            self._add_marks(marks)

    def moment(self) -> Moment:
        """Now, by the device's clock."""
        return self._accelerator.moment()

    def communicated(self, travels: Travels) -> None:
        """So the gradients of a step travelled while others were computed."""
        self._travels.append(travels)

    def _settle_travels(self) -> None:
        """Once the last part of the gradients has begun to travel, nothing is left to hide it."""
        for travels in self._travels:
            first = travels[0][0]
            spans = sorted((first.seconds_until(begin), first.seconds_until(end)) for begin, end in travels)
            reached = 0.0
            for begin, end in spans:
                self.travelled += max(0.0, end - max(begin, reached))
                reached = max(reached, end)
            self.exposed += reached - spans[-1][0]
        self._travels = []

    def seconds(self, name: str) -> float:
        """How long something was done in total."""
        return self._seconds.get(name, 0.0)

    def settle(self) -> None:
        """Wait for the steps that were issued and add their phases."""
        self._accelerator.synchronize()
        self._settle_travels()
        self._add_marks(self._marks)
        self._marks = []

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """Something that the host waits for: an evaluation, a checkpoint."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._accelerator.synchronize()
            self._add(name, time.perf_counter() - begin)

    def _add_marks(self, marks: Marks) -> None:
        for (_, earlier), (phase, event) in pairwise(marks):
            if phase:
                self._add(phase, earlier.elapsed_time(event) / 1000)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._calls[name] = self._calls.get(name, 0) + 1

    def end_of_trace(self, step: int, boundary: int, num_steps: int) -> int | None:
        """Where the trace ends if it should begin at `step`; None where it should not."""
        due = step >= min(TRACED_FROM, num_steps // 2)
        return min(boundary, step + TRACED_STEPS) if due and self._tracing else None

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Write torch's trace of what happens inside, once."""
        self._tracing = False
        if self._trace is None:  # another rank does
            yield
            return
        own_folder(self._trace.parent)
        profiler = torch.profiler.profile(activities=self._accelerator.activities, acc_events=True)
        with self.action("tracing"), _quiet():
            profiler.start()
        yield
        with self.action("tracing"), _quiet():
            profiler.stop()
            with failures_in_words(self._trace), written_aside(self._trace) as file:
                profiler.export_chrome_trace(file.name)

    def actions(self) -> list[Action]:
        """What was done, the phases of a step first; the total comes last, and what no clock saw before it."""
        total = time.perf_counter() - self._began
        names = sorted(self._seconds, key=lambda name: OF_STEPS.index(name) if name in OF_STEPS else len(OF_STEPS))
        known = [Action(name, self._calls[name], self._seconds[name]) for name in names]
        other = Action("other", 1, max(0.0, total - sum(self._seconds.values())))
        return [*known, other, Action("total", 1, total)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep a library from writing to the terminal: torch's profiler announces itself there, past Python."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def timed(profile: Profile | None, name: str) -> Any:
    """A context that counts as `name` where there is a profile."""
    return nullcontext() if profile is None else profile.action(name)
