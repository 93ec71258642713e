"""Whether run.json holds what a run writes there; a file from elsewhere, or one that was edited, may hold anything."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isoscale.errors import UserError

_TEXTS = ("name", "status", "message", "started", "host", "platform", "isoscale", "python", "device", "given", "folder")
_COUNTS = ("step", "epoch", "num_steps", "seconds", "peak_memory", "ranks")
_MAPPINGS = ("best", "decided", "packages", "data", "code", "hardware", "job")
_LISTS = ("command", "layers", "profile", "hosts", "stretches", "starts", "rolled_back")
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(_TEXTS, ((str,), "a text")),
    **dict.fromkeys(_COUNTS, ((int, float), "a number")),
    **dict.fromkeys(_MAPPINGS, ((dict,), "a mapping")),
    **dict.fromkeys(_LISTS, ((list,), "a list")),
}
_INSIDE: dict[tuple[str, str], tuple[tuple[type, ...], str]] = {
    ("best", "name"): ((str,), "a text"),
    ("best", "value"): ((int, float), "a number"),
    ("best", "step"): ((int, float), "a number"),
    ("code", "commit"): ((str,), "a text"),
    ("code", "diff"): ((str,), "a text"),
}


def checked(record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The record; raises UserError where an entry is of another kind than any run writes."""
    for name, (kinds, words) in _KINDS.items():
        _check(record, name, kinds, words, path)
    for (name, inner), (kinds, words) in _INSIDE.items():
        _check(record.get(name) or {}, inner, kinds, words, path, f"{name}.")
    for row in record.get("layers") or []:
        if not isinstance(row, dict) or not isinstance(row.get("num_parameters"), int):
            raise UserError(f"{path} is damaged: layers holds {str(row)[:40]!r}, expected a layer and its parameters")
    if record.get("best") and not {"name", "value"} <= record["best"].keys():
        raise UserError(f"{path} is damaged: best is {str(record['best'])[:40]!r}, expected a name and a value")
    return record


def _check(
    record: Mapping[str, Any], name: str, kinds: tuple[type, ...], words: str, path: Path, before: str = ""
) -> None:
    value = record.get(name)
    is_odd_number = isinstance(value, float) and not math.isfinite(value) and name in _COUNTS
    if is_odd_number or (value is not None and not isinstance(value, kinds)):
        raise UserError(f"{path} is damaged: {before}{name} is {str(value)[:40]!r}, expected {words}")
