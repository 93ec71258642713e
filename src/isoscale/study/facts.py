"""What is known of a run, read once: its record, its settings and its curves."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from isoscale.engine.metrics.monitors import spelled
from isoscale.errors import UserError
from isoscale.observe.metric_log import read_metrics
from isoscale.recipe.load import load_recipe
from isoscale.runs.run import Run

SECONDS = "time/seconds"
RATE = "time/samples_per_second"


class Point(NamedTuple):
    """A logged value, and when it was logged."""

    step: int
    epoch: int
    """The epoch that it was logged in, the first one being 1."""
    seconds: float
    """Of training, over all starts."""
    value: float


Curve = list[Point]


@dataclass(frozen=True)
class Facts:
    """A run as far as its files tell."""

    run: Run
    label: str
    """What to call it among others."""
    record: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """The resolved recipe."""
    curves: dict[str, Curve] = field(default_factory=dict)
    """By name, in the order in which the names were first logged."""
    heard: float | None = None
    """When it logged something for the last time, in seconds since 1970."""
    damage: str = ""
    """Why its files cannot be read, where that is so."""

    @property
    def status(self) -> str:
        """running, done, stopped, failed, killed or damaged."""
        return "damaged" if self.damage else self.run.status

    @property
    def message(self) -> str:
        """Why it ended before its end, in one or more lines."""
        return self.damage or str(self.run.message or "")

    @property
    def has_no_end(self) -> bool:
        """Whether its record still waits for an end, because it is running or was killed."""
        return self.status in ("running", "killed")

    @property
    def last(self) -> Point | None:
        """The newest logged value of any name."""
        return max((curve[-1] for curve in self.curves.values()), key=lambda point: point.step, default=None)

    @property
    def step(self) -> int | None:
        """How far it came; while it runs, as far as it has logged."""
        if self.has_no_end or "step" not in self.record:
            return self.last.step if self.last else None
        return int(self.record["step"])

    @property
    def num_steps(self) -> int | None:
        """How far it is to go."""
        return self.record.get("num_steps")

    @property
    def seconds(self) -> float | None:
        """Of training, over all starts."""
        if self.has_no_end or "seconds" not in self.record:
            return self.last.seconds if self.last else None
        return float(self.record["seconds"])

    @property
    def samples_per_second(self) -> float | None:
        """The mean over all logged windows but the first, which holds warm-up."""
        curve = self.curves.get(RATE, [])
        windows = [(after.step - before.step, after.value) for before, after in pairwise(curve)]
        steps = sum(width for width, rate in windows if rate > 0)
        if steps == 0:
            return curve[-1].value if curve else None
        return steps / sum(width / rate for width, rate in windows if rate > 0)

    @property
    def num_parameters(self) -> int | None:
        """Of the model, where the table of its layers was recorded."""
        layers = self.record.get("layers")
        return int(layers[0]["num_parameters"]) if layers else None

    @property
    def device(self) -> str | None:
        """The kind of device that it trains on."""
        return self.record.get("device") or self.record.get("decided", {}).get("device")

    @property
    def monitor(self) -> str | None:
        """The metric that chooses its best checkpoint, if it was ever logged."""
        name = self.settings.get("checkpoint", {}).get("monitor")
        return spelled(name, self.curves) if name else None

    @property
    def larger_is_better(self) -> bool:
        """The direction of the monitored metric."""
        return self.settings.get("checkpoint", {}).get("mode") == "max"


def read(run: Run, label: str | None = None) -> Facts:
    """All that a run's files tell; raises UserError where one is damaged."""
    rows = read_metrics(run.directory.metrics)
    return Facts(
        run,
        label or run.path.resolve().name,
        run.record,
        load_recipe(run.directory.recipe).values,
        curves_of(rows),
        rows[-1].get("time") if rows else None,
    )


def read_all(runs: Sequence[Run]) -> list[Facts]:
    """The facts of several runs under names that tell them apart; a damaged run does not hide the others."""
    names = [run.path.resolve().name for run in runs]
    labels = names if len(set(names)) == len(names) else [str(run.path) for run in runs]
    return [_read_if_readable(run, label) for run, label in zip(runs, labels, strict=True)]


def _read_if_readable(run: Run, label: str) -> Facts:
    try:
        return read(run, label)
    except (UserError, OSError) as error:
        return Facts(run, label, damage=str(error))


def curves_of(rows: Sequence[dict[str, Any]]) -> dict[str, Curve]:
    """Every name's values over the training, from the rows of a metric log."""
    # Values that were logged together carry the same time.
    trained = {(row["step"], row.get("time")): row["value"] for row in rows if row["name"] == SECONDS}
    curves: dict[str, Curve] = {}
    seconds = 0.0
    for row in rows:
        elapsed = row.get("time", 0.0) - rows[0].get("time", 0.0)
        seconds = trained.get((row["step"], row.get("time")), seconds if trained else elapsed)
        curves.setdefault(row["name"], []).append(Point(row["step"], row.get("epoch", 0) + 1, seconds, row["value"]))
    return curves
