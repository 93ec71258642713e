"""What keeps ranks from training together is said in words: other recipes, other files, networks that are not open."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import isoscale
from tests.cluster.mpi import CLEAN, ISOSCALE, OPEN_MPI, PATIENCE, run
from tests.cluster.namespaces import ADDRESSES, Host, Pair, pair

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

MEETING = "29555"
NOWHERE = "10.79.0.77"
"""An address of nobody: what is sent there is lost, as behind a firewall."""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Pair]:
    with pair(tmp_path) as found:
        yield found


def lose(host: Host, *where: str) -> None:
    """Let packets of a host to somewhere get lost without a word."""
    host.call("ip", "neigh", "add", NOWHERE, "lladdr", "02:00:00:00:00:99", "dev", "eth0")
    host.call("ip", "route", "add", *where, "via", NOWHERE)


def add_network(host: Host, address: str) -> None:
    """An interface ib0 that leads nowhere."""
    host.call("ip", "link", "add", "ib0", "type", "veth", "peer", "name", "other")
    host.call("ip", "address", "add", f"{address}/24", "dev", "ib0")
    for name in ("ib0", "other"):
        host.call("ip", "link", "set", name, "up")


def ends(machines: Pair, folder: Path, **variables: str) -> list[tuple[int, str]]:
    """How a rank on each machine ends, and what it says."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES["first"], "MASTER_PORT": MEETING, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            host.inside(ISOSCALE, "train", "images/digits"), cwd=folder, text=True, stderr=subprocess.PIPE,
            env={**CLEAN, **meeting, "RANK": str(rank), "ISOSCALE_JOIN_TIMEOUT": "5", **variables},
        )
        for rank, host in enumerate((machines.first, machines.second))
    ]  # fmt: skip
    said = [process.communicate(timeout=PATIENCE)[1] for process in running]
    return [(process.returncode, words) for process, words in zip(running, said, strict=True)]


def test_hosts_that_meet_but_cannot_exchange_tensors_are_named(machines: Pair, tmp_path: Path):
    for host, address in ((machines.first, "10.99.1.1"), (machines.second, "10.99.2.1")):
        add_network(host, address)
        lose(host, "10.99.0.0/16")
    (code, words), other = ends(machines, tmp_path, GLOO_SOCKET_IFNAME="ib0")
    assert (code, other[0]) == (2, 2) and "error" not in other[1] and "Traceback" not in words
    assert "all 2 ranks came, but within 5 s they could not connect to each other over Gloo (ib0):" in words
    assert "first does not reach second at 10.99.2.1, port " in words
    assert "second does not reach first at 10.99.1.1, port " in words
    assert "a firewall?" in words and "export GLOO_SOCKET_IFNAME" in words and "isoscale doctor" in words


def test_an_interface_that_leads_nowhere_is_refused_at_once(machines: Pair, tmp_path: Path):
    for host, address in ((machines.first, "10.99.1.1"), (machines.second, "10.99.2.1")):
        add_network(host, address)
    (code, words), other = ends(machines, tmp_path, GLOO_SOCKET_IFNAME="ib0")
    assert (code, other[0]) == (2, 2) and "error:" not in other[1] and "Traceback" not in words
    assert "no connection from second to the other ranks over Gloo (ib0): " in words and "unreachable" in words


def test_a_firewall_that_lets_only_the_meeting_port_through_is_named(machines: Pair, tmp_path: Path):
    lose(machines.second, "default", "table", "77")
    for priority, (port, table) in enumerate({("dport", MEETING): "main", (): "77"}.items(), 10):
        words = ("to", "10.79.0.0/24", "ipproto", "tcp", *port, "lookup", table, "priority", str(priority))
        machines.second.call("ip", "rule", "add", *words)
    (code, words), other = ends(machines, tmp_path)
    assert (code, other[0]) == (2, 2) and "error:" not in other[1] and "Traceback" not in words
    assert "rank 1 on second does not reach rank 0 on first at 10.79.0.1, port " in words
    assert f"though it does at port {MEETING}" in words and "on all TCP ports" in words


def test_mpirun_with_two_recipes_is_refused(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.yaml").write_text(f"extends: images/digits\nseed: {seed}\n")
    first, second = ([ISOSCALE, "train", f"{name}.yaml"] for name in "ab")
    done = run([*OPEN_MPI.command(1, *first), ":", "-np", "1", *second], tmp_path)
    assert done.returncode == 2 and done.stderr.count("rank 1 on ") == 1
    assert ": b.yaml instead of a.yaml" in done.stderr and not list(tmp_path.glob("runs/*"))


def test_mpirun_with_two_installations_is_refused(tmp_path: Path):
    other = tmp_path / "other" / "isoscale"
    shutil.copytree(Path(isoscale.__file__).parent, other, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "layers.py").open("a") as file:
        file.write("# changed on one of the hosts\n")
    words = [ISOSCALE, "train", "images/digits"]
    there = ["-np", "1", "-x", f"PYTHONPATH={other.parent}", *words]
    done = run([*OPEN_MPI.command(1, *words), ":", *there], tmp_path)
    assert done.returncode == 2, done.stderr
    assert "has other files of isoscale than rank 0" in done.stderr


def test_ranks_that_mpirun_has_bound_keep_their_cores(tmp_path: Path):
    words = [ISOSCALE, "train", "images/digits", "train.epochs=1", "train.threads=1", "--run", "run"]
    command = OPEN_MPI.command(2, *words)
    bound = run([command[0], "--bind-to", "core", *command[1:]], tmp_path)
    if "not enough" in bound.stderr or "more processes than" in bound.stderr:
        pytest.skip("needs two cores")
    assert bound.returncode == 0, bound.stderr
    assert "rank 0: cpu, core" in bound.stdout and "; 1 thread each" in bound.stdout
