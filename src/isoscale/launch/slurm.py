"""Slurm's own commands: submit a job, ask how it is, end it."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from isoscale.errors import UserError

PATIENCE = 60
"""Seconds for a busy controller to answer."""
ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "PREEMPTED",
)


@dataclass(frozen=True)
class Queued:
    """What the controller says of a job."""

    state: str
    reason: str = ""
    """Why it waits, or which nodes it runs on."""
    elapsed: str = ""
    limit: str = ""
    start: str = ""
    """When it has started, or is expected to."""

    @property
    def is_active(self) -> bool:
        """Whether it runs or will run."""
        return self.state not in ENDED


def as_number(job: object) -> str | None:
    """The number of a job as a run has written it down, such as 7 or 7_2; None for what could be an option."""
    return str(job) if re.fullmatch(r"[0-9]+(_[0-9]+)?", str(job)) else None


def is_here() -> bool:
    """Whether jobs can be submitted from this machine."""
    return shutil.which("sbatch") is not None


def submit_held(script: str) -> str:
    """Hand a script to Slurm, which keeps it until it is released; returns the number of the job."""
    if not is_here():
        raise UserError(
            "there is no Slurm on this machine: the command sbatch was not found. Submit on a login node of the "
            "cluster; `isoscale submit --dry-run` shows the script here"
        )
    done = _call("sbatch", "--parsable", "--hold", given=script)
    if done.returncode != 0:
        raise UserError(f"Slurm does not take the job:\n{_words_of(done)}")
    found = re.search(r"^(\d+)(;|$)", done.stdout, re.MULTILINE)  # `7`, or `7;cluster`; a site may say more
    if found is None:
        raise UserError(f"Slurm took the job, but did not tell its number:\n{_words_of(done)}")
    return found[1]


def release(job: str) -> None:
    """Let a job that is kept take its place in the queue."""
    done = _call("scontrol", "release", job)
    if done.returncode != 0:
        raise UserError(f"Slurm does not release job {job}:\n{_words_of(done)}")


def cancel(job: str) -> None:
    """End a job, waiting or running."""
    done = _call("scancel", job)
    if done.returncode != 0:
        raise UserError(f"Slurm does not cancel job {job}:\n{_words_of(done)}")


def queued(job: str) -> Queued | None:
    """How a job stands; None where Slurm no longer knows it."""
    if shutil.which("squeue") is None:
        return None
    done = _call("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r|%N|%M|%l|%S")
    if done.returncode != 0 or not done.stdout.strip():
        return None
    state, reason, nodes, elapsed, limit, start = done.stdout.strip().splitlines()[0].split("|")
    return Queued(state, nodes or reason, elapsed, limit, start)


def expected_start(job: str) -> str | None:
    """When Slurm thinks that a waiting job starts, in local time; None where it does not know."""
    found = _call("squeue", "--noheader", "--start", f"--jobs={job}", "--format=%S").stdout.split()
    times = sorted(text for text in found if text != "N/A")
    return times[0].replace("T", " ") if times else None


def active_tasks(arrays: Iterable[str]) -> set[str]:
    """The tasks of job arrays that run or wait, such as 7_2."""
    numbers = ",".join(sorted(set(arrays)))
    if not numbers or shutil.which("squeue") is None:
        return set()
    return set(_call("squeue", "--noheader", "--array", f"--jobs={numbers}", "--format=%i").stdout.split())


def accounted(job: str) -> Queued | None:
    """How a job ended, from Slurm's accounting; None where there is none."""
    if shutil.which("sacct") is None:
        return None
    done = _call("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}",
                 "--format=State,NodeList,Elapsed,Timelimit,Start")  # fmt: skip
    if done.returncode != 0 or not done.stdout.strip():
        return None
    state, nodes, elapsed, limit, start = done.stdout.strip().splitlines()[-1].split("|")
    return Queued(state.partition(" ")[0], nodes, elapsed, limit, start)


def _call(*words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, input=given, capture_output=True, text=True, timeout=PATIENCE)
    except FileNotFoundError:
        raise UserError(f"there is no Slurm on this machine: the command {words[0]} was not found") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"Slurm did not answer within {PATIENCE} s: {' '.join(words)}") from None


def _words_of(done: subprocess.CompletedProcess[str]) -> str:
    text = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
    return "\n".join(f"  {line}" for line in text)
