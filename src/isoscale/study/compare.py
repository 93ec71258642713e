"""Runs side by side: how far and how fast each came, how good it is, and what was different."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoscale.errors import KeyPath, UserError, dotted, nearest
from isoscale.recipe.compare import ABSENT, differences
from isoscale.runs.directory import ROOT
from isoscale.runs.run import Run
from isoscale.study.facts import Curve, Facts, Point, read_all

TRAIN_LOSS = "train/loss_epoch"


@dataclass(frozen=True)
class Target:
    """A value of a metric that runs race to."""

    name: str
    value: float
    larger_is_better: bool

    def reached(self, facts: Facts) -> Point | None:
        """Where a run first was there."""
        sign = 1 if self.larger_is_better else -1
        curve = facts.curves.get(self.name, [])
        return next((point for point in curve if sign * point.value >= sign * self.value), None)


@dataclass(frozen=True)
class Comparison:
    """What `isoscale compare` prints."""

    runs: list[Facts]
    asked: list[str]
    """The metrics that somebody wants to see; empty for the main ones."""
    target: Target | None
    """None where nothing was logged that every run could reach."""
    settings: dict[str, list[Any]]
    """By key, the value of each run: only settings that differ; ABSENT where a run has no such key."""
    others: dict[str, list[str]]
    """What else differs, such as versions and data; a text for each run, empty where it is not known."""

    @property
    def metrics(self) -> list[str]:
        """The metrics to show."""
        return self.asked or _main_metrics(self.runs)

    @property
    def further_metrics(self) -> list[str]:
        """Other metrics of evaluations that could be shown."""
        names = dict.fromkeys(name for facts in self.runs for name in facts.curves if name.startswith("val/"))
        return [name for name in names if name not in self.metrics]

    def larger_is_better(self, name: str) -> bool:
        """The direction in which a metric gets better."""
        return _larger_is_better(name, self.runs)

    def best(self, facts: Facts, name: str) -> Point | None:
        """The best value of a metric in a run."""
        return best(facts.curves.get(name, []), self.larger_is_better(name))

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for programs."""
        settings = {
            key: [repr(value) if value is ABSENT else value for value in values]
            for key, values in self.settings.items()
        }
        return {
            "runs": [self._run_as_dict(facts) for facts in self.runs],
            "to": vars(self.target) if self.target else None,
            "settings": settings,
            "others": self.others,
        }

    def _run_as_dict(self, facts: Facts) -> dict[str, Any]:
        reached = self.target.reached(facts) if self.target else None
        keys = (
            "status", "message", "step", "num_steps", "seconds", "samples_per_second", "num_parameters", "device",
        )  # fmt: skip
        return {
            "path": str(facts.run.path),
            "name": facts.label,
            **{key: getattr(facts, key) for key in keys},
            "metrics": {name: self._metric_as_dict(facts, name) for name in self.metrics if name in facts.curves},
            "reached": {"step": reached.step, "seconds": reached.seconds} if reached else None,
        }

    def _metric_as_dict(self, facts: Facts, name: str) -> dict[str, Any]:
        found = self.best(facts, name)
        return {
            "best": found.value if found else None,
            "best_step": found.step if found else None,
            "last": facts.curves[name][-1].value,
        }


def compare(runs: Sequence[str | Path | Run], to: str | None = None, metrics: Sequence[str] = ()) -> Comparison:
    """Compare runs: directories, names below `runs`, or folders of runs.

    `to` is a race, such as `val/loss=0.1`; by default to the worst run's best value of the monitored metric.
    """
    found = read_all(find_runs(runs))
    if len(found) < 2:
        names = ", ".join(str(facts.run.path) for facts in found) or "none"
        raise UserError(
            f"two or more runs are needed to compare, found {names}; name them, or a folder of runs: "
            "isoscale compare RUN RUN; `isoscale runs list` shows runs"
        )
    for name in metrics:
        _check_metric(name, found)
    target = parse_target(to, found) if to is not None else _default_target(found)
    settings = _differing_settings(found)
    return Comparison(found, list(metrics), target, settings, _other_differences(found))


def find_runs(places: Sequence[str | Path | Run]) -> list[Run]:
    """The runs that are meant, each once, in the order given."""
    found = [run for place in places for run in ([place] if isinstance(place, Run) else _runs_at(place))]
    return list({run.path.resolve(): run for run in found}.values())


