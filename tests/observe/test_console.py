"""What a person or a program reads on standard output."""

import io
import json
import math
import os
import pty
import re
import select
import sys
import time

import pytest

from isoscale.observe import console as console_module
from isoscale.observe.console import Console
from isoscale.observe.events import Ended, EpochEnded, Event, Logged, Note, Started
from tests import warm

STARTED = Started("images/digits", "runs/a", [("device", "cpu")], step=0, num_steps=690, steps_per_epoch=23)
LOGGED = Logged(10, 0, {"train/loss": 0.51234, "time/samples_per_second": 12340.0})
EPOCH = EpochEnded(23, 0, {"train/loss_epoch": 0.5, "val/loss": 0.4}, seconds=0.4, best=True)
ENDED = Ended("done", 690, [("best", "val/loss 0.1")], [("test it", "isoscale test runs/a")])
EVENTS: list[Event] = [STARTED, LOGGED, EPOCH, Note("careful", "warning"), Note("chatter", "debug"), ENDED]

ON_A_TERMINAL = """
import sys, time
from isoscale.observe.console import Console
from isoscale.observe.events import *

console = Console()
console.notify(Started("images/digits", "runs/a", [("device", "cpu")], 0, 690, 23))
for step in (10, 20):
    time.sleep(0.1)
    console.notify(Logged(step, 0, {"train/loss": 0.51234, "time/samples_per_second": 12340.0}))
time.sleep(0.6)
print("printed by the user")
console.notify(EpochEnded(23, 0, {"train/loss_epoch": 0.5, "val/loss": 0.4}, 0.4, True))
console.notify(Note("careful", "warning"))
console.notify(Ended("done", 690, [("best", "val/loss 0.1")], [("test it", "isoscale test runs/" + "a" * 150)]))
console.close()
"""


def printed(events: list[Event], **settings: str) -> str:
    """What the console prints into something that is not a terminal."""
    stream = io.StringIO()
    console = Console(stream=stream, **settings)  # type: ignore[arg-type]
    for event in events:
        console.notify(event)
    console.close()
    return stream.getvalue()


def printed_on_a_terminal(**environment: str) -> str:
    """Everything that a program with the console writes to a pseudo-terminal of 100 columns."""
    main, terminal = pty.openpty()
    settings = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", **environment}
    process = warm.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], stdout=terminal, stderr=terminal, env={**os.environ, **settings}
    )
    os.close(terminal)
    output = b""
    while select.select([main], [], [], 30)[0]:
        try:
            chunk = os.read(main, 65536)
        except OSError:
            break
        if not chunk:
            break
        output += chunk
    os.close(main)
    assert process.wait(timeout=30) == 0, output.decode()
    return output.decode()


def test_a_pipe_gets_plain_lines() -> None:
    assert printed(EVENTS) == (
        "images/digits\n"
        "  run           runs/a\n"
        "  device        cpu\n"
        "\n"
        "epoch  1/30  step  23  train loss 0.5000  | val loss 0.4000  *  0.4 s\n"
        "warning: careful\n"
        "\n"
        "done at step 690, in runs/a\n"
        "  best          val/loss 0.1\n"
        "\n"
        "next:\n"
        "  test it       isoscale test runs/a\n"
    )


def test_a_pipe_gets_a_progress_line_when_nothing_was_said_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(stream=stream)
    console.notify(STARTED)
    for step in range(1, 691):
        now[0] += 0.125
        console.notify(Logged(step, step // 23, {"train/loss": 0.5}))
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("epoch")]
    assert len(lines) == 8
    assert lines[0] == "epoch  4/30  step  80/690  loss 0.5000  8 steps/s  1:16 left"


def test_a_continued_run_says_so() -> None:
    assert "images/digits, continued at step 230 of 690" in printed(
        [Started("images/digits", "runs/a", [], 230, 690, 23)]
    )


def test_the_level_warning_leaves_warnings_and_one_line_at_the_end() -> None:
    assert printed(EVENTS, level="warning") == "warning: careful\ndone at step 690, in runs/a\n"


def test_the_level_error_leaves_out_warnings() -> None:
    assert printed(EVENTS, level="error") == "done at step 690, in runs/a\n"


def test_the_level_debug_says_everything() -> None:
    assert "debug: chatter" in printed(EVENTS, level="debug")


def test_json_is_one_object_for_every_event() -> None:
    rows = [json.loads(line) for line in printed(EVENTS, level="debug", format="json").splitlines()]
    assert [row["event"] for row in rows] == ["started", "logged", "epoch_ended", "note", "note", "ended"]
    assert rows[1]["values"] == LOGGED.values and rows[1]["step"] == 10
    assert rows[2]["best"] is True
    assert rows[5]["status"] == "done"


def test_json_stays_json_when_the_loss_is_not_a_number() -> None:
    text = printed([Logged(1, 0, {"train/loss": math.nan})], format="json")
    assert json.loads(text, parse_constant=pytest.fail)["values"] == {"train/loss": "nan"}


def test_json_honours_the_level() -> None:
    rows = [json.loads(line) for line in printed(EVENTS, level="warning", format="json").splitlines()]
    assert [row["event"] for row in rows] == ["note", "ended"]


def test_a_letter_that_the_encoding_lacks_does_not_stop_the_console() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(stream=stream).notify(Note("1 → 2"))
    assert stream.buffer.getvalue() == b"1 ? 2\n"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_terminal_gets_a_bar_with_loss_rate_and_time_left() -> None:
    output = printed_on_a_terminal()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert re.search(r"epoch  1/30 ━.*  20/690 +loss 0.5123  12,340 samples/s  \d+:\d\d left", text)
    assert re.search(r"[\r\n]printed by the user", text), "what others print belongs above the bar"
    assert "epoch  1/30  step  23  train loss 0.5000  | val loss 0.4000  *  0.4 s" in text
    assert "warning: careful" in text
    assert f"isoscale test runs/{'a' * 150}" in text, "a command must stay on one line to be copied"
    assert output.rstrip().endswith("a" * 10) and "\x1b[?25h" in output, "the cursor must come back"


def test_a_terminal_is_redrawn_at_most_five_times_a_second() -> None:
    assert printed_on_a_terminal().count("samples/s") <= 8


@pytest.mark.slow
def test_no_color_is_respected() -> None:
    assert re.search(r"\x1b\[[0-9;]*3[0-9]", printed_on_a_terminal())
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", printed_on_a_terminal(NO_COLOR="1"))


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines() -> None:
    assert "\x1b" not in printed_on_a_terminal(TERM="dumb")


@pytest.mark.parametrize("format", ["text", "json"])
def test_a_log_event_costs_little(format: str) -> None:
    console = Console(stream=io.StringIO(), format=format)  # type: ignore[arg-type]
    console.notify(STARTED)
    durations = []
    for _ in range(500):
        start = time.perf_counter()
        console.notify(LOGGED)
        durations.append(time.perf_counter() - start)
    assert sorted(durations)[250] < 50e-6
