"""What differs between two recipes, and which differences would change a run that is continued."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isoscale.errors import KeyPath, dotted, found


class _Absent:
    def __repr__(self) -> str:
        return "(not set)"


ABSENT = _Absent()
"""Stands for a key that one of the recipes does not have."""

HARMLESS: tuple[KeyPath, ...] = (
    ("name",),
    ("observe",),
    ("launch",),
    ("checkpoint",),
    ("train", "steps_per_launch"),
    ("train", "recompute"),
    ("train", "stop_after"),
    ("parallel", "verify"),
    ("parallel", "timeout"),
    ("parallel", "pin"),
    ("data", "residency"),
    ("data", "workers"),
    ("task", "statistics_file"),  # what it holds is in the weights from the first step on
)
"""Sections and keys that never change the result."""
LENGTHS: tuple[KeyPath, ...] = (("train", "epochs"), ("train", "steps"))


@dataclass(frozen=True)
class Difference:
    """A key that two recipes set differently."""

    path: KeyPath
    old: Any
    new: Any

    @property
    def shortens(self) -> bool:
        """Whether the training would end earlier than it was started for."""
        if self.path not in LENGTHS or not isinstance(self.new, int):
            return False
        return not isinstance(self.old, int) or self.new < self.old

    def __str__(self) -> str:
        text = f"{dotted(self.path)}: {_show(self.old)} → {_show(self.new)}"
        return f"{text}  (a run can be made longer, not shorter)" if self.shortens else text


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Every key whose value differs, in the order of the new recipe."""
    return _differences(old, new, ())


def _differences(old: Any, new: Any, path: KeyPath) -> list[Difference]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if _same(old, new) else [Difference(path, old, new)]
    found_here: list[Difference] = []
    for key in [*new, *(key for key in old if key not in new)]:
        found_here += _differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, key))
    return found_here


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(_same(*pair) for pair in zip(old, new, strict=True))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in old)
    are_nan = old != old and new != new
    return isinstance(old, bool) == isinstance(new, bool) and bool(old == new or are_nan)


def harmful(found_differences: Sequence[Difference]) -> list[Difference]:
    """The differences with which a run cannot be continued; longer training and other logging are fine."""
    return [difference for difference in found_differences if not _is_harmless(difference)]


def _is_harmless(difference: Difference) -> bool:
    if difference.path in LENGTHS:
        return not difference.shortens
    return any(difference.path[: len(prefix)] == prefix for prefix in HARMLESS)


def describe(found_differences: Sequence[Difference]) -> str:
    """The differences for people, a line each: `train.epochs: 10 → 20`."""
    return "\n".join(f"  {difference}" for difference in found_differences)


def _show(value: Any) -> str:
    if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
        return f"[{', '.join(found(item) for item in value)}]"
    return repr(value) if value is ABSENT else found(value)
