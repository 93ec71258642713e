"""`isoscale sweep --slurm`: one array job for all points, each of which ends as the same training alone."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers import sha, train

if TYPE_CHECKING:
    from tests.cluster.slurm import Cluster

pytest_plugins = ["tests.cluster.slurm"]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

FIXED = ("train.threads=1", "observe.tensorboard=0")
SWEPT = {f"lr={lr},seed={seed}": (lr, seed) for lr in (0.001, 0.0003) for seed in (0, 1)}


def isoscale(slurm: "Cluster", folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return slurm.run(sys.executable, "-m", "isoscale", *words, cwd=folder, check=check)


def send(slurm: "Cluster", folder: Path, *words: str) -> tuple[str, Path]:
    """Submit a sweep; the number of the array and the directory of the sweep."""
    shown = isoscale(slurm, folder, "sweep", *words, "--slurm", "--time", "10").stdout
    found = re.search(r"submitted job (\d+): .*\n  sweep +(\S+)\n", shown)
    assert found, shown
    return found[1], folder / found[2]


def wait_for_all(slurm: "Cluster", job: str) -> None:
    slurm.wait_for(
        lambda: slurm.run("squeue", "-h", f"--jobs={job}", check=False).stdout == "", f"the end of {job}", 240
    )


def record(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


def output(sweep: Path) -> str:
    return "".join(f"\n{path.name}: {path.read_text()[-800:]}" for path in sorted((sweep / "slurm").glob("*.[oe]*")))


def test_the_points_of_an_array_end_with_the_weights_of_single_trainings(slurm: "Cluster", tmp_path: Path):
    words = ("images/digits", "optimizer.lr=1e-3,3e-4", "seed=0,1", "train.epochs=2", *FIXED, "--at-once", "2")
    job, sweep = send(slurm, tmp_path, *words)
    assert sweep == tmp_path / f"runs/digits-sweep-{job}"
    shown = isoscale(slurm, tmp_path, "status", str(sweep / "lr=0.0003,seed=1")).stdout
    assert re.search(rf"{job}_3, (PENDING|RUNNING|COMPLET)", shown), shown  # a slow machine looks late
    wait_for_all(slurm, job)
    listed = json.loads(isoscale(slurm, tmp_path, "runs", "list", str(sweep), "--json").stdout)
    assert [point["status"] for point in listed] == ["done"] * 4, output(sweep)
    best = [point["best"]["value"] for point in listed]
    assert best == sorted(best, reverse=True)
    for number, (name, (lr, seed)) in enumerate(SWEPT.items()):
        alone = train(tmp_path / "alone" / name, optimizer__lr=lr, seed=seed, train__epochs=2, train__threads=1)
        assert sha(sweep / name) == sha(alone), name
        assert record(sweep / name)["job"]["id"] == f"{job}_{number}"
    name = next(iter(SWEPT))
    assert "done at step 46" in isoscale(slurm, tmp_path, "logs", str(sweep / name)).stdout
    assert f"{job}_0, COMPLETED" in isoscale(slurm, tmp_path, "status", str(sweep / name)).stdout


def test_one_task_that_is_told_to_stop_starts_again_and_the_others_are_left_alone(slurm: "Cluster", tmp_path: Path):
    job, sweep = send(slurm, tmp_path, "images/digits", "seed=0,1", "train.epochs=120", *FIXED)
    runs = [sweep / "seed=0", sweep / "seed=1"]
    slurm.wait_for(lambda: all(record(run)["status"] == "running" for run in runs), f"two trainings: {output(sweep)}")
    # The last task has the number of the whole array as its own.
    slurm.run("scancel", "--signal=USR1", f"{job}_1")
    slurm.wait_for(lambda: len(record(runs[1]).get("stretches", [])) == 2, f"a second start: {output(sweep)}")
    wait_for_all(slurm, job)
    starts = [[attempt["status"] for attempt in record(run)["stretches"]] for run in runs]
    assert starts == [["done"], ["stopped", "done"]], output(sweep)


def test_one_point_of_an_array_is_cancelled_and_goes_on_with_the_sweep(slurm: "Cluster", tmp_path: Path):
    job, sweep = send(slurm, tmp_path, "images/digits", "seed=0,1", "train.epochs=300", *FIXED)
    runs = [sweep / "seed=0", sweep / "seed=1"]
    slurm.wait_for(lambda: all(record(run)["status"] == "running" for run in runs), f"two trainings: {output(sweep)}")
    said = isoscale(slurm, tmp_path, "cancel", str(runs[1])).stdout
    assert f"job {job}_1 is cancelled" in said
    slurm.wait_for(lambda: record(runs[1])["status"] == "stopped", "the end of one")
    wait_for_all(slurm, f"{job}_1")  # its process ends a moment after it has written that
    assert record(runs[0])["status"] == "running"
    refused = isoscale(slurm, tmp_path, "sweep", "--run", str(sweep.relative_to(tmp_path)), "--slurm", "--dry-run")
    assert "left alone" in refused.stderr and "seed=0" in refused.stderr
    assert "#SBATCH --array=1\n" in refused.stdout


def test_a_failed_point_is_submitted_again_alone(slurm: "Cluster", tmp_path: Path):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    (tmp_path / "fragile.yaml").write_text(
        "extends: images/digits\ntask: {class: fragile.Fragile, model: {class: mlp, widths: [64, 10]}}\n"
        "train: {epochs: 1, threads: 1}\n"
        "sweep: {task.label_smoothing: [0.0, 0.1, 0.2]}\n"
    )
    job, sweep = send(slurm, tmp_path, "fragile.yaml")
    wait_for_all(slurm, job)
    statuses = {point: record(sweep / f"label_smoothing={point}")["status"] for point in (0.0, 0.1, 0.2)}
    assert statuses == {0.0: "done", 0.1: "failed", 0.2: "done"}, output(sweep)
    assert "not today" in (sweep / f"slurm/{job}_1.err").read_text()
    (tmp_path / "repaired").touch()
    again, same = send(slurm, tmp_path, "--run", str(sweep.relative_to(tmp_path)), "--failed")
    assert same == sweep
    wait_for_all(slurm, again)
    assert record(sweep / "label_smoothing=0.1")["status"] == "done", output(sweep)
    assert record(sweep / "label_smoothing=0.1")["job"]["id"] == f"{again}_1"
    assert record(sweep / "label_smoothing=0.0")["job"]["id"] == f"{job}_0"


FRAGILE = """
from pathlib import Path
from isoscale.science.images import Classifier

class Fragile(Classifier):
    def __init__(self, *arguments, label_smoothing: float = 0.0, **more):
        super().__init__(*arguments, label_smoothing=label_smoothing, **more)
        if label_smoothing == 0.1 and not Path("repaired").exists():
            raise RuntimeError("not today")
"""
