"""The ledger of a run: every start, on what it ran, how far it came and what it cost."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from isoscale.parallel.environments.batch import batch_job

Attempt = dict[str, Any]


def begun(
    before: Sequence[Attempt], step: int, hosts: Sequence[str], variables: Mapping[str, str] = os.environ
) -> list[Attempt]:
    """The ledger with an attempt that begins now; one before it that never ended was killed."""
    job = batch_job(variables)
    attempt = {
        "job": job.number if job else None,
        "restart": job.restarts if job else 0,
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
    job = batch_job(variables)
    return job is not None and last.get("job") == job.number and last.get("restart", 0) < job.restarts


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
