"""How the points of a sweep stand, and which of them is the best."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoscale.errors import UserError
from isoscale.launch.schedulers.find import AUTO, find
from isoscale.launch.status import Tail
from isoscale.observe.text import number
from isoscale.runs.directory import SUBMITTED, RunDirectory
from isoscale.runs.run import Run
from isoscale.study.sweep.plan import Point, Sweep
from isoscale.study.sweep.points import short_keys, text

WAITING = "waiting"
STARTING = "starting"
FAILED = ("failed", "killed", "damaged")


@dataclass(frozen=True)
class State:
    """Where a point is."""

    point: Point
    status: str
    """waiting, or as that of a run."""
    step: int | None = None
    num_steps: int | None = None
    best: float | None = None
    """The best value of the monitored metric so far."""
    message: str | None = None
    job: str | None = None
    """The task of a job array that trains it, or did."""
    scheduler: str = AUTO
    """That of the job."""

    @property
    def steps(self) -> str:
        """The step and the last one, for people."""
        return "" if self.num_steps is None else f"{self.step or 0}/{self.num_steps}"


class Logged:
    """What a run has logged so far of the metric that its sweep compares; only what is new is read."""

    def __init__(self, sweep: Sweep, point: Point) -> None:
        """Nothing is read yet."""
        self.step: int | None = None
        self.best: float | None = None
        self._tail = Tail(RunDirectory(sweep.folder(point)).metrics)
        self._metric, self._better = sweep.record["monitor"], max if sweep.larger_is_better else min
        self._half_line = ""

    def look(self) -> None:
        """Read on."""
        for more in self._tail.more():
            *lines, self._half_line = (self._half_line + more).split("\n")
            for line in lines:
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            row = json.loads(line)
            self.step = int(row["step"])
            value = row["value"] if row["name"] == self._metric else None
        except (ValueError, KeyError, TypeError):  # whoever reads all of the file says what is wrong with it
            return
        if value is not None:
            self.best = value if self.best is None else self._better(self.best, value)


def states_of(sweep: Sweep) -> list[State]:
    """All points, in the order of the sweep."""
    return [state_of(sweep, point) for point in sweep.points]


def state_of(sweep: Sweep, point: Point, logged: Logged | None = None) -> State:
    """What the run directory of a point says; one without was not started yet."""
    if not Run.exists(sweep.folder(point)):
        return State(point, WAITING)
    run = Run(sweep.folder(point))
    try:
        record, status, message = run.record, run.status, run.message
    except (UserError, OSError) as error:
        return State(point, "damaged", message=str(error))
    submitted = record.get("job") or {}
    job, scheduler = submitted.get("id"), str(submitted.get("scheduler", AUTO))
    if status == SUBMITTED:
        return State(point, WAITING, job=job, scheduler=scheduler)
    logged = logged or Logged(sweep, point)
    logged.look()
    step = max((step for step in (logged.step, record.get("step")) if step is not None), default=None)
    return State(point, status, step, record.get("num_steps"), logged.best, message, job, scheduler)


def best_first(sweep: Sweep, states: Sequence[State]) -> list[State]:
    """The states by their best value; those that have none come last, in the order of the sweep."""
    sign = -1 if sweep.larger_is_better else 1
    return sorted(states, key=lambda state: math.inf if state.best is None else sign * state.best)


def table(sweep: Sweep, states: Sequence[State]) -> list[tuple[str, ...]]:
    """Rows for people: the values of each point, how it stands, how good it is, and its directory."""
    short = short_keys(sweep.record["keys"])
    titles = (*short.values(), "status", "step", sweep.record["monitor"].removeprefix("val/"), "run")
    return [titles, *(_row(state) for state in states)]


def _row(state: State) -> tuple[str, ...]:
    values = (text(value) for value in state.point.values.values())
    best = "" if state.best is None else number(state.best)
    return (*values, state.status, state.steps, best, state.point.name)


def counts(states: Sequence[State]) -> str:
    """How many points are how far: `2 of 4 done, 1 failed`."""
    statuses = [state.status for state in states]
    others = [
        f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses) if status not in ("done", WAITING)
    ]
    return ", ".join([f"{statuses.count('done')} of {len(states)} done", *others])


def as_dict(sweep: Sweep, state: State) -> dict[str, Any]:
    """A point for programs: its values, and what `isoscale runs list --json` says of a run."""
    folder = sweep.folder(state.point)
    values = {"point": state.point.name, "values": state.point.values}
    found = Run(folder).summary_if_readable() if Run.exists(folder) else {"path": str(folder)}
    best = {"name": sweep.record["monitor"], "value": state.best} if state.best is not None else None
    return {**values, **found, "best": found.get("best") or best, "status": state.status, "job": state.job}


def summary_of(path: Path) -> dict[str, Any]:
    """The sweep in a directory as one run among others, with the same entries; of a damaged one, that it is."""
    unknown = ("name", "epoch", "step", "num_steps", "best", "started", "seconds", "message", "weights_sha256")
    nothing: dict[str, Any] = {"path": str(path), **dict.fromkeys(unknown), "metrics": {}}
    try:
        sweep = Sweep.read(path)
        states = states_of(sweep)
        best = best_first(sweep, states)[0].best
        return {
            **nothing, "name": sweep.record["name"], "status": counts(states), "started": sweep.record["started"],
            "best": None if best is None else {"name": sweep.record["monitor"], "value": best, "step": None},
        }  # fmt: skip
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:  # its file may hold anything
        words = str(error) if isinstance(error, UserError) else f"{path} is damaged: {type(error).__name__}: {error}"
        return {**nothing, "status": "damaged", "message": words}


@dataclass(frozen=True)
class Selection:
    """Which points are to be trained now."""

    points: list[Point]
    elsewhere: list[Point]
    """Points that a job or another process is about to train or trains."""


def select(sweep: Sweep, only_failed: bool = False) -> Selection:
    """The points that are not done and that nobody else trains."""
    states = [state for state in states_of(sweep) if _is_wanted(sweep, state, only_failed)]
    active: set[str] = set()
    for name in {state.scheduler for state in states if state.job}:
        scheduler = find(name)
        arrays = [scheduler.array_of(state.job) for state in states if state.job and state.scheduler == name]
        active |= scheduler.active_tasks(array for array in arrays if array)
    elsewhere = [state.point for state in states if state.job in active or state.status == "running"]
    return Selection([state.point for state in states if state.point not in elsewhere], elsewhere)


def _is_wanted(sweep: Sweep, state: State, only_failed: bool) -> bool:
    if only_failed:
        return state.status in FAILED
    return state.status != "done" or not sweep.is_complete(state.point)
