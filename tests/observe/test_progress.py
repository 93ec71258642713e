"""Rate and time left, from the events alone; whoever waits at a terminal sees how far a look at data is."""

import io
import sys

import pytest

from isoscale.observe.events import EpochEnded, Logged, Started
from isoscale.observe.progress import Progress, Waiting

STARTED = Started("images/digits", "runs/a", [], step=0, num_steps=1000, steps_per_epoch=100)


def test_nothing_is_promised_before_the_first_log() -> None:
    assert Progress(STARTED, now=0.0).status(5.0) == ""


def test_the_first_step_alone_promises_nothing() -> None:
    progress = Progress(STARTED, now=0.0)
    progress.advance(Logged(1, 0, {"train/loss": 0.5}), now=20.0)
    assert progress.status(20.0) == "loss 0.5000"
    progress.advance(Logged(100, 0, {}), now=119.0)
    assert progress.seconds_left(119.0) == 900.0


def test_the_time_left_counts_down_between_events() -> None:
    progress = Progress(STARTED, now=0.0)
    progress.advance(Logged(100, 0, {"train/loss": 0.5}), now=10.0)
    assert progress.seconds_left(10.0) == 90.0
    assert progress.seconds_left(15.0) == 85.0
    assert progress.status(15.0) == "loss 0.5000  10 steps/s  1:25 left"


def test_a_slow_first_launch_does_not_spoil_the_estimate() -> None:
    progress = Progress(STARTED, now=0.0)
    progress.advance(Logged(50, 0, {}), now=100.0)
    progress.advance(Logged(100, 0, {}), now=105.0)
    assert progress.seconds_left(105.0) == 90.0


def test_the_time_for_evaluation_counts() -> None:
    progress = Progress(STARTED, now=0.0)
    progress.advance(Logged(100, 0, {}), now=5.0)
    progress.advance(EpochEnded(100, 0, {}, seconds=10.0), now=10.0)
    assert progress.seconds_left(10.0) == 90.0


def test_a_continued_run_counts_its_own_steps_only() -> None:
    progress = Progress(Started("a", "b", [], step=900, num_steps=1000, steps_per_epoch=100), now=0.0)
    assert progress.place() == "epoch 10/10"
    progress.advance(Logged(950, 9, {"time/samples_per_second": 1280.0}), now=10.0)
    assert progress.status(10.0) == "1,280 samples/s  0:10 left"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_seen"), [(Terminal(), True), (io.StringIO(), False)])
def test_a_bar_is_for_a_terminal_alone(stream: io.StringIO, is_seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    with Waiting("batches") as waiting:
        for _ in range(2):
            for done in range(7):
                waiting.at(done, 7)
    assert ("6/7" in stream.getvalue()) == is_seen
