"""Processes find each other, whoever started them, and say who is missing."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from isoscale.errors import UserError
from isoscale.parallel import world
from isoscale.parallel.collectives import ALONE
from isoscale.parallel.health import rendezvous
from isoscale.parallel.health.rendezvous import Arrival, interface
from tests import warm
from tests.parallel.processes import ends, free_port, ranks, variables

pytestmark = pytest.mark.slow

JOINING = Path(__file__).with_name("joining.py")
HOST = socket.gethostname()


def said(rank: int, num_ranks: int) -> dict[str, object]:
    return {
        "rank": rank, "local_rank": rank, "hosts": [HOST] * num_ranks, "backend": "gloo",
        "sum": sum(range(1, num_ranks + 1)), "heard": list(range(num_ranks)), "again": True,
    }  # fmt: skip


def test_a_process_that_nobody_numbered_is_alone(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert world.join("cpu") is ALONE
    with pytest.raises(ValueError, match="as it is"), world.guarded():
        raise ValueError("as it is")
    assert world.speaks()


@pytest.mark.slow
def test_ranks_join_and_leave_without_a_word():
    with ranks(JOINING, world=3) as running:
        found = ends(running)
    assert [(end.code, end.err) for end in found] == [(0, "")] * 3
    assert [json.loads(end.out) for end in found] == [said(rank, 3) for rank in range(3)]


@pytest.mark.slow
def test_torchrun_starts_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOINING)]
    done = warm.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = sorted(json.loads(text)["rank"] for text in re.findall(r"\{.*?\}", done.stdout))
    assert lines == [0, 1]


@pytest.mark.slow
def test_without_local_numbers_ranks_count_themselves_on_their_host():
    port = free_port()
    plain = [
        {key: value for key, value in variables(rank, 2, port).items() if not key.startswith("LOCAL_")}
        for rank in (0, 1)
    ]
    running = [
        warm.Popen([sys.executable, str(JOINING)], env=each, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         text=True)
        for each in plain
    ]  # fmt: skip
    assert [json.loads(end.out)["local_rank"] for end in ends(running)] == [0, 1]


@pytest.mark.slow
def test_a_rank_that_never_joins_is_named_once_and_all_end():
    with ranks(JOINING, world=3, started=[0, 1], ISOSCALE_JOIN_TIMEOUT="3") as running:
        found = ends(running)
    assert [end.code for end in found] == [2, 2]
    first, second = found[0].err.splitlines()[:2]
    assert first == f"error: 1 of 3 ranks did not come within 3 s: rank 2 on {HOST}"
    assert second.startswith(f"there were: rank 0 from {HOST} (process {running[0].pid}), rank 1 from {HOST} (process ")
    assert "ISOSCALE_JOIN_TIMEOUT=6" in found[0].err and found[1].err == ""


@pytest.mark.slow
def test_a_missing_rank_0_is_named_with_address_and_port():
    with ranks(JOINING, world=2, started=[1], ISOSCALE_JOIN_TIMEOUT="2") as running:
        (found,) = ends(running)
    assert found.code == 2 and found.err.startswith(f"error: rank 1 on {HOST} waited 2 s for rank 0, which does not")
    assert re.search(r"at 127.0.0.1 port \d+ \(MASTER_ADDR, MASTER_PORT\)", found.err)


@pytest.mark.slow
def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = warm.run(
            [sys.executable, str(JOINING)], env=variables(0, 2, port), capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2 and done.stderr.startswith(f"error: rank 0 cannot listen at 127.0.0.1 port {port}")


@pytest.mark.slow
def test_two_processes_cannot_be_the_same_rank():
    with ranks(JOINING, world=3, started=[0, 1, 1], ISOSCALE_JOIN_TIMEOUT="3") as running:
        found = ends(running)
    assert sorted(end.code for end in found) == [2, 2, 2]
    assert sum("two processes say that they are rank 1" in end.err for end in found) == 1


def test_the_patience_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ISOSCALE_JOIN_TIMEOUT", "soon")
    with pytest.raises(UserError, match="ISOSCALE_JOIN_TIMEOUT is 'soon', but must be a number of seconds"):
        rendezvous.patience()
    monkeypatch.setenv("ISOSCALE_JOIN_TIMEOUT", "7.5")
    assert rendezvous.patience() == 7.5


def test_the_interface_is_that_of_the_way_to_the_others():
    here = [Arrival("a", 1, "127.0.0.1"), Arrival("a", 2, "127.0.0.1")]
    assert interface(here, 0) == "lo"


def test_a_machine_whose_name_means_itself_takes_the_way_to_another_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "own_address", {"10.0.0.2": "10.0.0.1"}.__getitem__)
    monkeypatch.setattr(rendezvous, "address_of", {"lo": "127.0.0.1", "eth0": "10.0.0.1"}.get)
    monkeypatch.setattr(rendezvous.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    arrivals = [Arrival("a", 1, "127.0.0.1"), Arrival("b", 2, "10.0.0.2")]
    assert interface(arrivals, 0) == "eth0"
