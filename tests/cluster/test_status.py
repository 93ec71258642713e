"""`isoscale status`, `cancel` and `logs` of jobs on a real Slurm."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cluster.slurm import Cluster

pytest_plugins = ["tests.cluster.slurm"]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def isoscale(
    slurm: "Cluster", folder: Path, *words: str, check: bool = True, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    return slurm.run(sys.executable, "-m", "isoscale", *words, cwd=folder, check=check, timeout=timeout)


def submit(slurm: "Cluster", folder: Path, *words: str) -> str:
    shown = isoscale(slurm, folder, "submit", "images/digits", "train.threads=1", "--time", "10", *words).stdout
    return re.findall(r"submitted job (\d+)", shown)[0]


def test_a_job_is_shown_from_the_queue_to_its_end(slurm: "Cluster", tmp_path: Path):
    blocker = slurm.run("sbatch", "--parsable", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 600",
                        cwd=tmp_path).stdout.strip()  # fmt: skip
    slurm.wait(blocker, "RUNNING")
    job = submit(slurm, tmp_path, "train.epochs=2000")
    waiting = isoscale(slurm, tmp_path, "status").stdout
    assert f"runs/digits-{job}" in waiting and f"{job}, PENDING" in waiting and "submitted" in waiting
    slurm.wait_for(lambda: "expected to start at 20" in isoscale(slurm, tmp_path, "status").stdout, "a plan of Slurm")
    assert "nothing was written yet" in isoscale(slurm, tmp_path, "logs").stderr
    slurm.run("scancel", blocker)

    def status() -> dict:
        return json.loads(isoscale(slurm, tmp_path, "status", f"digits-{job}", "--json").stdout)

    slurm.wait_for(lambda: status()["status"] == "running" and status()["step"], "steps")
    found = status()
    assert found["job"] == job and found["slurm"]["state"] == "RUNNING" and found["num_steps"] == 46_000
    assert "epoch" in isoscale(slurm, tmp_path, "logs").stdout
    said = isoscale(slurm, tmp_path, "cancel", f"digits-{job}").stdout
    assert f"job {job} is cancelled" in said and f"isoscale submit --run runs/digits-{job}" in said
    slurm.wait_for(lambda: status()["status"] == "stopped", "the end")
    slurm.wait(job, "CANCELLED")
    ended = isoscale(slurm, tmp_path, "status").stdout
    assert f"{job}, CANCELLED" in ended and "stopped by SIGTERM" in ended and "device hours" in ended
    refused = isoscale(slurm, tmp_path, "cancel", f"digits-{job}", check=False)
    assert refused.returncode == 2 and "nothing trains" in refused.stderr


def test_the_output_of_a_job_is_followed_to_its_end(slurm: "Cluster", tmp_path: Path):
    job = submit(slurm, tmp_path, "train.epochs=3")
    followed = isoscale(slurm, tmp_path, "logs", "-f", f"runs/digits-{job}")
    assert "epoch 3/3" in followed.stdout and "done at step 69" in followed.stdout


def test_a_job_that_slurm_has_forgotten_is_told_from_its_records(slurm: "Cluster", tmp_path: Path):
    """Accounting is switched off on this cluster, as it is on some."""
    job = submit(slurm, tmp_path, "train.epochs=1")
    assert slurm.wait(job) == "COMPLETED"
    record = tmp_path / f"runs/digits-{job}/run.json"
    record.write_text(record.read_text().replace(f'"id": "{job}"', '"id": "987654"'))
    shown = isoscale(slurm, tmp_path, "status").stdout
    assert "987654, no longer known to Slurm" in shown and "done, step 23 of 23" in shown
