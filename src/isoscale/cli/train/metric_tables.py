"""Metrics as tables for people: one row a metric, and where they belong to parts of the data, one row a part."""

import re
import shutil
from collections.abc import Mapping, Sequence

from isoscale.observe.tables import GAP, side_by_side
from isoscale.observe.text import number, table

NARROWEST, WIDEST = 60, 120
MOST_IN_HEAD = 12
"""Characters of a column's head in one line, unless one word is longer."""


def lines(metrics: Mapping[str, float], units: Mapping[str, str], of_all: str = "mean |error|") -> list[str]:
    """All metrics: `test/loss` in a list, `test/band_energy/first` in a table with a row for `first`.

    `of_all` is the name of the last row, of all parts together.
    """
    parts = list(dict.fromkeys(part for name in metrics if (part := _split(name)[2])))
    columns = list(dict.fromkeys(_split(name)[1] for name in metrics if _split(name)[2]))
    plain = [
        (name, f"{_shown(value)} {units.get(_split(name)[1], '')}".rstrip())
        for name, value in metrics.items()
        if _split(name)[1] not in columns
    ]
    stage = next(iter(metrics), "").partition("/")[0]
    cells = [_column(metrics, stage, column, parts, units.get(column, "")) for column in columns]
    blocks = _blocks([*parts, of_all], cells) if cells else []
    return [*table(plain), *(line for block in blocks for line in ("", *filter(None, block)))]


def _split(name: str) -> tuple[str, str, str]:
    """`test/band_energy/first` in its stage, metric and part."""
    stage, _, rest = name.partition("/")
    metric, _, part = rest.partition("/")
    return stage, metric, part


def _column(metrics: Mapping[str, float], stage: str, column: str, parts: Sequence[str], unit: str) -> list[str]:
    """The lines of a column: its name, its unit, and a value for each part and for all together."""
    names = [*(f"{stage}/{column}/{part}" for part in parts), f"{stage}/{column}"]
    values = [_shown(metrics[name]) if name in metrics else "–" for name in names]
    return [*_wrapped(column), unit, *values]


def _shown(value: float) -> str:
    """A number; one that was counted has no digits behind the point."""
    return f"{value:,}" if isinstance(value, int) else number(value)


def _wrapped(name: str) -> list[str]:
    """A name in short lines, broken after underscores so that it can be put together again."""
    found = [""]
    for word in re.findall(r"[^_]*_?", name):
        if found[-1] and len(found[-1] + word) > MOST_IN_HEAD:
            found.append("")
        found[-1] += word
    return found


def _blocks(rows: Sequence[str], cells: Sequence[Sequence[str]]) -> list[list[str]]:
    """As many columns side by side as the terminal has room for, the rest below; their last lines are those of rows."""
    height, width = max(map(len, cells)), max(map(len, rows))
    room = min(WIDEST, max(NARROWEST, shutil.get_terminal_size((100, 24)).columns))
    head = [f"{GAP}{label:<{width}}" for label in [""] * (height - len(rows)) + list(rows)]
    groups = [[text.rjust(max(map(len, cell))) for text in [""] * (height - len(cell)) + list(cell)] for cell in cells]
    return side_by_side(head, groups, room)
