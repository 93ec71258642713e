"""Train the first steps of a run again, from its own records, and compare every value that it logged."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from isoscale._version import __version__
from isoscale.engine.settings import Decisions, Settings
from isoscale.engine.trainer import Trainer
from isoscale.errors import UserError
from isoscale.observe.config import Observe
from isoscale.observe.events import EpochEnded, Event, Logged
from isoscale.observe.metric_log import read_metrics
from isoscale.observe.observers import Observers
from isoscale.observe.tables import aligned
from isoscale.runs.directory import hardware, package_versions
from isoscale.runs.fingerprint import compare, fingerprints, read_record
from isoscale.runs.git import code
from isoscale.runs.open import OpenedRun
from isoscale.runs.run import Run
from isoscale.system import devices as accelerators

CLOCK = "time/"
"""What only measures time is nothing to reproduce."""
ROUNDING = 1e-3
COARSE_ROUNDING = 1e-2
COARSE = ("bf16", "fp16", "tf32")
WINDOWS = 2
"""Logged windows that are reproduced by default."""

Key = tuple[int, str]


@dataclass(frozen=True)
class Line:
    """One logged value beside the same one of the reproduction."""

    step: int
    name: str
    recorded: float | None
    """None where only the reproduction has it."""
    reproduced: float | None
    equal: bool


@dataclass(frozen=True)
class Reproduction:
    """What `isoscale reproduce` prints."""

    path: str
    num_steps: int
    lines: list[Line]
    tolerance: float
    """Relative; 0 where every bit must be the same."""
    others: list[str] = field(default_factory=list)
    """What is not as it was, why bits may differ."""
    code_changes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether every value was reproduced."""
        return all(line.equal for line in self.lines)

    @property
    def largest_difference(self) -> float:
        """Relative, over all values that both have."""
        pairs = [(line.recorded, line.reproduced) for line in self.lines]
        found = [_difference(one, two) for one, two in pairs if one is not None and two is not None]
        return max(found, default=0.0)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        count, wrong = len(self.lines), sum(not line.equal for line in self.lines)
        measure = f"to within {self.tolerance:g} of their size" if self.tolerance else "to the last bit"
        if self.equal:
            return f"reproduced: all {count} logged values up to step {self.num_steps} are equal {measure}"
        largest = self.largest_difference
        return (
            f"not reproduced: {wrong} of {count} logged values up to step {self.num_steps} are not equal {measure}; "
            f"the largest difference is {largest:.2g} of the value"
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for programs."""
        return {
            "path": self.path, "equal": self.equal, "num_steps": self.num_steps, "tolerance": self.tolerance,
            "largest_difference": self.largest_difference, "verdict": self.verdict, "others": self.others,
            "code_changes": self.code_changes, "values": [vars(line) for line in self.lines],
        }  # fmt: skip


def reproduce(run: str | Run, num_steps: int | None = None) -> Reproduction:
    """Train the first steps of a run again and compare; by default up to its second log.

    Raises UserError where that cannot be done: the data has changed, a package is missing, the task is not in the
    recipe.
    """
    found = run if isinstance(run, Run) else Run.find(run)
    record = found.record
    if record.get("given"):
        raise UserError(
            f"the task of this run, {record['given']}, was given in Python, where nothing but its script makes it again"
        )
    recorded = _recorded(found)
    last = _last_step(found, recorded, num_steps)
    recorded = {key: value for key, value in recorded.items() if key[0] <= last}
    try:
        reproduced, decided = _train_again(found, recorded, last)
    except UserError as error:
        raise _with_folder(error, record) from None
    others = _other_conditions(record, decided)
    tolerance = 0.0
    if others:
        tolerance = COARSE_ROUNDING if decided.precision in COARSE else ROUNDING
    lines = [
        Line(*key, recorded.get(key), reproduced.get(key), _equal(recorded.get(key), reproduced.get(key), tolerance))
        for key in dict.fromkeys([*recorded, *reproduced])
    ]
    return Reproduction(str(found.path), last, lines, tolerance, others, _code_changes(record))


def _recorded(run: Run) -> dict[Key, float]:
    rows = read_metrics(run.directory.metrics)
    values = {(row["step"], row["name"]): row["value"] for row in rows if not row["name"].startswith(CLOCK)}
    if not values:
        raise UserError(f"{run.path} has logged nothing that could be compared")
    return values


def _last_step(run: Run, recorded: Mapping[Key, float], wanted: int | None) -> int:
    """The last step that is compared: one at which something was logged, trained as the first start began."""
    steps = sorted({step for step, _ in recorded})
    first, *later = _starts(run)
    changed = [start["step"] for start in later if {**start, "step": 0} != {**first, "step": 0}]
    within = [step for step in steps if not changed or step <= changed[0]] or steps
    if wanted is None:
        return within[min(WINDOWS, len(within)) - 1]
    if wanted < steps[0]:
        raise UserError(
            f"nothing was logged up to step {wanted}, and so nothing can be compared; the first values are those of "
            f"step {steps[0]}: --steps {steps[0]}"
        )
    if changed and wanted > changed[0]:
        raise UserError(
            f"the run was continued at step {changed[0]} with another length or other logging, which nothing does "
            f"again from the beginning; use --steps {within[-1]} or less"
        )
    return max(step for step in steps if step <= wanted)


def _starts(run: Run) -> list[dict[str, Any]]:
    """How long the run was meant to be, and how often it logged, from which step on."""
    record = run.record
    unknown = {"step": 0, "num_steps": record.get("num_steps"), "every": None}
    return list(record.get("starts") or [unknown])


class _Enough(UserError):
    """All that was asked for is there."""


class _Collector:
    """Keeps the values of an engine up to a step, and ends it as soon as it has all that were recorded."""

    def __init__(self, wanted: Mapping[Key, float], last: int) -> None:
        """`wanted` are the values to wait for."""
        self.values: dict[Key, float] = {}
        self._missing = set(wanted)
        self._last = last

    def notify(self, event: Event) -> None:
        """Take note of values."""
        if not isinstance(event, Logged | EpochEnded):
            return
        if event.step > self._last:
            raise _Enough
        named = {(event.step, name): value for name, value in event.values.items() if not name.startswith(CLOCK)}
        self.values.update(named)
        self._missing -= named.keys()
        if not self._missing:
            raise _Enough

    def close(self) -> None:
        """Nothing is open."""


def _train_again(run: Run, recorded: Mapping[Key, float], last: int) -> tuple[dict[Key, float], Decisions]:
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    collector = _Collector(recorded, last)
    opened = OpenedRun(run.to_build())
    settings = _settings(opened.settings, _starts(run)[0])
    decided = _decided(run.record, settings)
    try:
        trainer = opened.another_trainer(settings, decided, Observers([collector]))
        try:
            _check_data(run, trainer)
            trainer.fit()
        finally:
            trainer.release()
    except _Enough:
        pass
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(generator)
    return collector.values, decided


def _settings(settings: Settings, start: Mapping[str, Any]) -> Settings:
    """The run's own, as long as it was meant to be at first; nothing is shown and nothing is sent."""
    every, curve = start["every"] or settings.observe.every, start.get("curve", settings.observe.curve)
    train = settings.train
    if start["num_steps"]:
        train = train.model_copy(update={"steps": start["num_steps"], "epochs": None})
    return replace(settings, train=train, observe=Observe(every=every, tensorboard=0, curve=curve))


def _decided(record: Mapping[str, Any], settings: Settings) -> Decisions:
    """What was decided at the first start; anew where its device is not here."""
    try:
        before = Decisions.from_dict(dict(record["decided"]))
    except (KeyError, TypeError) as error:
        raise UserError(f"run.json does not say what was decided at the first start: {error}") from None
    try:
        accelerators.find(before.device)
    except UserError:
        anywhere = settings.train.model_copy(update={"device": "auto", "precision": "auto", "program": "auto"})
        found = Decisions.make(replace(settings, train=anywhere))
        return replace(found, threads=before.threads, cores=before.cores, threads_why=before.threads_why)
    return before


def _check_data(run: Run, trainer: Trainer) -> None:
    found, before = fingerprints(trainer.sources), run.record.get("data") or {}
    changed = sorted(name for name in {**before, **found} if before.get(name) != found.get(name))
    values = compare(read_record(run.path), trainer.sources).changed
    if before and (changed or values):
        named = changed or sorted(values)
        raise UserError(
            f"the data ({', '.join(named)}) is not the data that this run was trained on, so that nothing can be "
            f"reproduced; restore it from a copy{''.join(f'{chr(10)}  {name}: {how}' for name, how in values.items())}"
        )


def _with_folder(error: UserError, record: Mapping[str, Any]) -> UserError:
    """Relative paths of a recipe begin where the run was started."""
    folder = record.get("folder")
    if folder and folder != os.getcwd():
        error.add_note(f"the run was started in {folder}, where paths and classes of the recipe may be found: go there")
    return error


def _other_conditions(record: Mapping[str, Any], decided: Decisions) -> list[str]:
    """What is not as it was, and may change the last bits."""
    now: dict[str, Any] = {
        "isoscale": __version__,
        **package_versions(("torch", "numpy")),
        **hardware(),
        "kind of device": decided.device,
    }
    before = {
        "isoscale": record.get("isoscale"),
        **{name: record.get("packages", {}).get(name) for name in ("torch", "numpy")},
        **(record.get("hardware") or dict.fromkeys(hardware())),
        "kind of device": record.get("decided", {}).get("device"),
    }
    if decided.device == "cpu" == before["kind of device"]:
        now.pop("device")
    found = [
        f"{name} was {before[name] or 'not recorded'}, is {value or 'none'}"
        for name, value in now.items()
        if (before.get(name) or "") != (value or "")
    ]
    world = record.get("decided", {}).get("first_world") or 1
    return found + ([f"{world} ranks trained together, here is one"] if world != 1 else [])


def _code_changes(record: Mapping[str, Any]) -> list[str]:
    """How the user's code differs from what it was."""
    before, now = record.get("code") or {}, code() or {}
    if not before:
        return []
    if not now:
        return [f"the code was that of {before['folder']}, commit {before['commit'][:12]}; here is no git repository"]
    changes = []
    if before["commit"] != now["commit"]:
        changes.append(f"the code was at commit {before['commit'][:12]}, it is at {now['commit'][:12]}")
    if before["diff"] != now["diff"]:
        changes.append("its changes that were not committed are others")
    return changes


def _equal(one: float | None, two: float | None, tolerance: float) -> bool:
    if one is None or two is None:
        return False
    return _difference(one, two) <= tolerance


def _difference(one: float, two: float) -> float:
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    size = max(abs(one), abs(two))
    return abs(one - two) / size if math.isfinite(size) else math.inf


def text(found: Reproduction) -> str:
    """What `isoscale reproduce` prints for people."""
    rows = [("step", "name", "recorded", "reproduced", "equal"), *(_cells(line) for line in found.lines)]
    return "\n".join([*aligned(rows), *_reasons(found), "", found.verdict])


def _cells(line: Line) -> tuple[str, ...]:
    values = ("–" if value is None else repr(value) for value in (line.recorded, line.reproduced))
    return str(line.step), line.name, *values, "yes" if line.equal else "NO"


def _reasons(found: Reproduction) -> Sequence[str]:
    others = [f"other conditions, so that a tolerance of {found.tolerance:g} holds:", *found.others]
    changes = ["the code has changed:", *found.code_changes]
    return [
        line
        for block, wanted in ((others, found.others), (changes, found.code_changes))
        if wanted
        for line in ("", block[0], *(f"  {entry}" for entry in block[1:]))
    ]
