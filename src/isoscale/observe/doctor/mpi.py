"""MPI on this machine, asked for a bounded time."""

import re
import shutil
import subprocess
from collections.abc import Iterator

from isoscale.observe.doctor.finding import Finding

ANSWER = 10.0
"""Seconds for a command to answer."""
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
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=ANSWER, stdin=subprocess.DEVNULL
        )
        said = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    found = next(((name, match) for name, pattern in _MPIS if (match := pattern.search(said))), None)
    if found is None:
        text = f"{program}, which does not tell its version"
        yield Finding("mpi", "warning", text, f"try {program} --version: it may not fit this machine")
    else:
        yield Finding("mpi", "ok", f"{found[0]} {next(filter(None, found[1].groups()))}, {program}")