def _runs_at(place: str | Path) -> list[Run]:
    folders = [Path(place), ROOT / place]
    if not any(Run.exists(folder) for folder in folders):
        for folder in folders:
            if runs := Run.all(folder):
                return runs
    return [Run.find(str(place))]


def best(curve: Curve, larger_is_better: bool) -> Point | None:
    """The first of the best values; a NaN is never one."""
    sign = 1 if larger_is_better else -1
    numbers = [point for point in curve if not math.isnan(point.value)]
    return max(numbers, key=lambda point: sign * point.value, default=None)


def parse_target(text: str, runs: Sequence[Facts]) -> Target:
    """The race that `NAME=VALUE` asks for."""
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not name or math.isnan(number):
        raise UserError(f"--to {text}: expected a metric and a number, such as --to val/loss=0.1")
    _check_metric(name, runs)
    return Target(name, number, _larger_is_better(name, runs))


def _default_target(runs: Sequence[Facts]) -> Target | None:
    """What the worst run managed at its best, in the metric that most runs have, so that those all get there."""
    names = [name for name in (monitored(runs), TRAIN_LOSS) if name is not None]
    name = max(names, key=lambda name: sum(name in facts.curves for facts in runs))
    larger = _larger_is_better(name, runs)
    bests = [point.value for facts in runs if (point := best(facts.curves.get(name, []), larger))]
    return Target(name, min(bests) if larger else max(bests), larger) if bests else None


def monitored(runs: Sequence[Facts]) -> str | None:
    """The metric that the runs were trained for: the first one monitored, or else the loss of training."""
    names = [facts.monitor for facts in runs if facts.monitor]
    if names:
        return names[0]
    return TRAIN_LOSS if any(TRAIN_LOSS in facts.curves for facts in runs) else None


def _larger_is_better(name: str, runs: Sequence[Facts]) -> bool:
    """As the recipe says of a monitored metric; a loss falls; anything else goes where training moved it."""
    for facts in runs:
        if facts.monitor == name:
            return facts.larger_is_better
    if "loss" in name:
        return False
    curves = [facts.curves[name] for facts in runs if name in facts.curves]
    return sum(math.copysign(1, curve[-1].value - curve[0].value) for curve in curves if len(curve) > 1) > 0


def _check_metric(name: str, runs: Sequence[Facts]) -> None:
    known = list(dict.fromkeys(known for facts in runs for known in facts.curves))
    if name in known:
        return
    meant = nearest(name, known)
    hint = f"did you mean {meant}?" if meant else f"logged are {', '.join(known) or 'no values yet'}"
    raise UserError(f"no run has a metric {name}; {hint}")


def _main_metrics(runs: Sequence[Facts]) -> list[str]:
    """The monitored metric and the losses of validation and training, as far as they were logged."""
    names = dict.fromkeys([monitored(runs), "val/loss", TRAIN_LOSS])
    return [name for name in names if name is not None and any(name in facts.curves for facts in runs)]


def _differing_settings(runs: Sequence[Facts]) -> dict[str, list[Any]]:
    readable = [facts for facts in runs if not facts.damage]
    found = (differences(readable[0].settings, facts.settings) for facts in readable[1:])
    paths = dict.fromkeys(difference.path for pair in found for difference in pair)
    return {dotted(path): [_at(facts.settings, path) for facts in runs] for path in paths}


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        if not isinstance(values, dict) or key not in values:
            return ABSENT
        values = values[key]
    return values


def _other_differences(runs: Sequence[Facts]) -> dict[str, list[str]]:
    origins = [_origin(facts.record) for facts in runs]
    names = dict.fromkeys(name for origin in origins for name in origin)
    columns = {name: [origin.get(name, "") for origin in origins] for name in names}
    return {name: texts for name, texts in columns.items() if len({text for text in texts if text}) > 1}


def _origin(record: dict[str, Any]) -> dict[str, str]:
    """Where a run comes from, as far as it may change the result or its speed."""
    code = record.get("code") or {}
    decided = record.get("decided", {})
    return {
        **{key: str(record[key]) for key in ("isoscale", "python", "host", "platform") if key in record},
        **record.get("packages", {}),
        **{key: str(decided[key]) for key in ("device", "precision", "program", "threads") if key in decided},
        **{f"{split} data": text for split, text in record.get("data", {}).items()},
        "commit": code.get("commit", "")[:8],
        "uncommitted": _short_hash(code["diff"]) if code.get("diff") else "none" if code else "",
    }


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
