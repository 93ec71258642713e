"""A scaling study in words: for the terminal, as Markdown to paste, and as CSV for other programs."""

import csv
import io
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from isoscale.observe.text import number, plain_number
from isoscale.study.scale.study import Row, Study
from isoscale.study.table import Columns

FIELDS = ("ranks", "num_hosts", "batch_size", "num_repeats", "seconds_per_100", "fastest", "slowest",
          "samples_per_second", "speedup", "efficiency", "startup")  # fmt: skip


def text(study: Study) -> str:
    """The table for a terminal, with what it was measured on."""
    rows = study.rows()
    table = ["", *(line.rstrip() for line in Columns("", _cells(rows)).lines()[1:])] if rows else []
    return "\n".join([title(study), *_conditions(study), *table, *_remarks(study, rows)])


def markdown(study: Study) -> str:
    """The table ready to paste, with what it was measured on and how."""
    heads, *cells = _cells(study.rows())
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([
        f"# {title(study)}, {study.record['started'][:10]}", "",
        " ".join(f"{line}." for line in _conditions(study)), "",
        f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *lines, "", *_remarks(study, study.rows()),
        f"`{shlex.join(study.record['command'])}`", "",
    ])  # fmt: skip


def as_csv(study: Study) -> str:
    """One line for each number of ranks, unrounded; empty where something is not known."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(FIELDS)
    writer.writerows([getattr(row, name) for name in FIELDS] for row in study.rows())
    return file.getvalue()


def as_dict(study: Study) -> dict[str, Any]:
    """The table and every measurement behind it, for programs."""
    rows = [{name: getattr(row, name) for name in FIELDS} for row in study.rows()]
    return {**asdict(study), "path": str(study.path), "rows": rows, "complete": not study.missing}


def title(study: Study) -> str:
    """What was asked."""
    return f"{study.mode} scaling of {study.name}"


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Heads and rows; columns of which nothing is known are left out, a spread needs two repeats."""
    columns = {
        "ranks": [str(row.ranks) for row in rows],
        "hosts": [str(row.num_hosts) for row in rows],
        "batch": [f"{row.batch_size:,}" for row in rows],
        "s per 100 samples": [number(row.seconds_per_100) for row in rows],
        "min–max": [_spread(row) for row in rows],
        "samples/s": [plain_number(row.samples_per_second) for row in rows],
        "speed-up": [_rounded(row.speedup, "{:.2f}") for row in rows],
        "efficiency": [_rounded(row.efficiency, "{:.0%}") for row in rows],
        "start-up s": [_rounded(row.startup, "{:.1f}") for row in rows],
    }
    if all(row.num_hosts == 1 for row in rows):
        del columns["hosts"]
    known = {head: cells for head, cells in columns.items() if any(cells)}
    return [tuple(known), *zip(*known.values(), strict=True)]


def _spread(row: Row) -> str:
    return f"{number(row.fastest)}–{number(row.slowest)}" if row.num_repeats > 1 else ""


def _rounded(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _conditions(study: Study) -> list[str]:
    """On what and how it was measured, as far as all measurements agree."""
    if not study.measurements:
        return []
    last, record = study.measurements[-1], study.record
    decided = {key: _of_all(study, key) for key in ("precision", "program", "reduce", "threads")}
    hosts = list(dict.fromkeys(host for found in study.measurements for host in found.hosts))
    on_host, gpu = last.decided["device"] == "cpu", record["hardware"].get("device")
    hardware = gpu if gpu and not on_host else record["hardware"]["processor"]
    repeats = max(row.num_repeats for row in study.rows())
    many = f"median of {repeats} repeats, in which the rank counts take turns" if repeats > 1 else "measured once"
    return [
        f"{'Global batch' if study.mode == 'strong' else 'Batch of a rank'} fixed; precision {decided['precision']}, "
        f"program {decided['program']}, gradients added by {decided['reduce']}",
        f"{hardware} ({last.decided['device']}, threads per rank: {decided['threads']}), on {', '.join(hosts)}; "
        f"isoscale {record['isoscale']}, torch {record['packages']['torch']}",
        f"{_steps(study)} steps timed after the warm-up on the slowest rank, {many}",
    ]


def _of_all(study: Study, key: str) -> str:
    return " or ".join(dict.fromkeys(str(found.decided[key]) for found in study.measurements))


def _steps(study: Study) -> str:
    counts = [found.steps for found in study.measurements]
    return f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"


def _remarks(study: Study, rows: Sequence[Row]) -> list[str]:
    """What is not as a reader would think: speed-up against several ranks, measurements that are missing."""
    lines = []
    if rows and study.ranks[0] > 1 and rows[0].speedup is not None:
        lines.append(f"Speed-up and efficiency are against {study.ranks[0]} ranks.")
    if study.missing:
        lines.append(
            f"Not measured yet: {len(study.missing)} of {study.repeats * len(study.ranks)} measurements. Go on: "
            f"isoscale scale --run {shlex.quote(str(study.path))}"
        )
    return ["", *lines] if lines else []
