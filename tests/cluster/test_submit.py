"""`isoscale submit` on a real Slurm: a job that is stopped, cancelled or loses a node ends with the same weights."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers import sha, timeless, train

if TYPE_CHECKING:
    from tests.cluster.slurm import Cluster

pytest_plugins = ["tests.cluster.slurm"]
pytestmark = [pytest.mark.slow, pytest.mark.cluster]

TREE = ("parallel.reduce=tree", "observe.tensorboard=0")
SHORT = 3
LONG = 30
"""Epochs: so that a training on four processes lasts long enough to be interrupted."""


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Trainings of one process, for each number of epochs."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        epochs: train(folder / str(epochs), train__epochs=epochs, parallel__reduce="tree").path
        for epochs in (SHORT, LONG)
    }


def submit(slurm: "Cluster", folder: Path, *words: str, epochs: int = SHORT) -> tuple[str, Path]:
    """Submit a training on 2 nodes × 2 tasks; the number of the job and the run directory."""
    asked = ("--nodes", "2", "--tasks-per-node", "2", "--cpus-per-task", "1", "--time", "10")
    command = (sys.executable, "-m", "isoscale", "submit", "images/digits", f"train.epochs={epochs}", *TREE)
    shown = slurm.run(*command, *asked, *words, cwd=folder).stdout
    found = re.search(r"submitted job (\d+): 2 nodes × 2 tasks, at most \S+ per start\n  run +(\S+)\n", shown)
    assert found, shown
    return found[1], folder / found[2]


def wait_until_training(slurm: "Cluster", run: Path, step: int = 0, seconds: float = 90) -> None:
    """Wait until a start that is not over has logged something beyond a step."""
    slurm.wait_for(lambda: _last_step(run) > step, f"step {step} in {run}: {output(run)}", seconds)


def _last_step(run: Path) -> int:
    try:
        running = json.loads((run / "run.json").read_text())["status"] == "running"
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["step"]) if running and lines else -1
    except (OSError, ValueError):  # not there yet, or half a line
        return -1


def attempts(run: Path) -> list[dict]:
    """The ledger of a run."""
    return json.loads((run / "run.json").read_text()).get("stretches", [])


def output(run: Path) -> str:
    """What the job wrote, the end of it."""
    return "".join(path.read_text()[-1500:] for path in sorted((run / "slurm").glob("*.[oe]*")))


def test_a_job_on_two_nodes_ends_with_the_weights_of_one_process(
    slurm: "Cluster", alone: dict[int, Path], tmp_path: Path
):
    job, run = submit(slurm, tmp_path)
    assert run == tmp_path / f"runs/digits-{job}"
    assert slurm.wait(job) == "COMPLETED", output(run)
    assert sha(run) == sha(alone[SHORT])
    assert timeless(run) == timeless(alone[SHORT])
    [attempt] = attempts(run)
    assert (attempt["job"], attempt["restart"], attempt["ranks"], attempt["status"]) == (job, 0, 4, "done")
    assert attempt["hosts"] == ["n1", "n2"] and attempt["device_hours"] > 0 and attempt["peak_memory"] > 0
    assert "continues" not in output(run)
    assert "done at step" in (run / f"slurm/{job}.out").read_text()
    assert "step" not in (run / f"slurm/{job}.err").read_text()


def test_a_job_that_is_told_to_stop_starts_again_by_itself_until_it_is_done(
    slurm: "Cluster", alone: dict[int, Path], tmp_path: Path
):
    job, run = submit(slurm, tmp_path, epochs=LONG)
    for restart in range(2):
        wait_until_training(slurm, run, max((attempt["first_step"] for attempt in attempts(run)), default=0))
        assert len(attempts(run)) == restart + 1
        slurm.run("scancel", "--signal=USR1", job)
        slurm.wait_for(lambda restart=restart: len(attempts(run)) == restart + 2, f"start {restart + 2}: {output(run)}")
    assert slurm.wait(job) == "COMPLETED", output(run)
    assert slurm.facts(job)["ExitCode"] == "0:0"
    assert sha(run) == sha(alone[LONG])
    assert timeless(run) == timeless(alone[LONG])
    assert [(attempt["restart"], attempt["status"]) for attempt in attempts(run)] == [
        (0, "stopped"), (1, "stopped"), (2, "done"),
    ]  # fmt: skip
    ends = [attempt["last_step"] for attempt in attempts(run)]
    assert [attempt["first_step"] for attempt in attempts(run)] == [0, *ends[:-1]]


def test_a_job_that_was_cancelled_goes_on_when_its_run_is_submitted_again(
    slurm: "Cluster", alone: dict[int, Path], tmp_path: Path
):
    job, run = submit(slurm, tmp_path, epochs=LONG)
    wait_until_training(slurm, run)
    slurm.run("scancel", job)
    assert slurm.wait(job) == "CANCELLED"
    slurm.wait_for(lambda: slurm.idle_nodes() == {"n1", "n2", "n3"}, "the end of the job's processes")
    again, same = submit(slurm, tmp_path, "--run", str(run.relative_to(tmp_path)), epochs=LONG)
    assert again != job and same == run
    assert slurm.wait(again) == "COMPLETED", output(run)
    assert sha(run) == sha(alone[LONG])
    assert timeless(run) == timeless(alone[LONG])
    first, second = attempts(run)
    assert (first["job"], second["job"], second["first_step"] > 0) == (job, again, True), output(run)


@pytest.mark.parametrize("node", ["n1", pytest.param("n2", marks=pytest.mark.nightly)])
def test_a_job_that_loses_a_node_goes_on_without_it(
    slurm: "Cluster", alone: dict[int, Path], tmp_path: Path, node: str
):
    """The script runs on n1, and so does the first rank."""
    job, run = submit(slurm, tmp_path, "checkpoint.every=100 steps", epochs=LONG)
    wait_until_training(slurm, run, 100)
    assert attempts(run)[0]["hosts"] == ["n1", "n2"]
    slurm.nodes[node].switch_off()
    slurm.wait_for(lambda: len(attempts(run)) == 2, f"a second start: {slurm.state(job)} {output(run)}")
    assert slurm.wait(job) == "COMPLETED", output(run)
    assert sha(run) == sha(alone[LONG])
    assert timeless(run) == timeless(alone[LONG])
    second = attempts(run)[1]
    assert second["restart"] == 1 and node not in second["hosts"] and second["first_step"] >= 100


def test_a_job_that_has_to_make_room_for_a_more_urgent_one_goes_on_after_it(
    slurm: "Cluster", alone: dict[int, Path], tmp_path: Path
):
    job, run = submit(slurm, tmp_path, epochs=LONG)
    wait_until_training(slurm, run)
    urgent = slurm.run("sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null",
                       "--wrap", "sleep 3", cwd=tmp_path).stdout.strip()  # fmt: skip
    assert slurm.wait(urgent) == "COMPLETED"
    assert slurm.wait(job) == "COMPLETED", output(run)
    assert sha(run) == sha(alone[LONG])
    assert [attempt["status"] for attempt in attempts(run)] == ["stopped", "done"]


def test_a_job_asks_for_gpus_and_runs_one_process_each(slurm: "Cluster", tmp_path: Path):
    words = ("submit", "images/digits", "train.epochs=1", *TREE, "-n", "4", "--gpus-per-node", "2", "--time", "5")
    shown = slurm.run(sys.executable, "-m", "isoscale", *words, cwd=tmp_path).stdout
    assert "submitted job" in shown and "2 nodes × 2 GPUs" in shown
    job = re.findall(r"job (\d+)", shown)[0]
    assert slurm.wait(job) == "COMPLETED"
    assert "gpu:2" in slurm.facts(job)["TresPerNode"]
    assert attempts(tmp_path / f"runs/digits-{job}")[0]["ranks"] == 4


def test_a_job_starts_again_no_more_often_than_allowed(slurm: "Cluster", tmp_path: Path):
    job, run = submit(slurm, tmp_path, "--max-requeues", "0", epochs=200)
    wait_until_training(slurm, run)
    slurm.run("scancel", "--signal=USR1", job)
    assert slurm.wait(job) == "FAILED"
    assert slurm.facts(job)["ExitCode"] == "75:0"
    assert [attempt["status"] for attempt in attempts(run)] == ["stopped"]


def test_a_run_that_another_job_trains_is_not_submitted_again(slurm: "Cluster", tmp_path: Path):
    job, run = submit(slurm, tmp_path, epochs=200)
    words = ("submit", "--run", str(run.relative_to(tmp_path)))
    refused = slurm.run(sys.executable, "-m", "isoscale", *words, cwd=tmp_path, check=False)
    assert refused.returncode == 2 and f"job {job} is " in refused.stderr


def test_odd_words_reach_slurm_and_the_training_as_they_are(slurm: "Cluster", tmp_path: Path):
    folder, name, comment = "runs/my #1 'run' $(date) 100%j", "it's #1 & $HOME (a|b)", "a b'c#d * $(date)"
    words = ("submit", "images/digits", "train.epochs=1", *TREE, f"name={json.dumps(name)}", "--run", folder,
             "--directive", f'--comment="{comment}"', "--env", f"ODD={comment}", "--time", "5")  # fmt: skip
    shown = slurm.run(sys.executable, "-m", "isoscale", *words, cwd=tmp_path).stdout
    job = re.findall(r"job (\d+)", shown)[0]
    named = slurm.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%j|%k").stdout.rstrip("\n")
    assert named == f"{name}|{comment}"
    assert slurm.wait(job) == "COMPLETED", output(tmp_path / folder)
    assert json.loads((tmp_path / folder / "run.json").read_text())["status"] == "done"
    assert "done at step" in (tmp_path / folder / f"slurm/{job}.out").read_text()


def test_what_slurm_says_when_it_refuses_is_shown(slurm: "Cluster", tmp_path: Path):
    words = ("submit", "--partition", "nowhere")
    refused = slurm.run(sys.executable, "-m", "isoscale", *words, cwd=tmp_path, check=False)
    assert refused.returncode == 2
    assert "Slurm does not take the job" in refused.stderr and "invalid partition specified: nowhere" in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_the_output_of_a_start_that_fails_is_kept(slurm: "Cluster", tmp_path: Path):
    (tmp_path / "gone.yaml").write_text("extends: images/mnist\ndata: {path: nowhere}\n")
    shown = slurm.run(sys.executable, "-m", "isoscale", "submit", "gone.yaml", "--time", "5", cwd=tmp_path).stdout
    job = re.findall(r"job (\d+)", shown)[0]
    assert slurm.wait(job) == "FAILED"
    run = tmp_path / f"runs/gone-{job}"
    assert "nowhere" in (run / f"slurm/{job}.err").read_text()
    assert json.loads((run / "run.json").read_text())["status"] == "failed"


@pytest.mark.nightly
def test_a_job_that_reaches_its_time_limit_goes_on_in_another_start(slurm: "Cluster", tmp_path: Path):
    job, run = submit(slurm, tmp_path, "--time", "1", epochs=100_000)
    slurm.wait_for(lambda: len(attempts(run)) > 2, "a third start", 300)
    first, second, _ = attempts(run)
    assert (first["status"], second["status"], second["first_step"]) == ("stopped", "stopped", first["last_step"])
    assert slurm.facts(job)["Restarts"] == "2"
