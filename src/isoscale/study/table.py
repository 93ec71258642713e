"""A comparison as text: a line for each run, in as many blocks of columns as the terminal is wide enough for."""

import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from isoscale.observe.tables import GAP, side_by_side
from isoscale.observe.text import duration, number, plain_number
from isoscale.recipe.compare import ABSENT
from isoscale.study.compare import Comparison, Target
from isoscale.study.facts import Facts

MISSING = "–"
LONGEST_VALUE = 32
"""Of a setting, in characters."""


@dataclass(frozen=True)
class Columns:
    """Columns that stay together, below a title of their own."""

    title: str
    cells: list[tuple[str, ...]]
    """The heads, then a row for each run."""

    def lines(self) -> list[str]:
        """Title, heads and rows, all of the same width."""
        columns = [_aligned(column) for column in zip(*self.cells, strict=True)]
        rows = [GAP.join(row) for row in zip(*columns, strict=True)]
        width = max(len(self.title), *map(len, rows))
        return [line.ljust(width) for line in (self.title, *rows)]


def _aligned(column: Sequence[str]) -> list[str]:
    """Numbers to the right, words to the left."""
    cells = [cell or MISSING for cell in column]
    width = max(map(len, cells))
    are_numbers = all(cell == MISSING or cell.lstrip("-")[:1].isdigit() for cell in cells[1:])
    return [cell.rjust(width) if are_numbers else cell.ljust(width) for cell in cells]


def text(comparison: Comparison) -> str:
    """What `isoscale compare` prints for people."""
    parts = [
        _section("", comparison, [_single(head, cells) for head, cells in _progress(comparison.runs)]),
        "\n".join(_messages(comparison.runs)),
        _section("metrics", comparison, [_metric(comparison, name) for name in comparison.metrics]),
        _further(comparison),
        _race(comparison),
        _differing("settings that differ", comparison, comparison.settings) or "no settings differ",
        _differing("what else differs", comparison, comparison.others),
    ]
    return "\n\n".join(part for part in parts if part)


def _section(heading: str, comparison: Comparison, groups: Sequence[Columns]) -> str:
    if not groups:
        return ""
    names = _single("run", [facts.label for facts in comparison.runs]).lines()
    blocks = side_by_side(names, [group.lines() for group in groups], _room())
    # A first line without a title is empty.
    parts = ["\n".join(block if block[0] else block[1:]) for block in blocks]
    return "\n".join(([heading] if heading else []) + ["\n\n".join(parts)])


def _room() -> int:
    return shutil.get_terminal_size().columns


def _single(head: str, cells: Iterable[str]) -> Columns:
    return Columns("", [(head,), *((cell,) for cell in cells)])


def _progress(runs: Sequence[Facts]) -> list[tuple[str, list[str]]]:
    """How far and how fast; what is not known of any run has no column."""
    columns = [
        ("status", [facts.status for facts in runs]),
        ("step", [_steps(facts) for facts in runs]),
        ("time", [_duration(facts.seconds) for facts in runs]),
        ("samples/s", [_plain(facts.samples_per_second) for facts in runs]),
        ("parameters", [_plain(facts.num_parameters) for facts in runs]),
        ("device", [facts.device or "" for facts in runs]),
    ]
    return [(head, cells) for head, cells in columns if any(cells)]


def _steps(facts: Facts) -> str:
    if facts.step is None:
        return ""
    return (
        str(facts.step) if facts.step == facts.num_steps or not facts.num_steps else f"{facts.step}/{facts.num_steps}"
    )


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else plain_number(value)


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _messages(runs: Sequence[Facts]) -> list[str]:
    """Why runs failed, and which have nothing to show yet."""
    lines = []
    for facts in runs:
        if facts.status in ("failed", "damaged", "killed"):
            reason = facts.message.partition("\n")[0] or "no reason was recorded"
            lines += textwrap.wrap(f"{facts.label} {facts.status}: {reason}", _room(), subsequent_indent=GAP)
        elif not facts.curves:
            lines.append(f"{facts.label} has logged nothing yet")
    return lines


def _metric(comparison: Comparison, name: str) -> Columns:
    rows = [_metric_cells(comparison, facts, name) for facts in comparison.runs]
    return Columns(name, [("best", "at step", "last"), *rows])


def _metric_cells(comparison: Comparison, facts: Facts, name: str) -> tuple[str, str, str]:
    if name not in facts.curves:
        return "", "", ""
    best = comparison.best(facts, name)
    last = number(facts.curves[name][-1].value)
    return (number(best.value), str(best.step), last) if best else ("", "", last)


def _further(comparison: Comparison) -> str:
    names = comparison.further_metrics
    line = f"also logged, shown by --metric NAME: {', '.join(names)}"
    return "\n".join(textwrap.wrap(line, _room(), subsequent_indent=GAP)) if names else ""


def _race(comparison: Comparison) -> str:
    target = comparison.target
    if target is None:
        return ""
    rows = [_reached(target, facts) for facts in comparison.runs]
    heading = f"until {target.name} is {number(target.value)} or {'more' if target.larger_is_better else 'less'}"
    return _section(heading, comparison, [Columns("", [("step", "time"), *rows])])


def _reached(target: Target, facts: Facts) -> tuple[str, str]:
    if target.name not in facts.curves:
        return "", ""
    point = target.reached(facts)
    return (str(point.step), duration(point.seconds)) if point else ("not reached", "")


def _differing(heading: str, comparison: Comparison, values: dict[str, Any]) -> str:
    return _section(heading, comparison, [_single(key, map(setting_text, column)) for key, column in values.items()])


def setting_text(value: Any) -> str:
    """A setting in few characters."""
    words = str(value) if value is ABSENT or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return words if len(words) <= LONGEST_VALUE else f"{words[: LONGEST_VALUE - 1]}…"
