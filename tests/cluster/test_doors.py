"""Ranks on two hosts listen where they meet and nowhere else, and tell where they do not share a secret."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.doors import doors
from tests.cluster.mpi import CLEAN, ISOSCALE, PATIENCE
from tests.cluster.namespaces import ADDRESSES, Pair, pair

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Pair]:
    with pair(tmp_path) as found:
        yield found


def start(machines: Pair, folder: Path, **secrets: str) -> list[subprocess.Popen[str]]:
    """A rank on each machine, of which each has a home of its own; by name what it has as its secret."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "29556", "OMP_NUM_THREADS": "1"}
    words = (ISOSCALE, "train", "images/digits", "train.epochs=1", "--run", str(folder / "run"))
    return [
        subprocess.Popen(
            host.inside(*words), cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={
                **CLEAN, **meeting, "RANK": str(rank), "XDG_CONFIG_HOME": str(folder / host.name),
                **({"ISOSCALE_SECRET": secrets[host.name]} if secrets else {}),
            },
        )
        for rank, host in enumerate((machines.first, machines.second))
    ]  # fmt: skip


def test_ranks_on_two_hosts_listen_at_the_address_where_they_meet(machines: Pair, tmp_path: Path):
    running = start(machines, tmp_path, first="the same on both hosts", second="the same on both hosts")
    found: list[set[str]] = [set(), set()]
    while running[0].poll() is None:
        for process, seen in zip(running, found, strict=True):
            seen |= {address for address, _ in doors([process.pid])}
        time.sleep(0.005)
    errors = [process.communicate(timeout=PATIENCE)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    assert found == [{ADDRESSES["first"]}, {ADDRESSES["second"]}]


def test_hosts_that_do_not_share_a_home_are_told_what_to_export(machines: Pair, tmp_path: Path):
    running = start(machines, tmp_path)
    first, second = (process.communicate(timeout=PATIENCE)[1] for process in running)
    assert [process.returncode for process in running] == [2, 2]
    assert "rank 0 on first and rank 1 on second do not have the same secret" in first
    assert "rank 1 on second and rank 0 on first do not have the same secret" in second
    for words, name in ((first, "first"), (second, "second")):
        assert f"taken from the file {tmp_path}/{name}/isoscale/secret" in words and "export ISOSCALE_SECRET" in words
