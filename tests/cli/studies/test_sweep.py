"""`isoscale sweep` on this machine: real trainings, several at a time, stopped, continued and failing."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from isoscale.errors import START_AGAIN
from tests import warm
from tests.cli.train.test_stopping import on_a_terminal
from tests.helpers import cli, command, first_of, sha, train
from tests.parallel.processes import children, wait_until_gone

FIXED = ("train.threads=1", "observe.tensorboard=0")
FRAGILE = """
from pathlib import Path
from isoscale.science.images import Classifier

class Fragile(Classifier):
    def __init__(self, *arguments, label_smoothing: float = 0.0, **more):
        super().__init__(*arguments, label_smoothing=label_smoothing, **more)
        if label_smoothing == 0.1 and not Path("repaired").exists():
            raise RuntimeError("not today")
"""


def statuses(sweep: Path) -> dict[str, str]:
    return {path.parent.name: json.loads(path.read_text())["status"] for path in sweep.glob("*/run.json")}


@pytest.fixture
def prepared(isoscale, tmp_path: Path) -> Path:
    """A sweep whose second point has ended, and the others wait."""
    from isoscale.study.sweep.plan import plan

    plan("images/digits", ["seed=0,1,2"], ["isoscale", "sweep"]).write(Path("runs/digits-sweep-7"))
    run = tmp_path / "runs/digits-sweep-7/seed=1"
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "done", "step": 4, "num_steps": 4}))
    (run / "metrics.jsonl").write_text('{"step": 4, "epoch": 0, "name": "val/accuracy", "value": 0.75, "time": 0}\n')
    return run.parent.relative_to(tmp_path)


def test_a_sweep_is_one_line_among_runs_and_a_table_of_its_own(isoscale, prepared: Path, copied):
    copied("runs/digits-1")
    rows = [re.split(" {2,}", line) for line in isoscale("runs", "list").out.splitlines()]
    assert ["digits-sweep-7", "1 of 3 done"] in [row[:2] for row in rows] and len(rows) == 3
    assert "accuracy 0.7500" in isoscale("runs", "list").out
    lines = isoscale("runs", "list", "digits-sweep-7").out.splitlines()
    assert lines[0].split() == ["seed", "status", "step", "accuracy", "run"]
    assert lines[1].split() == ["1", "done", "4/4", "0.7500", "seed=1"]
    assert [line.split() for line in lines[2:]] == [["0", "waiting", "seed=0"], ["2", "waiting", "seed=2"]]


def test_for_programs_points_have_what_runs_have_and_their_values(isoscale, prepared: Path, copied):
    copied("runs/digits-1")
    runs = json.loads(isoscale("runs", "list", "--json").out)
    assert runs[0].keys() == runs[1].keys() and {run["name"] for run in runs} == {"digits"}
    points = json.loads(isoscale("runs", "list", str(prepared), "--json").out)
    assert [point["values"] for point in points] == [{"seed": 1}, {"seed": 0}, {"seed": 2}]
    assert points[0]["best"] == {"name": "val/accuracy", "value": 0.75} and points[0]["status"] == "done"
    assert all(runs[0].keys() <= point.keys() for point in points)


def test_one_damaged_sweep_does_not_hide_the_others(isoscale, prepared: Path, tmp_path: Path):
    (tmp_path / "runs/bad").mkdir()
    (tmp_path / "runs/bad/sweep.json").write_text("{")
    rows = {line.split()[0]: line.split()[1] for line in isoscale("runs", "list").out.splitlines()}
    assert rows == {"run": "status", "bad": "damaged", "digits-sweep-7": "1"}
    refused = isoscale("runs", "list", "runs/bad")
    assert refused.code == 2 and "sweep.json is damaged" in refused.err


def test_a_sweep_is_no_run_and_says_so(isoscale, prepared: Path):
    refused = isoscale("status", "digits-sweep-7")
    assert refused.code == 2 and "is a sweep of many runs: `isoscale runs list" in refused.err


def test_a_dry_run_shows_points_or_the_script_and_writes_nothing(isoscale, tmp_path: Path):
    shown = isoscale("sweep", "images/digits", "optimizer.lr=1e-3,3e-4", "seed=0,1", "--dry-run")
    assert shown.out.splitlines()[1].split() == ["0.001", "0", "lr=0.001,seed=0"] and len(shown.out.splitlines()) == 5
    words = ("--slurm", "--dry-run", "--at-once", "2", "--time", "10", "--tasks-per-node", "2", "--run", "my sweep",
             "--module", "cuda/12", "--directive=--exclusive", "--env", "A=b")  # fmt: skip
    script = isoscale("sweep", "images/digits", "optimizer.lr=1e-3,3e-4", "seed=0,1", *words).out
    assert "#SBATCH --array=0-3%2\n" in script and '#SBATCH --output="my sweep/slurm/%A_%a.out"\n' in script
    assert "#SBATCH --ntasks-per-node=2\n" in script and script.count("srun") == 1
    assert "module load cuda/12\n" in script and "#SBATCH --exclusive\n" in script and "export A=b\n" in script
    assert "sweep='my sweep'\n" in script and 'train --run "$sweep/$point"\n' in script
    assert warm.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [(("images/digits",), "optimizer.lr=1e-3,3e-4 behind the recipe"), (("seed=0,1", "--failed"), "with --run DIR"),
     (("seed=0,1", "--nodes", "2"), "--nodes is for a job; add --job"),
     (("seed=0,1", "--slurm", "--workers", "2"), "--workers is for points on this machine"),
     (("seed=0,1", "--at-once", "2"), "--at-once is for a job"), (("seed=0,1", "--run", "full"), "holds no sweep"),
     (("seed=0,-1",), "(in the point seed=-1)"), (("seed=0,1", "--run", "one"), "holds a single run")],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(isoscale, copied, tmp_path: Path, words: tuple[str, ...], said: str):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    copied("one")
    refused = isoscale("sweep", *words)
    assert refused.code == 2 and said in refused.err and "Traceback" not in refused.err
    assert not (tmp_path / "runs").exists()


def test_submit_says_that_it_does_not_sweep(isoscale, tmp_path: Path):
    (tmp_path / "a.yaml").write_text("extends: images/digits\nsweep: {seed: [0, 1]}\n")
    shown = isoscale("submit", "a.yaml", "--dry-run")
    assert "the recipe has a sweep; this trains its own values alone" in shown.err and "#SBATCH" in shown.out


@pytest.mark.slow
def test_points_are_trained_side_by_side_and_end_as_single_trainings(tmp_path: Path):
    done = cli("sweep", "images/digits", "seed=0,1", "train.epochs=2", *FIXED, "--workers", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"digits-sweep-\d{8}-\d{6}", sweep.name)
    assert statuses(sweep) == {"seed=0": "done", "seed=1": "done"}
    for seed in (0, 1):
        alone = train(tmp_path / f"alone{seed}", seed=seed, train__epochs=2, train__threads=1)
        assert sha(sweep / f"seed={seed}") == sha(alone)
    lines = done.stdout.splitlines()
    assert re.search(r"^seed=1: done, step 46/46, val/accuracy 0\.\d+$", done.stdout, re.MULTILINE)
    assert lines[-2] == "2 of 2 done"
    assert re.fullmatch(rf"best: val/accuracy 0\.\d+ in runs/{sweep.name}/seed=[01]", lines[-1])
    again = cli("sweep", "--run", str(sweep), cwd=tmp_path)
    assert again.returncode == 0 and "running" not in again.stdout and "2 of 2 done" in again.stdout


@pytest.mark.slow
def test_a_failed_point_does_not_stop_the_others_and_is_trained_again_alone(tmp_path: Path):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    (tmp_path / "fragile.yaml").write_text(
        "extends: images/digits\ntask: {class: fragile.Fragile, model: {class: mlp, widths: [64, 10]}}\n"
        "train: {epochs: 1, threads: 1}\nobserve: {tensorboard: 0}\nsweep: {task.label_smoothing: [0.1, 0.2]}\n"
    )
    done = cli("sweep", "fragile.yaml", "--run", "a", cwd=tmp_path)
    assert done.returncode == 1
    assert statuses(tmp_path / "a") == {"label_smoothing=0.1": "failed", "label_smoothing=0.2": "done"}
    assert "label_smoothing=0.1 failed: RuntimeError: not today" in done.stderr
    assert "once that is repaired: isoscale sweep --run a --failed" in done.stderr
    assert "fragile.py" in (tmp_path / "a/logs/label_smoothing=0.1.txt").read_text()
    (tmp_path / "repaired").touch()
    again = cli("sweep", "--run", "a", "--failed", cwd=tmp_path)
    assert again.returncode == 0 and "label_smoothing=0.2: " not in again.stdout, again.stdout + again.stderr
    assert statuses(tmp_path / "a") == {"label_smoothing=0.1": "done", "label_smoothing=0.2": "done"}


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A sweep with two trainings that are on their way."""
    process = warm.Popen(
        command("sweep", "images/digits", "seed=0,1,2", *FIXED, "--workers", "2", "--run", "a", *words), cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    assert process.stdout is not None
    told = 0
    while told < 2:
        told += ": running" in process.stdout.readline()
        assert process.poll() is None
    return process


@pytest.mark.slow
@pytest.mark.nightly  # most of a minute; on Slurm, the same is looked at every time
def test_a_stop_saves_all_points_and_the_sweep_goes_on_to_the_same_weights(tmp_path: Path):
    process = start(tmp_path, "train.epochs=40")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "stopped; go on: isoscale sweep --run a" in out
    assert statuses(tmp_path / "a") == {"seed=0": "stopped", "seed=1": "stopped", "seed=2": "submitted"}
    done = cli("sweep", "--run", "a", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(statuses(tmp_path / "a").values()) == {"done"}
    alone = train(tmp_path / "alone", seed=1, train__epochs=40, train__threads=1)
    assert sha(tmp_path / "a/seed=1") == sha(alone)


@pytest.mark.slow
def test_a_sweep_that_is_killed_leaves_no_training_behind(tmp_path: Path):
    process = start(tmp_path, "train.epochs=1000000")
    trainings = children(process.pid)
    assert len(trainings) == 2
    process.kill()
    process.communicate()
    wait_until_gone(trainings)
    assert statuses(tmp_path / "a") == {"seed=0": "stopped", "seed=1": "stopped", "seed=2": "submitted"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code", first_of([(signal.SIGKILL, 1), (signal.SIGTERM, START_AGAIN)], (signal.SIGKILL, 1))
)
def test_a_sweep_of_which_one_training_is_ended_does_not_end_well(tmp_path: Path, number: int, code: int):
    process = start(tmp_path, "train.epochs=20")
    os.kill(children(process.pid)[0], number)
    out, err = process.communicate()
    assert process.returncode == code, out + err
    assert cli("sweep", "--run", "a", cwd=tmp_path).returncode == 0
    assert set(statuses(tmp_path / "a").values()) == {"done"}


@pytest.mark.slow
def test_a_point_that_is_killed_before_it_trains_has_failed(tmp_path: Path):
    words = ("sweep", "images/digits", "seed=0,1", "train.epochs=1", "data.subset=100", *FIXED, "--run", "a")
    with warm.Popen(command(*words), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (trainings := children(process.pid)):
            assert process.poll() is None
        os.kill(trainings[0], signal.SIGKILL)
    assert process.returncode == 1
    assert sorted(statuses(tmp_path / "a").values()) == ["done", "failed"]


@pytest.mark.slow
def test_a_sweep_whose_directory_was_only_half_made_is_made_again(tmp_path: Path):
    words = ("sweep", "images/digits", "seed=0,1", "train.epochs=1", "data.subset=100", *FIXED, "--run", "a")
    for name in ("seed=0", "seed=1"):
        (tmp_path / "a" / name).mkdir(parents=True)
    (tmp_path / "a/recipe.yaml").write_text("seed: 0\n")
    (tmp_path / "a/seed=0/recipe.yaml").write_text("seed: 0\n")
    (tmp_path / "a/seed=1/.run.json-17").touch()
    done = cli(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert statuses(tmp_path / "a") == {"seed=0": "done", "seed=1": "done"}
    (tmp_path / "a/sweep.json").unlink()
    assert "holds no sweep" in cli(*words, cwd=tmp_path).stderr, "there is work in it"


@pytest.mark.slow
def test_on_a_terminal_every_point_has_a_line_that_moves(tmp_path: Path):
    def stop(process: int, text: str) -> bool:
        if len(set(re.findall(r"running[^\n]*?(\d+)/115000", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)))) < 3:
            return False
        os.kill(process, signal.SIGINT)
        return True

    words = ("sweep", "images/digits", "seed=0,1", "train.epochs=5000", *FIXED, "--run", "a")
    text = on_a_terminal(tmp_path, 80, words, stop)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"1 +waiting", plain) and "0 of 2 done, 1 running" in plain
    assert "SIGINT: the trainings save and end" in plain and "go on: isoscale sweep --run a" in plain
    end = time.monotonic() + 30
    while statuses(tmp_path / "a")["seed=0"] == "running":
        assert time.monotonic() < end
        time.sleep(0.1)
    assert statuses(tmp_path / "a")["seed=0"] == "stopped"


@pytest.mark.slow
def test_a_longer_sweep_trains_done_points_on_with_several_ranks_each(tmp_path: Path):
    words = ("train.epochs=1", "parallel.reduce=tree", *FIXED, "--run", "a")
    assert cli("sweep", "images/digits", "sweep.seed=[1]", *words, cwd=tmp_path).returncode == 0
    done = cli("sweep", "--run", "a", "train.epochs=2", "--devices", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "seed=1: done, step 46/46" in done.stdout
    record = json.loads((tmp_path / "a/seed=1/run.json").read_text())
    assert [attempt["ranks"] for attempt in record["stretches"]] == [1, 2]
