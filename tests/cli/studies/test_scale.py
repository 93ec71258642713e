import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import warm
from tests.helpers import command

QUICK = ("--steps", "20", "--repeats", "1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["images/digits"], "--ranks 1,2,4"),
        (["images/digits", "--ranks", "1,zwei"], "write numbers of ranks with commas"),
        (["images/digits", "--ranks", "0"], "write numbers of ranks with commas"),
        (["images/digits", "--ranks", "1,3", "parallel.reduce=tree"], "use 2 or 4"),
        (["images/digits", "--ranks", "100"], "does not reach 100 ranks"),
        (["images/digits", "--ranks", "1", "--nodes", "2"], "--nodes is for a job: add --job"),
        (["images/digits", "--ranks", "1", "--dry-run"], "--dry-run is for a job: add --job"),
        (["images/digits", "--ranks", "1", "--slurm", "-n", "4"], "--ranks says how many GPUs"),
        (["images/digits", "--ranks", "4", "--slurm", "--nodes", "1", "--tasks-per-node", "2"], "use --nodes 2"),
        (["--run", "nowhere"], "--ranks 1,2,4"),
        (["--run", "nowhere", "--measure", "1:1"], "there is no nowhere/scale.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    isoscale, tmp_path: Path, words: list[str], said: str
):
    refused = isoscale("scale", *words)
    assert refused.code == 2 and said in refused.err and not refused.out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_prints_the_script_and_writes_nothing(isoscale, tmp_path: Path):
    shown = isoscale("scale", "images/digits", "--ranks", "1,2", "--slurm", "--nodes", "2", "--dry-run")
    assert shown.code == 0 and "#SBATCH --nodes=2\n" in shown.out
    assert re.search(r"\n  srun --nodes=2 --ntasks=2 .*isoscale scale --run runs/digits-scale --measure 2:", shown.out)
    assert not list(tmp_path.iterdir())


def test_a_rank_among_others_cannot_start_a_study(isoscale, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    refused = isoscale("scale", "images/digits", "--ranks", "1,2")
    assert refused.code == 2 and "scale starts its ranks itself" in refused.err and not list(tmp_path.iterdir())


@pytest.mark.full
def test_one_and_two_ranks_are_measured_shown_again_and_completed(isoscale, tmp_path: Path):
    shown = isoscale("scale", "images/digits", "--ranks", "1,2", *QUICK, "--run", "study")
    assert shown.code == 0, shown.err
    heads, one, two = shown.out.partition("\n\n")[2].splitlines()[:3]
    assert re.split("  +", heads.strip()) == [
        "ranks", "batch", "s per 100 samples", "samples/s", "speed-up", "efficiency", "start-up s",
    ]  # fmt: skip
    assert one.split()[0] == "1" and two.split()[0] == "2" and one.split()[-3:-1] == ["1.00", "100%"]
    folder = tmp_path / "study"
    assert {path.name for path in folder.iterdir()} == {
        "recipe.yaml", "scale.json", "scale.md", "scale.csv", "scale.png",
    }  # fmt: skip
    assert not (tmp_path / "runs").exists()
    record = json.loads((folder / "scale.json").read_text())
    found = record["measurements"]
    assert [(each["repeat"], each["ranks"]) for each in found] == [(1, 1), (1, 2)]
    assert all(each["steps"] == 20 and each["samples"] == 20 * 64 for each in found)
    assert [len(each["seconds"]) for each in found] == [1, 2] and all(min(each["startup"]) > 0 for each in found)
    assert all(each["decided"]["threads"] == record["threads"] for each in found)

    (folder / "scale.json").write_text(json.dumps({**record, "measurements": found[:1]}))
    completed = isoscale("scale", "--run", "study", "--json")
    assert completed.code == 0 and completed.err.startswith("2 of 2: 2 ranks, 20 steps, ")
    values = json.loads(completed.out)
    assert values["complete"] and values["measurements"][:1] == found[:1] and len(values["rows"]) == 2
    again = isoscale("scale", "--run", "study")
    assert again.code == 0 and not again.err and "speed-up" in again.out
    refused = isoscale("scale", "--run", "study", "--repeats", "5")
    assert refused.code == 2 and "--repeats is for a new study" in refused.err


@pytest.mark.slow
def test_weak_gives_every_rank_the_batch_of_the_recipe(isoscale, tmp_path: Path):
    shown = isoscale(
        "scale", "images/digits", "--ranks", "2", "--weak", "--steps", "20", "--repeats", "1", "--run", "s"
    )
    assert shown.code == 0, shown.err
    [found] = json.loads((tmp_path / "s/scale.json").read_text())["measurements"]
    assert found["batch_size"] == 128 and found["samples"] == 20 * 128


@pytest.mark.slow
def test_a_training_that_cannot_start_leaves_nothing(tmp_path: Path):
    words = command("scale", "images/digits", "data.batch_size=5000", "--ranks", "1")
    done = warm.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "there are only 1438 training samples" in done.stderr
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_an_interrupted_study_keeps_what_it_has_and_goes_on(tmp_path: Path):
    words = command("scale", "images/digits", "--ranks", "1", "--steps", "20", "--repeats", "100", "--run", "s")
    study = warm.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert study.stderr is not None and study.stderr.readline().startswith("1 of 100: 1 rank, 20 steps")
    time.sleep(1)
    study.send_signal(signal.SIGINT)
    out, _ = study.communicate(timeout=60)
    assert study.returncode in (75, 130)
    assert "Not measured yet: 99 of 100" in out and "isoscale scale --run s" in out
    assert len(json.loads((tmp_path / "s/scale.json").read_text())["measurements"]) == 1
