"""What starts several processes on this machine or on a cluster: MPI and Slurm, each asked for a bounded time."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from isoscale.observe.doctor.finding import Finding

ANSWER = 10.0
"""Seconds for a command to answer."""
JOB_COUNTS = {
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "tasks",
    "SLURM_CPUS_PER_TASK": "cores a task",
    "SLURM_GPUS_ON_NODE": "GPUs on this node",
}
_MPIS = (
    ("Open MPI", re.compile(r"\(Open MPI\) (\S+)|OpenRTE\) (\S+)|prterun.*?(\d\S+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version (.+?) Build")),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+(\S+)")),
)
"""Kinds of MPI, each with where its version stands in what `mpirun --version` says."""


def mpi() -> Iterator[Finding]:
    """Which mpirun the shell finds; isoscale needs none, but can be started by one."""
    program = shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        yield Finding("mpi", "ok", "no mpirun on this machine")
        return
    done = _ask(program, "--version")
    said = "" if done is None else done.stdout + done.stderr
    found = next(((name, match) for name, pattern in _MPIS if (match := pattern.search(said))), None)
    if found is None:
        text = f"{program}, which does not tell its version"
        yield Finding("mpi", "warning", text, f"try {program} --version: it may not fit this machine")
    else:
        yield Finding("mpi", "ok", f"{found[0]} {next(filter(None, found[1].groups()))}, {program}")


def slurm() -> Iterator[Finding]:
    """Whether jobs can be submitted from here, and the job that this process is in."""
    if shutil.which("sbatch") is None:
        yield Finding("slurm", "ok", "not on this machine")
    else:
        yield _controller()
    if os.environ.get("SLURM_JOB_ID"):
        yield _job(os.environ["SLURM_JOB_ID"])


def _controller() -> Finding:
    ping = _ask("scontrol", "ping")
    said = "" if ping is None else ping.stdout + ping.stderr
    if " UP" not in said:
        reason = said.strip().splitlines()[-1] if said.strip() else f"no answer within {ANSWER:g} s"
        advice = "`isoscale submit` does not work here: ask where the login node is, or who keeps the cluster"
        return Finding("slurm", "warning", f"installed, but its controller does not answer: {reason}", advice)
    text = f"{_text('sbatch', '--version')}, the controller answers, partitions {_partitions()}, accounting "
    accounting = _ask("sacct", "--noheader", "--allocations", "--starttime=now")
    is_on = accounting is not None and accounting.returncode == 0
    return Finding("slurm", "ok", text + ("is on" if is_on else "is off"))


def _partitions() -> str:
    """Names and sizes; the default one has a star."""
    lines = [line.split() for line in _text("sinfo", "--noheader", "--summarize", "--format=%P %D").splitlines()]
    return ", ".join(f"{words[0]} ({words[1]} nodes)" for words in lines if len(words) == 2) or "unknown"


def _job(number: str) -> Finding:
    """The job, as its environment and the controller tell."""
    counts = [f"{what} {count}" for variable, what in JOB_COUNTS.items() if (count := os.environ.get(variable))]
    left = _text("squeue", "--noheader", f"--jobs={number}", "--format=%L")
    return Finding("slurm job", "ok", ", ".join([number, *counts, *([f"time left {left}"] if left else [])]))


def _text(*words: str) -> str:
    """What a command prints; nothing where it fails."""
    done = _ask(*words)
    return done.stdout.strip() if done is not None and done.returncode == 0 else ""


def _ask(*words: str) -> subprocess.CompletedProcess[str] | None:
    """What a command says; None where it is not there or does not answer."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=ANSWER, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
