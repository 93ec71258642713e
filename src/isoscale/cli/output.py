"""Output for programs and in columns."""

import json
import math
from collections.abc import Sequence
from typing import Any

from isoscale.system.printing import echo, one_line


def print_json(value: Any) -> None:
    """One line of JSON; a number that is not finite, for which JSON has no word, becomes "nan", "inf" or "-inf"."""
    echo(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """As wide as needed and never cut, so that names can be copied and lines searched."""
    columns = [[one_line(cell) for cell in column] for column in zip(*rows, strict=True)]
    padded = [[f"{cell:<{max(map(len, column))}}" for cell in column] for column in columns]
    echo("\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True)))
