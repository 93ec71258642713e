"""The ledger of a run: every start, on what it ran, how far it came and what it cost."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

Stretch = dict[str, Any]


def begun(
    before: Sequence[Stretch], step: int, hosts: Sequence[str], variables: Mapping[str, str] = os.environ
) -> list[Stretch]:
    """The ledger with a stretch that begins now; one before it that never ended was killed."""
    restarts = variables.get("SLURM_RESTART_COUNT", "")
    stretch = {
        "job": variables.get("SLURM_JOB_ID"),
        "restart": int(restarts) if restarts.isdigit() else 0,
        "hosts": list(dict.fromkeys(hosts)),
        "ranks": len(hosts),
        "started": _now(),
        "ended": None,
        "first_step": step,
        "last_step": None,
        "status": "running",
        "device_hours": None,
        "peak_memory": None,
    }
    return [*(_closed(earlier) for earlier in before), stretch]


def _closed(stretch: Stretch) -> Stretch:
    return {**stretch, "status": "killed"} if stretch["status"] == "running" else stretch


def ended(
    stretches: Sequence[Stretch], status: str, step: int, seconds: float, peak_memory: int | None
) -> list[Stretch]:
    """The ledger with its last stretch ended after so many seconds."""
    if not stretches:
        return []
    last = stretches[-1]
    end = {"status": status, "ended": _now(), "last_step": step, "peak_memory": peak_memory,
           "device_hours": round(seconds * last["ranks"] / 3600, 6)}  # fmt: skip
    return [*stretches[:-1], {**last, **end}]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
