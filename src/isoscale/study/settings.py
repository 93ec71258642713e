"""The settings of a run by key, with the places where they were written."""

import re
from dataclasses import dataclass
from typing import Any

from isoscale.recipe.load import load_resolved
from isoscale.recipe.presets import preset_names
from isoscale.recipe.problems import DEFAULT, KeyPath, dotted
from isoscale.runs.run import Run

_LINE = re.compile(r":\d+$")


@dataclass(frozen=True)
class Setting:
    """A value of the recipe."""

    key: str
    value: Any
    origin: str
    """`images/digits.yaml:12`, `my.yaml:3`, `command line`, `Python call` or `default`."""

    @property
    def is_own(self) -> bool:
        """Whether the user decided about it, rather than a preset or a default."""
        file = _LINE.sub("", self.origin)
        return self.origin != DEFAULT and file.removesuffix(".yaml") not in preset_names()


def read_settings(run: Run) -> list[Setting]:
    """Every setting of a run in the order of its recipe."""
    loaded = load_resolved(run.directory.recipe)
    return [Setting(dotted(path), value, _first(loaded.origins, path)) for path, value in _entries(loaded.values)]


def _entries(value: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """Keys and values, lists as a whole."""
    if not isinstance(value, dict) or not value:
        return [(path, value)]
    return [entry for key, child in value.items() for entry in _entries(child, (*path, key))]


def _first(origins: dict[KeyPath, str], path: KeyPath) -> str:
    """The origin of a value, of a list that of its first entry."""
    below = (origin for leaf, origin in origins.items() if leaf[: len(path)] == path)
    return next(below, DEFAULT)
