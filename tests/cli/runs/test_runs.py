import json
import math
from pathlib import Path

import pytest

from isoscale.cli.output import print_json


def edit(run: Path, **values) -> None:
    record = run / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **values}))


def test_the_list_is_sorted_by_time_and_fits_on_a_terminal(isoscale, copied):
    edit(copied("runs/images-digits-20260301-120000"), started="2026-03-01T12:00:00+0000")
    edit(copied("runs/digits-20260101-120000"), started="2026-01-01T12:00:00+0000", status="stopped", num_steps=69000)
    lines = isoscale("runs", "list").out.splitlines()
    assert lines[0].split() == ["run", "status", "step", "best", "started"]
    assert lines[1].startswith("digits-20260101-120000 ") and lines[1].endswith("2026-01-01 12:00")
    assert lines[2].startswith("images-digits-20260301-120000  done     46/46     accuracy 0.")
    assert max(map(len, lines)) <= 90 and len(lines[1]) <= 90


def test_in_another_folder_runs_are_named_as_other_commands_take_them(isoscale, copied):
    copied("elsewhere/a")
    assert isoscale("runs", "list", "elsewhere").out.splitlines()[1].startswith("elsewhere/a ")


def test_an_empty_list_says_how_to_start(isoscale):
    assert isoscale("runs", "list").out == "no runs in runs; start one with `isoscale train`\n"
    assert isoscale("runs", "list", "--json").out == "[]\n"


def test_one_damaged_run_does_not_hide_the_others(isoscale, copied):
    copied("runs/good")
    (copied("runs/bad") / "metrics.jsonl").write_text("{\n{\n")
    rows = {line.split()[0]: line.split()[1] for line in isoscale("runs", "list").out.splitlines()}
    assert rows == {"run": "status", "bad": "damaged", "good": "done"}
    listed = json.loads(isoscale("runs", "list", "--json").out)
    assert listed[0].keys() == listed[1].keys()


def test_show_prints_for_scripts_what_they_rely_on(isoscale, copied):
    run = copied()
    shown = json.loads(isoscale("runs", "show", str(run), "--json").out)
    manifest = json.loads((run / "checkpoints/last/manifest.json").read_text())
    assert (shown["status"], shown["epoch"], shown["step"], shown["num_steps"]) == ("done", 2, 46, 46)
    assert shown["weights_sha256"] == manifest["weights_sha256"]
    assert shown["best"] == {"name": "val/accuracy", "value": shown["metrics"]["val/accuracy"], "step": 46}
    assert {"train/loss", "train/loss_epoch", "val/loss", "lr"} <= shown["metrics"].keys()
    assert json.loads(isoscale("runs", "list", "--json").out) == [shown]


def test_show_prints_for_people_where_the_run_stands(isoscale, copied):
    lines = isoscale("runs", "show", str(copied())).out.splitlines()
    assert lines[0] == "runs/digits-1"
    assert "  status        done, epoch 2, step 46 of 46" in lines
    assert any(line.startswith("  best          val/accuracy 0.") and line.endswith("at step 46") for line in lines)
    assert "last metrics:" in lines


def test_numbers_that_json_does_not_know_are_written_as_words(capsys: pytest.CaptureFixture[str]):
    print_json({"a": [math.nan, 1.5], "b": -math.inf})
    assert json.loads(capsys.readouterr().out) == {"a": ["nan", 1.5], "b": "-inf"}
