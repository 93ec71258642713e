"""What checkpoints still know of a run whose run.json was lost, as after a power cut."""

import time
from pathlib import Path
from typing import Any

from isoscale.engine.state.checkpoint import CheckpointError, Checkpoints, read_values


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
