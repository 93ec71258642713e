"""Tell an observer what a run has logged, as it was told while the run went on."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from isoscale.observe.events import Ended, Event, Started
from isoscale.observe.loggers.logger import Replayed
from isoscale.observe.metric_log import read_metrics
from isoscale.recipe.formats.tree import flat
from isoscale.recipe.load import load_recipe
from isoscale.runs.run import Run


def events(run: Run) -> Iterator[Event]:
    """All that is known of a run, from its start to its end; no end for a run that goes on."""
    record = run.record
    settings = flat(load_recipe(run.directory.recipe).values)
    rows: list[tuple[str, str]] = [
        (key, str(record[key])) for key in ("host", "started", "isoscale", "seed") if key in record
    ]
    name, num_steps = str(record.get("name", run.path.name)), int(record.get("num_steps") or 0)
    yield Started(name, str(run.path), rows, 0, num_steps, 0, settings)
    yield from _values(run)
    if run.status in ("done", "stopped", "failed"):
        best = record.get("best") or {}
        values = {f"best/{best['name']}": best["value"]} if best.get("value") is not None else {}
        yield Ended(run.status, int(record.get("step") or 0), values=values)  # type: ignore[arg-type]


def _values(run: Run) -> Iterator[Replayed]:
    def moment(row: dict[str, Any]) -> tuple[int, int, float]:
        return row["step"], row["epoch"], row["time"]

    for (step, epoch, when), rows in groupby(read_metrics(run.directory.metrics), moment):
        yield Replayed(step, epoch, {row["name"]: row["value"] for row in rows}, when)
