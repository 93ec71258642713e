"""log.txt: every event leaves a line with the time."""

import re
from pathlib import Path

from isoscale.observe.events import Ended, EpochEnded, Logged, Note, Started
from isoscale.observe.text_log import TextLog

STARTED = Started("images/digits", "runs/a", [("device", "cpu")], step=0, num_steps=690, steps_per_epoch=23)


def test_every_event_is_written_with_the_time(tmp_path: Path) -> None:
    log = TextLog(tmp_path / "log.txt")
    log.notify(STARTED)
    log.notify(Logged(10, 0, {"train/loss": 0.51234, "lr": 0.001}))
    log.notify(EpochEnded(23, 0, {"val/loss": 0.4}, seconds=0.4, best=True))
    log.notify(Note("slow disk", "warning"))
    log.notify(Ended("done", 690, [("best", "0.4")], [("test it", "isoscale test runs/a")]))
    log.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line) for line in lines)
    text = "\n".join(lines)
    for words in [
        "images/digits",
        "device        cpu",
        "step 10  epoch 1  train/loss 0.5123  lr 0.001",
        "epoch  1/30  step  23  val loss 0.4000  *  0.4 s",
        "warning: slow disk",
        "done at step 690, in runs/a",
        "isoscale test runs/a",
    ]:
        assert words in text


def test_a_continued_run_appends(tmp_path: Path) -> None:
    for text in ("first", "second"):
        log = TextLog(tmp_path / "log.txt")
        log.notify(Note(text))
        log.close()
    assert [line.split("  ")[1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["first", "second"]


def test_words_that_utf8_cannot_hold_do_not_stop_the_log(tmp_path: Path) -> None:
    log = TextLog(tmp_path / "log.txt")
    log.notify(Note("a file named \udcff"))
    log.close()
    assert r"a file named \xff" in (tmp_path / "log.txt").read_text()
