"""Logs of ranks under real launchers: srun on two nodes, and mpirun whose output goes to a file."""

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.test_rank_logs import NETWORK, RECIPE, of_rank, passes
from tests.cluster.mpi import CLEAN, ISOSCALE, OPEN_MPI, PATIENCE, run

if TYPE_CHECKING:
    from tests.cluster.slurm import Cluster

pytest_plugins = ["tests.cluster.slurm"]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

TWO_NODES = ("srun", "--nodes=2", "--ntasks=2", "--time=5")
TRAIN = (sys.executable, "-m", "isoscale", "train", "recipe.yaml", "observe.tensorboard=0", "--run", "run")
QUICK = ("train", "images/digits", "train.epochs=1", "train.threads=1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def test_srun_gathers_the_lines_of_two_nodes(slurm: "Cluster", folder: Path):
    done = slurm.run(*TWO_NODES, *TRAIN, "--log", "collect", cwd=folder)
    for rank, host in enumerate(("n1", "n2")):
        lines = of_rank(rank, done.stdout)
        assert any(line.startswith(f"on {host}, process ") for line in lines)
        found = passes(lines)
        assert found == [f"pass {number} of {rank}" for number in range(1, len(found) + 1)] and len(found) > 20
    assert (done.stdout + done.stderr).count("pass 5 of 1") == 1, "once, and not by srun as well"


def test_srun_on_two_nodes_writes_a_file_for_each_rank(slurm: "Cluster", folder: Path):
    slurm.run(*TWO_NODES, *TRAIN, "--log", "workers", cwd=folder)
    text = (folder / "run/log-rank1.txt").read_text()
    assert "  on n2, process " in text and "  pass 5 of 1\n" in text


def test_a_node_that_does_not_see_the_run_is_named_and_training_goes_on(slurm: "Cluster", folder: Path):
    slurm.nodes["n1"].call("mount", "-t", "tmpfs", "none", "/mnt")  # a disk of its own
    try:
        done = slurm.run(*TWO_NODES, *TRAIN[:-1], "/mnt/run", "--log", "workers", cwd=folder)
    finally:
        slurm.nodes["n1"].call("umount", "/mnt")
    warned = "warning: rank 1 on n2 cannot write /mnt/run/log-rank1.txt: No such file or directory. Training goes on"
    assert done.stdout.count(warned) == 1
    assert "done at step 23" in done.stdout


@pytest.mark.parametrize("shell", [(), ("bash", "-c", '"$0" "$@"; exit $?')], ids=["directly", "by a shell"])
def test_mpirun_into_a_file_gives_plain_lines(tmp_path: Path, shell: tuple[str, ...]):
    done = run(OPEN_MPI.command(2, *shell, ISOSCALE, *QUICK, "--run", "run"), tmp_path, TERM="xterm-256color")
    assert done.returncode == 0, done.stderr
    assert "epoch 1/1  step 23" in done.stdout and "\x1b" not in done.stdout


def test_mpirun_on_a_terminal_gives_the_bar(tmp_path: Path):
    main, terminal = pty.openpty()
    command = OPEN_MPI.command(2, ISOSCALE, *QUICK, "--run", "run")
    settings = {**CLEAN, "TERM": "xterm-256color", "COLUMNS": "100"}
    running = subprocess.Popen(command, cwd=tmp_path, env=settings, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while select.select([main], [], [], PATIENCE)[0]:
        try:
            shown += os.read(main, 65536)
        except OSError:
            break
    os.close(main)
    assert running.wait(PATIENCE) == 0
    assert re.search(rb"\x1b\[\?25l", shown), "the cursor is hidden while a bar is drawn"
