"""The points of a sweep: which values each of them takes, and what it is called."""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from isoscale.data.hashing import derive_key
from isoscale.errors import UserError
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.schema import Range
from isoscale.recipe.sweep import Choices, choices

Values = dict[str, Any]
"""What a point sets, by key of the recipe."""

MOST_POINTS = 10_000
LONGEST_NAME = 100
DIGITS = 4
"""Significant digits of a number that is drawn, so that it can be read and typed."""
DRAWS_EACH = 100
"""Draws for each point that is asked for, before a random sweep gives up finding another one."""


def points_of(loaded: LoadedRecipe) -> list[Values]:
    """All points that a recipe's sweep stands for, in order."""
    section = loaded.recipe.sweep
    if not section.arguments:
        raise UserError(
            "this recipe has no sweep; say which values to try, such as optimizer.lr=1e-3,3e-4 behind the recipe, or "
            "in its file:\n  sweep: {optimizer.lr: [1e-3, 3e-4], seed: [0, 1, 2]}"
        )
    entries = choices(section)
    _check_number(section.budget or _num_points(entries, section.how))
    if section.how == "random":
        return _random(entries, section.budget or 0, loaded.recipe.seed)
    lists = [entry for entry in entries.values() if isinstance(entry, list)]
    rows = zip(*lists, strict=True) if section.how == "zip" else itertools.product(*lists)
    return [dict(zip(entries, row, strict=True)) for row in rows]


def _num_points(entries: Mapping[str, Choices], how: str) -> int:
    lengths = [len(entry) for entry in entries.values() if isinstance(entry, list)]
    return max(lengths, default=0) if how == "zip" else math.prod(lengths)


def _check_number(number: int) -> None:
    if number > MOST_POINTS:
        raise UserError(
            f"a sweep of {number:,} points: more than {MOST_POINTS:,} are refused; try fewer values, or draw some of "
            "the points: sweep.how=random sweep.budget=100"
        )


def _random(entries: Mapping[str, Choices], budget: int, seed: int) -> list[Values]:
    """The first different points of a sequence that the seed decides; a larger budget adds to a smaller one."""
    found: dict[str, Values] = {}
    for number in range(DRAWS_EACH * budget):
        values = {key: _draw(entry, seed, key, number) for key, entry in entries.items()}
        found.setdefault(json.dumps(values), values)
        if len(found) == budget:
            return list(found.values())
    raise UserError(
        f"only {len(found)} different points could be drawn, and sweep.budget is {budget}; write "
        f"sweep.budget={len(found)}, or give more values to draw from"
    )


def _draw(entry: Choices, seed: int, key: str, number: int) -> Any:
    high, low = derive_key(seed, "sweep", key, number)
    share = ((high << 32 | low) >> 11) / 2**53  # in [0, 1), and exact
    if isinstance(entry, list):
        return entry[int(share * len(entry))]
    return _between(entry, share)


def _between(entry: Range, share: float) -> int | float:
    is_whole = isinstance(entry.min, int) and isinstance(entry.max, int)
    low, high = entry.min, entry.max + is_whole
    value = low * (high / low) ** share if entry.log else low + share * (high - low)
    value = math.floor(value) if is_whole else float(f"{value:.{DIGITS}g}")
    return min(max(value, entry.min), entry.max)


def names_of(points: Sequence[Values]) -> list[str]:
    """A directory name for each point: its values, or a number and a hash where one would be long or like another."""
    short = short_keys(list(points[0]))
    names = [",".join(f"{short[key]}={text(value)}" for key, value in values.items()) for values in points]
    safe = [re.sub(r"[^A-Za-z0-9=,._+-]+", "-", name) for name in names]
    are_different = len({name.lower() for name in safe}) == len(points)  # also where A and a are the same file
    if are_different and max(map(len, safe)) <= LONGEST_NAME:
        return safe
    width = len(str(len(points) - 1))
    return [f"{number:0{width}d}-{_hash(values)}" for number, values in enumerate(points)]


def text(value: Any) -> str:
    """A value as names and tables show it."""
    if isinstance(value, list) and not any(isinstance(entry, list | dict) for entry in value):
        return "-".join(map(text, value))
    return value if isinstance(value, str) else json.dumps(value)


def _hash(values: Values) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The last words of each key, as few as make it different from the others."""

    def shortest(key: str) -> str:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
        return next((end for end in ends if sum(_ends(other, end) for other in keys) == 1), key)

    return {key: shortest(key) for key in keys}


def _ends(key: str, end: str) -> bool:
    return f".{key}".endswith(f".{end}")
