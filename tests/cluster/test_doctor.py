"""`isoscale doctor` as several ranks, on a real Slurm and under a real mpirun: measured, and blocked for real."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.mpi import ISOSCALE, OPEN_MPI, run

if TYPE_CHECKING:
    from tests.cluster.slurm import Cluster

pytest_plugins = ["tests.cluster.slurm"]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

FRESH_PORTS = ("ipproto", "tcp", "dport", "32768-60999")
"""Those that the system picks; where ranks meet is below."""


def doctor(slurm: "Cluster", folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run it as a rank on each of two nodes; it ends within a minute, whatever is blocked."""
    command = ("srun", "--nodes=2", "--ntasks=2", "--nodelist=n1,n2", "--time=5", sys.executable, "-m", "isoscale")
    patience = {"ISOSCALE_JOIN_TIMEOUT": "8"}
    return slurm.run(*command, "doctor", *words, cwd=folder, check=False, timeout=60, environment=patience)


def lines(shown: str, verdict: str, subject: str) -> list[str]:
    return [line for line in shown.splitlines() if re.match(rf"{verdict} +{subject} ", line)]


@contextmanager
def configured(slurm: "Cluster", node: str, *words: str) -> Iterator[None]:
    """A rule or route on a node, for a while."""
    kind, *rest = words
    slurm.nodes[node].call("ip", kind, "add", *rest)
    try:
        yield
    finally:
        slurm.nodes[node].call("ip", kind, "del", *rest)


def test_two_nodes_give_one_report_with_what_was_measured_between_them(slurm: "Cluster", tmp_path: Path):
    done = doctor(slurm, tmp_path)
    shown = done.stdout
    assert done.returncode == 0, shown + done.stderr
    assert len(lines(shown, "ok", "torch")) == 1 and not lines(shown, "problem", "")
    assert re.search(
        r"ok +slurm +slurm\S* [\d.]+, the controller answers, partitions batch\* \(3 nodes\), urgent", shown
    )
    assert "accounting is off" in shown
    assert re.search(r"ok +slurm job +\d+, nodes 2, tasks 2, .*time left 4:5\d", shown)
    assert re.search(r"ok +launcher +srun: 2 ranks on n1, n2, which meet at n1 \(10\.77\.0\.1\) port 2\d{4}, ", shown)
    assert re.search(r"ok +ranks +n1: rank 0: cpu, \d+ cores\n", shown) and " n2: rank 1: cpu, " in shown
    assert re.search(r"runs folder +runs is the same place on all 2 hosts", shown)
    assert "every host reaches every other one (2 ways), over eth0" in shown
    [measured] = lines(shown, "ok", "all-reduce")
    found = re.search(r"Gloo: (\d+) µs for one number .* ([\d.]+) GB/s for 64 MB of float32", measured)
    assert found and float(found[1]) > 0 and float(found[2]) > 0
    assert not list(tmp_path.iterdir())


def test_a_node_that_does_not_get_to_rank_0_says_so_and_rank_0_says_who_is_missing(slurm: "Cluster", tmp_path: Path):
    with configured(slurm, "n2", "route", "prohibit", "10.77.0.1"):
        done = doctor(slurm, tmp_path)
    assert done.returncode == 2
    [from_first, from_second] = sorted(lines(done.stdout, "problem", "ranks"))
    assert "1 of 2 ranks did not come within 8 s: rank 1 on n2" in from_first
    assert re.search(r"rank 1 on n2 cannot reach rank 0 at n1 \(10\.77\.0\.1\) port \d+: .+: a firewall\?", from_second)
    assert lines(done.stdout, "ok", "runs folder")


@pytest.mark.parametrize(
    ("node", "rule", "reason"),
    [
        ("n2", ("to", "10.77.0.1", *FRESH_PORTS, "prohibit"), "Permission denied"),
        ("n1", ("to", "10.77.0.2", "ipproto", "tcp", "sport", "32768-60999", "blackhole"), "timed out"),
    ],
    ids=["refused", "swallowed"],
)
def test_ports_that_are_blocked_between_nodes_are_named(
    slurm: "Cluster", tmp_path: Path, node: str, rule: tuple[str, ...], reason: str
):
    with configured(slurm, node, "rule", *rule):
        done = doctor(slurm, tmp_path, "--json")
    assert done.returncode == 2
    told = [finding for finding in json.loads(done.stdout)["findings"] if finding["verdict"] == "problem"]
    assert {finding["subject"] for finding in told} == {"network"}
    expected = rf"n2 cannot reach n1 \(10\.77\.0\.1\) on port \d+: {reason}"
    assert any(re.fullmatch(expected, finding["text"]) and "firewall" in finding["advice"] for finding in told)


def test_a_disk_that_is_full_on_one_node_is_named_with_the_node(slurm: "Cluster", tmp_path: Path):
    runs = tmp_path / "runs"
    runs.mkdir()
    slurm.nodes["n2"].call("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(runs))
    try:
        done = doctor(slurm, tmp_path)
    finally:
        slurm.nodes["n2"].call("umount", "--lazy", str(runs))
    assert done.returncode == 2
    [full] = lines(done.stdout, "problem", "runs folder")
    assert "n2: runs (tmpfs): No space left on device: " in full and "make room" in full
    [other] = lines(done.stdout, "warning", "runs folder")
    assert "runs is another place on n2 than on n1: " in other and "--run" in other
    assert re.search(r"ok +runs folder +n1: ", done.stdout) and lines(done.stdout, "ok", "all-reduce")


def test_ranks_of_mpirun_give_one_report(tmp_path: Path):
    done = run(OPEN_MPI.command(2, ISOSCALE, "doctor"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines(done.stdout, "ok", "torch")) == 1
    assert re.search(r"launcher +Open MPI \(mpirun\): 2 ranks on \S+, which meet at 127\.0\.0\.1 port \d+", done.stdout)
    assert re.search(r"ranks +\S+: ranks 0, 1: cpu", done.stdout)
    assert re.search(r"Gloo: \d+ µs for one number", done.stdout)
