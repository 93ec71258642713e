"""Plain `srun isoscale train` inside sbatch and salloc, as people write it by hand: the same weights, no settings."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.mpi import MPICH, OPEN_MPI, Mpi
from tests.helpers import sha, train

if TYPE_CHECKING:
    from tests.cluster.slurm import Cluster

pytest_plugins = ["tests.cluster.slurm"]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

TRAIN = f"{sys.executable} -m isoscale train images/digits train.epochs=2 parallel.reduce=tree"
SHOW = "import json; from isoscale.parallel.environments.find import find; print(json.dumps(vars(find())), flush=True)"


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of one process."""
    folder = tmp_path_factory.mktemp("alone")
    return sha(train(folder / "run", train__epochs=2, parallel__reduce="tree"))


def script(folder: Path, *lines: str) -> str:
    """A job script written by hand."""
    text = ["#!/bin/bash", "#SBATCH --time=5", "#SBATCH --output=job.out", *lines, ""]
    (folder / "job.sh").write_text("\n".join(text))
    return "job.sh"


def batch(slurm: "Cluster", folder: Path, *words: str) -> None:
    """Submit a job and wait for its end, without the long breaks of `sbatch --wait`."""
    job = slurm.run("sbatch", "--parsable", *words, cwd=folder).stdout.strip()
    assert slurm.wait(job) == "COMPLETED", (folder / "job.out").read_text()[-2000:]


@pytest.mark.parametrize(
    "asked", [("--nodes=2", "--ntasks-per-node=2"), ("--ntasks=4",), ("--nodes=3", "--ntasks=4")], ids=" ".join
)
def test_srun_in_a_batch_script_trains_to_the_same_weights(
    slurm: "Cluster", alone: str, tmp_path: Path, asked: tuple[str, ...]
):
    name = script(tmp_path, *(f"#SBATCH {word}" for word in asked), f"srun {TRAIN} --run run")
    batch(slurm, tmp_path, name)
    assert sha(tmp_path / "run") == alone
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["ranks"] == 4
    [attempt] = record["stretches"]
    assert attempt["job"] and attempt["status"] == "done"


def test_srun_in_salloc_trains_to_the_same_weights(slurm: "Cluster", alone: str, tmp_path: Path):
    inside = ("srun", *TRAIN.split(), "--run", "run")
    slurm.run("salloc", "--nodes=2", "--ntasks-per-node=1", "--time=5", *inside, cwd=tmp_path)
    assert sha(tmp_path / "run") == alone
    assert json.loads((tmp_path / "run/run.json").read_text())["stretches"][0]["hosts"] == ["n1", "n2"]


@pytest.mark.parametrize("mpi", [OPEN_MPI, MPICH], ids=lambda mpi: mpi.name)
def test_mpirun_in_an_allocation_trains_to_the_same_weights(slurm: "Cluster", alone: str, tmp_path: Path, mpi: Mpi):
    """What Slurm says there is about the daemons of MPI, and not about ranks."""
    words = mpi.command(2, *TRAIN.split(), "--run", "run")
    slurm.run("salloc", "--nodes=2", "--ntasks-per-node=1", "--time=5", *words, cwd=tmp_path)
    assert sha(tmp_path / "run") == alone
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["hosts"] == ["n1", "n2"] and record["stretches"][0]["job"]


def test_a_run_without_a_name_is_called_after_the_job_which_finds_it_again(
    slurm: "Cluster", tmp_path: Path, alone: str
):
    lines = (
        f"srun {TRAIN} train.epochs=$((1 + ${{SLURM_RESTART_COUNT:-0}}))",
        '[ -n "$SLURM_RESTART_COUNT" ] || scontrol requeue "$SLURM_JOB_ID"',
    )
    job = slurm.run("sbatch", "--parsable", "--ntasks=2", "--requeue", "--open-mode=append",
                    script(tmp_path, *lines), cwd=tmp_path).stdout.strip()  # fmt: skip
    slurm.wait_for(lambda: slurm.state(job) == "COMPLETED" and slurm.facts(job)["Restarts"] == "1", "a restart")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [f"digits-{job}"]
    assert sha(tmp_path / f"runs/digits-{job}") == alone
    attempts = json.loads((tmp_path / f"runs/digits-{job}/run.json").read_text())["stretches"]
    assert [(attempt["job"], attempt["restart"], attempt["status"]) for attempt in attempts] == [
        (job, 0, "done"), (job, 1, "done"),
    ]  # fmt: skip


def test_every_task_knows_its_place(slurm: "Cluster", tmp_path: Path):
    asked = ("--nodes=3", "--ntasks=4", "--time=5", "--label")
    shown = slurm.run("srun", *asked, sys.executable, "-c", SHOW, cwd=tmp_path).stdout
    found = [json.loads(line.partition(": ")[2]) for line in sorted(shown.splitlines())]
    assert [task["rank"] for task in found] == [0, 1, 2, 3]
    assert {task["world"] for task in found} == {4}
    assert sorted(task["local_rank"] for task in found) == [0, 0, 0, 1]
    assert len({(task["address"], task["port"]) for task in found}) == 1
    assert found[0]["port"] > 0


def test_two_steps_of_one_job_do_not_meet(slurm: "Cluster", alone: str, tmp_path: Path):
    steps = [f"srun --ntasks=2 --overlap {TRAIN} --run {name} &" for name in ("one", "two")]
    batch(slurm, tmp_path, "--ntasks=4", script(tmp_path, *steps, "wait"))
    assert sha(tmp_path / "one") == sha(tmp_path / "two") == alone


def test_the_end_of_the_job_is_known_where_the_environment_does_not_tell(slurm: "Cluster", tmp_path: Path):
    ask = "import os, time; from isoscale.engine.stopping import deadline; os.environ.pop('SLURM_JOB_END_TIME', 0); "
    ask += "print(deadline(None) - time.time(), deadline(60) - time.time())"
    shown = slurm.run("srun", "--time=5", sys.executable, "-c", ask, cwd=tmp_path).stdout
    of_job, sooner = map(float, shown.split())
    assert 270 < of_job <= 300 and 50 < sooner <= 60
