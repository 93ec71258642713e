"""The scripts of the page about launchers run as they stand there, where the launcher is installed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.mpi import CLEAN, ISOSCALE, MPICH, OPEN_MPI, PATIENCE, Mpi
from tests.cluster.namespaces import Host, Pair, pair
from tests.test_docs import DOCS, run_blocks

if TYPE_CHECKING:
    from tests.cluster.slurm import Cluster

pytest_plugins = ["tests.cluster.slurm"]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

PAGE = DOCS / "how-to/cluster/launchers.md"
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
"""What a user has no need of: neither root nor more ranks than cores."""


def script(*words: str) -> str:
    """The only block of the page that is not executed there and has all these words."""
    found = [
        block.text for block in run_blocks.blocks(PAGE) if block.reason and all(word in block.text for word in words)
    ]
    assert len(found) == 1
    return str(found[0])


def start(
    text: str, folder: Path, mpi: Mpi | None = None, host: Host | None = None, **variables: str
) -> subprocess.Popen[str]:
    """A script that runs, on a host, with `mpirun` as its name for an MPI."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    if mpi is not None:
        (programs / "mpirun").write_text(f'#!/bin/sh\nexec {mpi.command(0)[0]} "$@"\n')
        (programs / "mpirun").chmod(0o755)
    path = f"{programs}:{Path(ISOSCALE).parent}:{CLEAN['PATH']}"
    words = ["bash", "-e", "-c", f"cd {folder}\n{text}"]
    return subprocess.Popen(
        host.inside(*words) if host else words, env={**CLEAN, **AS_ROOT, **variables, "PATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ends_well(running: subprocess.Popen[str]) -> None:
    output, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, output


def hosts_of(run: Path) -> list[str]:
    return list(json.loads((run / "run.json").read_text())["hosts"])


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Pair]:
    with pair(tmp_path) as found:
        yield found


@pytest.mark.parametrize(("mpi", "name"), [(OPEN_MPI, "openmpi"), (MPICH, "mpich")])
def test_mpirun_on_one_host(mpi: Mpi, name: str, tmp_path: Path):
    ends_well(start(script("mpirun -np 2 ", f"runs/{name}"), tmp_path, mpi))
    assert len(hosts_of(tmp_path / "runs" / name)) == 2


def test_open_mpi_on_several_hosts(tmp_path: Path, machines: Pair):
    (tmp_path / "hosts.txt").write_text("first slots=2\nsecond slots=2\n")
    agent = {"OMPI_MCA_plm_rsh_agent": str(machines.agent)}
    ends_well(start(script("--hostfile"), tmp_path, OPEN_MPI, machines.first, **agent))
    assert hosts_of(tmp_path / "runs/openmpi") == ["first", "first", "second", "second"]


def test_mpich_on_several_hosts(tmp_path: Path, machines: Pair):
    (tmp_path / "hosts.txt").write_text("first\nsecond\n")
    agent = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(machines.agent)}
    ends_well(start(script("-f hosts.txt"), tmp_path, MPICH, machines.first, **agent))
    assert hosts_of(tmp_path / "runs/mpich") == ["first", "first", "second", "second"]


@pytest.mark.parametrize("words", [("#SBATCH --ntasks-per-node",), ("scontrol show hostnames",)])
def test_srun_in_a_job(words: tuple[str, ...], slurm: "Cluster", tmp_path: Path):
    text = script(*words)
    head = "" if text.startswith("#!") else "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2\n"
    (tmp_path / "job.sh").write_text(head + text)
    path = {"PATH": f"{Path(ISOSCALE).parent}:{CLEAN['PATH']}"}
    job = slurm.run("sbatch", "--parsable", "--output=out", "job.sh", cwd=tmp_path, environment=path).stdout.strip()
    assert slurm.wait(job) == "COMPLETED", (tmp_path / "out").read_text()
    assert hosts_of(tmp_path / f"runs/digits-{job}") == ["n1", "n1", "n2", "n2"]


def test_torchrun_on_several_hosts(tmp_path: Path, machines: Pair):
    assert Path(sys.executable).with_name("torchrun").exists()
    text = script("torchrun --nnodes=2")
    for running in [start(text, tmp_path, host=host) for host in (machines.first, machines.second)]:
        ends_well(running)
    assert sorted(hosts_of(tmp_path / "runs/torchrun")) == ["first", "first", "second", "second"]
