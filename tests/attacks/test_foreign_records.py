"""Runs whose files hold anything at all: each is told to be damaged, and hides none of the others."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from isoscale.errors import UserError
from isoscale.runs.run import Run
from isoscale.study.compare import compare
from isoscale.study.report import write_report
from isoscale.study.table import text
from tests.helpers import cli, first_of, train

ODD: list[Any] = ["x", 3, [[]], {"x": []}]
KEYS = [
    "name", "status", "message", "started", "step", "epoch", "num_steps", "seconds", "best", "decided", "packages",
    "data", "code", "command", "layers", "profile", "host", "hosts", "job", "peak_memory", "device", "seed", "given",
]  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run that is as it should be."""
    folder = tmp_path_factory.mktemp("records")
    train(folder / "runs/good", train__epochs=1)
    return folder


def spoilt(folder: Path, name: str) -> Path:
    without = shutil.ignore_patterns("checkpoints", "log.txt")
    return Path(shutil.copytree(folder / "runs/good", folder / "runs" / name, ignore=without))


def spoil(folder: Path) -> int:
    """A run for each odd value of each key, and for each odd file; how many."""
    record = json.loads((folder / "runs/good/run.json").read_text())
    for key in KEYS:
        for number, value in enumerate(ODD):
            run = spoilt(folder, f"{key}-{number}")
            (run / "run.json").write_text(json.dumps({**record, key: value}))
    texts = ["", "[]", "null", "[" * 5000, '"x"', "\0", '{"step": NaN}', '{"best": {"name": [], "value": "x"}}']
    for number, words in enumerate(texts):
        (spoilt(folder, f"record-{number}") / "run.json").write_text(words)
        (spoilt(folder, f"metrics-{number}") / "metrics.jsonl").write_text(f"{words}\n{words}\n")
        (spoilt(folder, f"recipe-{number}") / "recipe.yaml").write_text(words)
    (spoilt(folder, "bytes") / "run.json").write_bytes(b"\xff\xfe")
    unreadable = spoilt(folder, "folder") / "metrics.jsonl"
    unreadable.unlink()
    unreadable.mkdir()
    shutil.copy(spoilt(folder, "both") / "run.json", folder / "runs/both/sweep.json")
    return len(list((folder / "runs").iterdir()))


@pytest.mark.slow
def test_no_damaged_run_hides_the_others_in_the_list(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good / "runs", tmp_path / "runs")
    total = spoil(tmp_path)
    listed = cli("runs", "list", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert len(listed.stdout.splitlines()) == total + 1
    assert any(line.startswith("good ") and " done " in line for line in listed.stdout.splitlines())
    assert len(json.loads(cli("runs", "list", "--json", cwd=tmp_path).stdout)) == total


@pytest.mark.full
def test_every_damaged_run_is_shown_compared_and_reported_or_refused_in_words(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good / "runs", tmp_path / "runs")
    spoil(tmp_path)
    for run in sorted((tmp_path / "runs").iterdir()):
        with suppress(UserError):
            Run.find(str(run)).summary()
        with suppress(UserError):
            write_report(run, tmp_path / "report.html", None)
        with suppress(UserError):
            text(compare([str(tmp_path / "runs/good"), str(run)], None, ()))
    assert "good" in text(compare([str(tmp_path / "runs")], None, ()))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    first_of(
        [("best", 3, "best is '3', expected a mapping"), ("step", "x", "step is 'x', expected a number")],
        ("best", 3, "best is '3', expected a mapping"),
    ),
)
def test_the_entry_that_is_wrong_is_named(name: str, value: Any, words: str, good: Path) -> None:
    run = spoilt(good, f"wrong-{name}")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, name: value}))
    said = cli("runs", "show", str(run), cwd=good)
    assert said.returncode == 2 and words in said.stderr
