"""Texts of someone else are shown by the terminal, never obeyed: names, messages, metrics, logs, errors."""

import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from isoscale.observe.console import Console
from isoscale.observe.events import Ended, EpochEnded, Layer, Logged, Note, Said, Started
from isoscale.observe.text_log import TextLog
from isoscale.study.report.page import templates
from isoscale.system import printing
from tests.helpers import cli, first_of, train

EVIL = "x\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202ey\x08"
SHOWN = r"x\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202ey\x08"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def obeyed(text: str) -> list[str]:
    return OBEYED.findall(text)


def test_what_a_terminal_would_obey_is_written_out() -> None:
    assert printing.visible(EVIL) == SHOWN
    assert printing.visible("Größe\t×\n–") == "Größe\t×\n–"
    assert printing.visible(os.fsdecode(b"\xff\xc3\xa4")) == r"\xffä"
    assert printing.one_line("two\nlines") == r"two\nlines"


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, one of which says evil things wherever a run can say something."""
    folder = tmp_path_factory.mktemp("foreign")
    train(folder / "runs/good", train__epochs=1)
    shutil.copytree(folder / "runs/good", folder / "runs" / EVIL)
    run = folder / "runs" / EVIL
    record = json.loads((run / "run.json").read_text())
    for key in ("name", "status", "message", "host", "platform", "device", "started"):
        record[key] = EVIL
    record["best"]["name"] = EVIL
    record["packages"] = {EVIL: EVIL}
    record["code"] = {"folder": EVIL, "commit": EVIL, "diff": f"diff --git a/{EVIL} b/{EVIL}\n+{EVIL}"}
    (run / "run.json").write_text(json.dumps(record))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 24, "epoch": 0, "name": f"val/{EVIL}", "value": 1.0, "time": 1.0}) + "\n")
    with (run / "log.txt").open("a") as file:
        file.write(EVIL + "\n")
    (folder / "evil.yaml").write_text(f"extends: images/digits\n{json.dumps(EVIL)}: 1\n")
    return folder


COMMANDS = [
    ["runs", "list"],
    ["runs", "list", "--json"],
    ["runs", "show", f"runs/{EVIL}"],
    ["runs", "show", f"runs/{EVIL}", "--json"],
    ["compare", "runs/good", f"runs/{EVIL}"],
    ["compare", "runs/good", f"runs/{EVIL}", "--json"],
    ["status", f"runs/{EVIL}"],
    ["logs", f"runs/{EVIL}"],
    ["report", f"runs/{EVIL}", "--no-figures"],
    ["test", f"runs/{EVIL}"],
    ["predict", f"runs/{EVIL}"],
    ["reproduce", f"runs/{EVIL}"],
    ["train", "--run", f"runs/{EVIL}", "train.epochs=2"],
    ["train", "evil.yaml"],
    ["recipe", "check", "evil.yaml"],
    ["recipe", "show", f"runs/{EVIL}/recipe.yaml"],
    ["recipe", "check", EVIL],
    ["data", "info", f"runs/{EVIL}/metrics.jsonl"],
    ["train", "images/digits", f"{EVIL}=1"],
    ["train", "images/digits", f"task.model.class={EVIL}"],
]
FIRST = [["runs", "list"], ["runs", "show", f"runs/{EVIL}"], ["report", f"runs/{EVIL}", "--no-figures"]]


@pytest.mark.parametrize("words", first_of(COMMANDS, *FIRST), ids=lambda words: " ".join(words).replace(EVIL, "EVIL"))
def test_no_command_hands_orders_of_a_run_to_the_terminal(words: list[str], foreign: Path) -> None:
    said = cli(*words, cwd=foreign)
    assert said.stdout + said.stderr
    assert not obeyed(said.stdout + said.stderr)
    assert "Traceback" not in said.stderr
    if "--json" in words:
        json.loads(said.stdout)


def test_what_happens_in_a_training_is_written_out_in_every_display(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    events = [
        Started(EVIL, EVIL, [(EVIL, EVIL)], 0, 10, 10, {EVIL: EVIL}, (Layer(EVIL, EVIL, 0, 1, 1, 1),), (EVIL,)),
        Logged(1, 0, {f"train/{EVIL}": 1.0}),
        EpochEnded(2, 0, {f"val/{EVIL}": 1.0}, 1.0),
        Note(EVIL, "warning"),
        Said(EVIL, "info", 1, "print"),
        Ended("done", 10, [(EVIL, EVIL)], [(EVIL, EVIL)], {EVIL: 1.0}),
    ]
    plain, terminal, machine = io.StringIO(), Terminal(), io.StringIO()
    log = TextLog(tmp_path / "log.txt")
    observers = [Console(stream=plain), Console(stream=terminal), Console(format="json", stream=machine), log]
    for event in events:
        for observer in observers:
            observer.notify(event)
    for observer in observers:
        observer.close()
    assert SHOWN in plain.getvalue() and SHOWN in (tmp_path / "log.txt").read_text()
    assert not obeyed(plain.getvalue() + machine.getvalue() + (tmp_path / "log.txt").read_text())
    assert all(json.loads(line) for line in machine.getvalue().splitlines())
    assert not re.search("\x1b]0|\x07|\x9b|\u202e", terminal.getvalue())


def test_a_page_holds_no_orders_and_no_markup_of_a_run() -> None:
    cell = templates().from_string('<td title="{{ title }}">{{ text }}</td>')
    page = cell.render(text=f"<script>{EVIL}", title=f'">{EVIL}')
    assert page == f'<td title="&#34;&gt;{SHOWN}">&lt;script&gt;{SHOWN}</td>'
