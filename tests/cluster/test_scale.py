"""`isoscale scale --slurm` on a real Slurm: one job, whose steps are the measurements."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cluster.slurm import Cluster

pytest_plugins = ["tests.cluster.slurm"]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

WORDS = ("images/digits", "--ranks", "1,2", "--steps", "20", "--repeats", "1", "--run", "study")
JOB = ("--slurm", "--nodes", "2", "--tasks-per-node", "1", "--time", "5")


def scale(slurm: "Cluster", folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return slurm.run(sys.executable, "-m", "isoscale", "scale", *words, cwd=folder, check=False)


def measurements(folder: Path) -> list[dict]:
    return json.loads((folder / "study/scale.json").read_text())["measurements"]


def test_two_nodes_are_measured_in_one_job(slurm: "Cluster", tmp_path: Path):
    shown = scale(slurm, tmp_path, *WORDS, *JOB)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"submitted job \d+: 2 nodes × 1 task", shown.stderr)
    assert re.search(r"^ +2 +2 +64 ", shown.stdout, re.MULTILINE)
    one, two = measurements(tmp_path)
    assert (one["ranks"], one["hosts"], one["steps"]) == (1, ["n1"], 20)
    assert (two["ranks"], two["hosts"], two["steps"]) == (2, ["n1", "n2"], 20)
    assert one["decided"]["threads"] == two["decided"]["threads"] == 1
    assert (tmp_path / "study/scale.png").exists() and (tmp_path / "study/slurm/job.sh").exists()


def test_ctrl_c_leaves_the_job_and_the_table_is_collected_later(slurm: "Cluster", tmp_path: Path):
    login = slurm.nodes["login"].inside()[:-1]
    words = [*login, f"--wd={tmp_path}", sys.executable, "-m", "isoscale", "scale", *WORDS, *JOB]
    environment = {**os.environ, **slurm.environment}
    waiting = subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which what runs in the background ignores
    )  # fmt: skip
    assert waiting.stderr is not None
    job = re.search(r"submitted job (\d+)", waiting.stderr.readline())[1]
    os.killpg(waiting.pid, signal.SIGINT)  # as a terminal does
    assert f"job {job} stays in the queue" in waiting.communicate(timeout=60)[1]
    assert slurm.wait(job) == "COMPLETED"
    later = scale(slurm, tmp_path, "--run", "study")
    assert later.returncode == 0 and not later.stderr and "speed-up" in later.stdout


def test_a_job_that_ends_early_is_said_and_the_rest_is_submitted_again(slurm: "Cluster", tmp_path: Path):
    assert scale(slurm, tmp_path, *WORDS, *JOB).returncode == 0
    record = json.loads((tmp_path / "study/scale.json").read_text())
    kept = record["measurements"][:1]
    (tmp_path / "study/scale.json").write_text(json.dumps({**record, "measurements": kept}))
    assert "add --trust" in scale(slurm, tmp_path, "--run", "study").stderr, "a file that somebody has changed"
    again = scale(slurm, tmp_path, "--run", "study", "--trust")
    assert again.returncode == 0 and "submitted job" in again.stderr
    assert measurements(tmp_path)[:1] == kept and len(measurements(tmp_path)) == 2

    failing = [word if word != "study" else "failing" for word in WORDS]
    failed = scale(slurm, tmp_path, *failing, "data.batch_size=5000", *JOB)
    assert failed.returncode == 2 and "ended before all was measured" in failed.stderr
    assert "only 1438 training samples" in "".join(path.read_text() for path in tmp_path.glob("failing/slurm/*.err"))
