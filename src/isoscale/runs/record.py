"""The record of a run, run.json: whether it holds what a run writes there, and how it is rebuilt from a checkpoint.

A file from elsewhere, or one that was edited, may hold anything; after a power cut there may be none.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isoscale.engine.state.checkpoint import CheckpointError, Checkpoints, read_values
from isoscale.errors import UserError


def rebuilt(checkpoints: Checkpoints, recipe: Path) -> tuple[dict[str, Any], str]:
    """A record from the newest checkpoint that can be read: where the run was then, and all that was written down.

    Also what it was taken from, in words.
    """
    for path in checkpoints.all():
        try:
            record, state = read_values(path)
            return _brought_up_to_date(record, state, recipe), f"the checkpoint {path.name}"
        except (CheckpointError, KeyError, TypeError):
            continue
    return {"status": "running", "started": _time_of(recipe)}, "the recipe alone: there is no checkpoint"


def _brought_up_to_date(record: dict[str, Any], state: dict[str, Any], recipe: Path) -> dict[str, Any]:
    """The record is from the start; what happened since stands in the state."""
    progress, best = state["progress"], state["best"]
    is_done = progress["ended"] or progress["step"] >= record.get("num_steps", float("inf"))
    return {
        "started": _time_of(recipe),
        "seed": state["order"]["seed"],
        **record,
        "status": "done" if is_done else "running",
        "message": "",
        "step": progress["step"],
        "epoch": state["order"]["epoch"],
        "seconds": round(progress["seconds"], 3),
        "best": {"name": best["monitor"], "value": best["value"], "step": best["step"]},
    }


def _time_of(path: Path) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(path.stat().st_mtime))


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
