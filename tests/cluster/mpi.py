"""Real launchers for tests: where they are, and how each is told to start a few processes."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.namespaces import Pair, host_file

RECIPE = ("images/digits", "train.epochs=2", "parallel.reduce=tree", "train.threads=1")
ISOSCALE = str(Path(sys.executable).with_name("isoscale"))
PATIENCE = 60
CLEAN = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith(("SLURM_", "OMPI_", "PMI", "MASTER_", "I_MPI_HYDRA", "LSB_", "PBS_"))
}
"""The environment without what another launcher may have left in it."""


@dataclass(frozen=True)
class Mpi:
    """An mpirun and the words that it wants."""

    name: str
    program: str | None
    words: tuple[str, ...] = ()
    host_words: tuple[str, ...] = ()
    """To use a file of hosts and an agent instead of ssh."""
    host_line: str = "{}:1"
    install: str = ""

    def command(self, num_ranks: int, *words: str) -> list[str]:
        """A command line that starts ranks on this machine."""
        if self.program is None:
            pytest.skip(f"needs {self.name}: {self.install}")
        return [self.program, *self.words, "-np", str(num_ranks), *words]

    def over(self, pair: Pair, folder: Path, names: Sequence[str], *words: str) -> list[str]:
        """A command line, for the first machine, that starts a rank on each of the named ones."""
        hosts = host_file(folder / "machines", names, self.host_line)
        placed = [word.format(hosts=hosts, agent=pair.agent) for word in self.host_words]
        return pair.first.inside(*self.command(len(names), *placed, *words))


def _intel() -> str | None:
    return shutil.which(f"{os.environ['I_MPI_ROOT']}/bin/mpirun") if "I_MPI_ROOT" in os.environ else None


HYDRA = ("-f", "{hosts}", "-ppn", "1", "-launcher", "ssh", "-launcher-exec", "{agent}")
OPEN_MPI = Mpi(
    "Open MPI", shutil.which("mpirun.openmpi"), ("--allow-run-as-root", "--oversubscribe"),
    ("--hostfile", "{hosts}", "--mca", "plm_rsh_agent", "{agent}"), "{} slots=1", "apt-get install openmpi-bin",
)  # fmt: skip
MPICH = Mpi("MPICH", shutil.which("mpirun.mpich"), host_words=HYDRA, install="apt-get install mpich")
INTEL = Mpi("Intel MPI", _intel(), host_words=HYDRA, install="pip install impi-rt elsewhere, and set I_MPI_ROOT")


def run(command: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command, cwd=folder, env={**CLEAN, **variables}, capture_output=True, text=True, timeout=PATIENCE
    )


def wait_for(path: Path) -> None:
    """Wait until a file has something in it."""
    deadline = time.monotonic() + PATIENCE
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline, f"nothing in {path}"
        time.sleep(0.05)
