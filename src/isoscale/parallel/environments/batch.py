"""The batch job that a process is part of: its number, its restarts and its end, as the scheduler tells its jobs.

How jobs get into the queue of a scheduler is in `launch.schedulers`.
"""

import os
import shlex
import subprocess
import time
from dataclasses import dataclass

from isoscale.parallel.environments.base import Variables

ANSWER = 10.0
"""Seconds for a scheduler to answer."""


@dataclass(frozen=True)
class BatchSystem:
    """A scheduler as the processes of its jobs see it."""

    name: str
    """What people call it."""
    job: str
    """The variable that holds the number of the job, as with those that follow."""
    cancel: str
    """The command that ends a job."""
    restarts: str = ""
    login: str = ""

    def number(self, variables: Variables) -> str:
        """The number of the job, as the scheduler's commands take it; empty outside."""
        return variables.get(self.job, "")

    def end(self, variables: Variables) -> float | None:
        """When the job ends, by the clock; None where nobody says."""
        return None


class _Slurm(BatchSystem):
    def number(self, variables: Variables) -> str:
        """`7`, or `7_2` for a task of an array."""
        array, task = variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")
        return f"{array}_{task}" if array and task else super().number(variables)

    def end(self, variables: Variables) -> float | None:
        """Older versions do not say it in the environment, and have to be asked."""
        job, ends = variables.get(self.job, ""), variables.get("SLURM_JOB_END_TIME", "")
        if ends.isdigit() or not job.isdigit():
            return float(ends) if ends.isdigit() else None
        question = ["squeue", "--noheader", f"--jobs={job}", "--format=%e"]
        try:
            answer = subprocess.run(question, capture_output=True, text=True, timeout=ANSWER).stdout.strip()
            return time.mktime(time.strptime(answer, "%Y-%m-%dT%H:%M:%S"))
        except (OSError, ValueError, subprocess.TimeoutExpired):  # no squeue there, or no answer: the signal remains
            return None


SLURM = _Slurm("Slurm", "SLURM_JOB_ID", "scancel", "SLURM_RESTART_COUNT", "SLURM_SUBMIT_HOST")
LSF = BatchSystem("LSF", "LSB_JOBID", "bkill")
PBS = BatchSystem("PBS", "PBS_JOBID", "qdel", login="PBS_O_HOST")
SYSTEMS = (SLURM, LSF, PBS)


@dataclass(frozen=True)
class BatchJob:
    """The job that a process is part of."""

    system: BatchSystem
    number: str
    restarts: int
    """How often the scheduler has started it again."""
    login: str
    """The host that it was submitted from; empty where the scheduler does not say."""

    @property
    def cancel(self) -> str:
        """What to type to end it."""
        return f"{self.system.cancel} {shlex.quote(self.number)}"

    def __str__(self) -> str:
        return f"{self.system.name} job {self.number}"


def batch_job(variables: Variables = os.environ) -> BatchJob | None:
    """The job that this process is part of; None outside of any."""
    system = next((system for system in SYSTEMS if system.number(variables)), None)
    if system is None:
        return None
    restarts = variables.get(system.restarts, "")
    return BatchJob(
        system, system.number(variables), int(restarts) if restarts.isdigit() else 0, variables.get(system.login, "")
    )


def batch_end(variables: Variables = os.environ) -> float | None:
    """When the scheduler ends the job of this process, by the clock; None where nobody says."""
    return next((end for system in SYSTEMS if (end := system.end(variables)) is not None), None)
