"""The same command under a real mpirun: the same weights, the same exit codes, on one host and on two."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.mpi import CLEAN, INTEL, ISOSCALE, MPICH, OPEN_MPI, PATIENCE, RECIPE, Mpi, run, wait_for
from tests.cluster.namespaces import Pair, pair
from tests.helpers import sha, train

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

ALL = [OPEN_MPI, MPICH, INTEL]
SHOW = """
import json
from pathlib import Path
from isoscale.parallel.environments.find import find
Path(f"rank{find().rank}").write_text(json.dumps(vars(find())))
"""
"""Into files, since mpirun mixes what ranks print."""


def name_of(mpi: Mpi) -> str:
    return mpi.name


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of one process."""
    folder = tmp_path_factory.mktemp("alone")
    return sha(train(folder / "run", train__epochs=2, parallel__reduce="tree", train__threads=1))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Pair]:
    with pair(tmp_path) as found:
        yield found


@pytest.mark.parametrize("mpi", ALL, ids=name_of)
def test_ranks_under_mpirun_give_the_weights_of_one_process(mpi: Mpi, tmp_path: Path, alone: str):
    done = run(mpi.command(2, ISOSCALE, "train", *RECIPE, "--run", "run"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2, tree reduction over Gloo" in done.stdout
    assert sha(tmp_path / "run") == alone


def environments(mpi: Mpi, folder: Path) -> list[dict[str, object]]:
    done = run(mpi.command(2, sys.executable, "-c", SHOW), folder)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("mpi", ALL, ids=name_of)
def test_ranks_know_their_numbers_and_agree_on_a_port_that_another_start_does_not_use(mpi: Mpi, tmp_path: Path):
    first, second = environments(mpi, tmp_path), environments(mpi, tmp_path)
    assert [(found["rank"], found["world"], found["local_rank"], found["local_world"]) for found in first] == [
        (0, 2, 0, 2), (1, 2, 1, 2),
    ]  # fmt: skip
    assert {found["address"] for found in first} == {"127.0.0.1"}
    for name in ("port", "job"):
        assert first[0][name] == first[1][name] and second[0][name] == second[1][name]
        assert first[0][name] != second[0][name]


@pytest.mark.parametrize(
    ("mpi", "number", "code"),
    [
        (OPEN_MPI, signal.SIGUSR1, 75),
        (OPEN_MPI, signal.SIGTERM, 1),  # its own, whatever the ranks end with
        (MPICH, signal.SIGUSR1, 75),
        (MPICH, signal.SIGTERM, 75),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_signal_to_mpirun_stops_and_saves(mpi: Mpi, number: signal.Signals, code: int, tmp_path: Path):
    words = ("train", "images/digits", "train.epochs=5000", "train.threads=1", "--run", "run")
    with (tmp_path / "output").open("w+") as output:
        running = subprocess.Popen(
            mpi.command(2, ISOSCALE, *words), cwd=tmp_path, env=CLEAN, stdout=output, stderr=output
        )
        try:
            wait_for(tmp_path / "run/metrics.jsonl")
            running.send_signal(number)
            assert running.wait(PATIENCE) == code
        finally:
            running.kill()
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["status"] == "stopped" and list((tmp_path / "run/checkpoints").glob("step_*"))


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH], ids=name_of)
def test_a_port_that_is_taken_is_named_and_all_ranks_end(mpi: Mpi, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"MASTER_PORT": str(port), "ISOSCALE_JOIN_TIMEOUT": "5"}
        done = run(mpi.command(2, ISOSCALE, "train", *RECIPE), tmp_path, **variables)
    assert done.returncode == 2
    assert f"rank 0 cannot listen at 127.0.0.1 port {port}: another program does" in done.stderr
    assert "take another port: export MASTER_PORT=" in done.stderr


@pytest.mark.parametrize("mpi", ALL, ids=name_of)
def test_ranks_on_two_hosts_give_the_weights_of_one_process(mpi: Mpi, machines: Pair, tmp_path: Path, alone: str):
    given = {} if mpi is OPEN_MPI else {"MASTER_ADDR": "first"}
    words = (ISOSCALE, "train", *RECIPE, "--run", str(tmp_path / "run"))
    done = run(mpi.over(machines, tmp_path, ["first", "second"], *words), tmp_path, **given)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/run.json").read_text())["hosts"] == ["first", "second"]
    assert sha(tmp_path / "run") == alone


def test_where_nothing_says_the_host_of_rank_0_the_variable_is_named(machines: Pair, tmp_path: Path):
    done = run(MPICH.over(machines, tmp_path, ["first", "second"], ISOSCALE, "train", *RECIPE), tmp_path)
    assert done.returncode == 2
    assert "says nothing about where rank 0 is: export MASTER_ADDR, the name of that host, before mpirun" in done.stderr


def test_rank_0_sees_that_the_others_look_for_it_elsewhere(machines: Pair, tmp_path: Path):
    words = (ISOSCALE, "train", *RECIPE, "--run", str(tmp_path / "run"))
    done = run(OPEN_MPI.over(machines, tmp_path, ["first", "second"], *words), tmp_path, LSB_HOSTS="second first")
    assert done.returncode == 2
    expected = "rank 0 is on first, but the others look for it on second, because of the hosts of the LSF job"
    assert f"{expected}: export MASTER_ADDR=first" in done.stdout + done.stderr
