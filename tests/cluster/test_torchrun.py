"""torchrun starts the command itself, on one host and on two."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.mpi import CLEAN, ISOSCALE, PATIENCE, RECIPE, run
from tests.cluster.namespaces import pair
from tests.helpers import sha, train

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PLACES = {
    "c10d": ["--rdzv-backend=c10d", "--rdzv-endpoint=first:29400", "--rdzv-id=one"],
    "static": ["--master-addr=first", "--master-port=29400"],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of one process."""
    folder = tmp_path_factory.mktemp("alone")
    return sha(train(folder / "run", train__epochs=2, parallel__reduce="tree", train__threads=1))


def test_torchrun_starts_the_installed_command(tmp_path: Path, alone: str):
    words = ("--standalone", "--nproc-per-node=2", "--no-python", "--", ISOSCALE, "train", *RECIPE, "--run", "run")
    done = run([*TORCHRUN, *words], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sha(tmp_path / "run") == alone


@pytest.mark.parametrize("kind", PLACES)
def test_torchrun_on_two_hosts_gives_the_weights_of_one_process(kind: str, tmp_path: Path, alone: str):
    words = ("--nnodes=2", "--nproc-per-node=1", *PLACES[kind])
    train_words = ("--no-python", "--", ISOSCALE, "train", *RECIPE, "--run", str(tmp_path / "run"))
    with pair(tmp_path) as machines:
        running = [
            subprocess.Popen(
                host.inside(*TORCHRUN, *words, f"--node-rank={number}", *train_words), cwd=tmp_path, env=CLEAN,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for number, host in enumerate((machines.first, machines.second))
        ]  # fmt: skip
        outputs = [process.communicate(timeout=PATIENCE)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert sorted(json.loads((tmp_path / "run/run.json").read_text())["hosts"]) == ["first", "second"]
    assert sha(tmp_path / "run") == alone
