"""How runs stand, told from the scheduler where a job trains them and from their own records where not."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isoscale.engine.stopping import STOP
from isoscale.errors import UserError
from isoscale.launch.schedulers.base import Queued, Scheduler
from isoscale.launch.schedulers.find import AUTO, find
from isoscale.runs.run import Run
from isoscale.system.files import open_own


@dataclass(frozen=True)
class Standing:
    """Where a run is."""

    run: Run
    scheduler: Scheduler
    job: str | None
    """The number of the job that trains it, or did."""
    queued: Queued | None
    """What the scheduler says of that job; None where it does not know it."""

    @classmethod
    def of(cls, run: Run) -> "Standing":
        """Look into the record of a run, and ask the scheduler about its job."""
        record = run.record.get("job") or {}
        scheduler = find(str(record.get("scheduler", AUTO)))
        submitted, trained = record.get("id"), (run.record.get("stretches") or [{}])[-1].get("job")
        # The environment of an array's task tells a number that may be that of the whole array.
        is_task = scheduler.array_of(str(submitted or "")) is not None
        job = scheduler.as_number(trained if run.status == "running" and not is_task else submitted or trained)
        return cls(run, scheduler, job, scheduler.state(job) if job and scheduler.is_here() else None)

    @property
    def is_queued(self) -> bool:
        """Whether a job runs or waits."""
        return self.queued is not None and self.queued.is_active

    @property
    def is_active(self) -> bool:
        """Whether it trains or will."""
        return self.is_queued or self.run.status == "running"

    @property
    def step(self) -> int | None:
        """The last step that was logged."""
        found = (_last_logged(self.run.directory.metrics), self.run.record.get("step"))
        return max((step for step in found if step is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        record = self.run.record
        return {
            "path": str(self.run.path), "status": self.run.status, "message": self.run.message, "step": self.step,
            "num_steps": record.get("num_steps"), "job": self.job,
            self.scheduler.name: self.queued and asdict(self.queued),
            "stretches": record.get("stretches", []),
        }  # fmt: skip

    def cancel(self) -> str:
        """End the job, or ask a training of this machine to stop; says what was done."""
        if self.is_queued and self.job is not None:
            self.scheduler.cancel(self.job)
            return f"job {self.job} is cancelled; a training that runs saves first, and ends"
        if self.run.status == "running":
            open_own(self.run.path / STOP, "ab").close()
            return f"asked the training in {self.run.path} to stop: it saves, and ends"
        raise UserError(f"nothing trains in {self.run.path}: it is {self.run.status}")

    def logs(self) -> dict[str, Path]:
        """The files that are written for people: of the job, or of the training itself."""
        if self.job is not None:
            outputs = self.scheduler.outputs(self.run.path, self.job)
            if self.is_queued or outputs["out"].exists():
                return outputs
        return {"out": self.run.directory.log}


def _last_logged(path: Path) -> int | None:
    try:
        lines = path.read_bytes()[-4096:].splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):  # half a line
            continue
    return None


class Tail:
    """A file that grows."""

    def __init__(self, path: Path) -> None:
        """May not be there yet."""
        self._path = path
        self._position = 0

    def more(self) -> Iterator[str]:
        """What has come since the last time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                text = file.read()
        except FileNotFoundError:
            return
        self._position += len(text)
        if text:
            yield text.decode(errors="replace")
