"""A run.json that a power cut has spoilt: what it said is taken from the checkpoints, and every command works."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from isoscale import Run
from isoscale.runs.directory import RunDirectory
from tests.helpers import sha, timeless, train

SPOILT: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_text(""),
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "missing": Path.unlink,
    "another value": lambda path: path.write_text("[]"),
}
WORDS = {"empty": "is empty", "missing": "is missing", "another value": "holds a list"}


@pytest.mark.slow
@pytest.mark.parametrize("how", SPOILT)
def test_every_command_works_and_says_so(isoscale, copied, how: str):
    run = copied("runs/a")
    before = json.loads((run / "run.json").read_text())
    SPOILT[how](run / "run.json")
    words = f"runs/a/run.json {WORDS.get(how, 'is damaged (')}"
    assert isoscale("runs", "list").out.splitlines()[1].split()[:3] == ["a", "done", "46/46"]
    shown = json.loads(isoscale("runs", "show", "a", "--json").out)
    assert words in shown["message"] and "is taken from the checkpoint step_00000046" in shown["message"]
    assert [shown[key] for key in ("step", "epoch", "best", "name", "started", "num_steps")] == [
        before[key] for key in ("step", "epoch", "best", "name", "started", "num_steps")
    ]
    for command in (("test", "runs/a"), ("report", "runs/a"), ("runs", "show", "a")):
        done = isoscale(*command)
        assert done.code == 0, (command, done)
    assert words in isoscale("test", "runs/a").err
    assert "--run runs/a" in isoscale("submit", "--run", "runs/a", "--dry-run").out
    again = isoscale("train", "--run", "runs/a", "--log-level", "info")
    assert again.code == 0 and words in again.out and "this run is complete" in again.out
    after = json.loads((run / "run.json").read_text())
    assert after.keys() == before.keys()
    changed = {key for key in before if before[key] != after[key]}
    assert changed <= {"seconds", "peak_memory", "stretches", "starts"}
    assert (run / "run.json.damaged").exists() == (how not in ("empty", "missing"))


def test_a_run_that_was_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole, killed = whole_and_killed(tmp_path)
    (killed / "run.json").write_text("")
    assert Run(killed).status == "killed" and "go on from its last checkpoint" in str(Run(killed).message)
    again = train(killed, **KEYS)
    assert again.status == "done" and again.record["decided"] == whole.record["decided"]
    assert sha(again) == sha(whole) and timeless(again) == timeless(whole)


def test_checkpoints_of_before_have_no_record_and_the_run_goes_on_all_the_same(
    isoscale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "_record_text", lambda directory: "")
        whole, killed = whole_and_killed(tmp_path)
    (killed / "run.json").unlink()
    for command in (("runs", "show"), ("test",), ("report",)):
        done = isoscale(*command, "killed")
        assert done.code == 0, (command, done)
    assert isoscale("train", "--run", "killed").code == 0
    assert sha(killed) == sha(whole) and timeless(killed) == timeless(whole)
    assert Run(killed).record["isoscale"] == whole.record["isoscale"]


def test_without_any_checkpoint_the_run_begins_anew(isoscale, copied) -> None:
    run = copied("a")
    before = sha(run)
    for path in run.iterdir():
        if path.name not in ("recipe.yaml", "run.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (run / "run.json").write_text("")
    assert isoscale("runs", "show", "a").code == 0
    again = isoscale("train", "--run", "a", "--log-level", "info")
    assert again.code == 0 and "is taken from the recipe alone" in again.out
    assert sha(run) == before


KEYS = {"train__epochs": 2, "observe__every": 5}


def whole_and_killed(folder: Path) -> tuple[Run, Path]:
    """A run, and as it was before its last checkpoint."""
    whole = train(folder / "whole", **KEYS)
    shutil.copytree(whole.path, folder / "killed", symlinks=True)
    shutil.rmtree((folder / "killed/checkpoints/last").resolve())
    assert RunDirectory(folder / "killed").checkpoints().newest() is not None  # moves the pointers
    return whole, folder / "killed"
