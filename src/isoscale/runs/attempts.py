"""The ledger of a run: every start, on what it ran, how far it came and what it cost."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

Attempt = dict[str, Any]


def begun(
    before: Sequence[Attempt], step: int, hosts: Sequence[str], variables: Mapping[str, str] = os.environ
) -> list[Attempt]:
    """The ledger with an attempt that begins now; one before it that never ended was killed."""
    attempt = {
        "job": slurm_job(variables) or None,
        "restart": _restart(variables),
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
    return [*(_closed(earlier) for earlier in before), attempt]


def is_from_before(attempts: Sequence[Attempt], variables: Mapping[str, str] = os.environ) -> bool:
    """Whether a run was trained by this job, and not since the job was put back into the queue."""
    last = attempts[-1] if attempts else {}
    return last.get("job") == slurm_job(variables) and last.get("restart", 0) < _restart(variables)


def slurm_job(variables: Mapping[str, str] = os.environ) -> str:
    """The number of the Slurm job, as its commands take it: `7`, or `7_2` for a task of an array; empty outside."""
    array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else variables.get("SLURM_JOB_ID", "")


def _restart(variables: Mapping[str, str]) -> int:
    count = variables.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdigit() else 0


def _closed(attempt: Attempt) -> Attempt:
    return {**attempt, "status": "killed"} if attempt["status"] == "running" else attempt


def ended(
    attempts: Sequence[Attempt], status: str, step: int, seconds: float, peak_memory: int | None
) -> list[Attempt]:
    """The ledger with its last attempt ended after so many seconds."""
    if not attempts:
        return []
    last = attempts[-1]
    end = {"status": status, "ended": _now(), "last_step": step, "peak_memory": peak_memory,
           "device_hours": round(seconds * last["ranks"] / 3600, 6)}  # fmt: skip
    return [*attempts[:-1], {**last, **end}]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
