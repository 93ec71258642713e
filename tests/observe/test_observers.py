"""One observer that fails takes nobody with it, unless the run cannot go on without it."""

import errno
from pathlib import Path

import pytest

from isoscale.errors import UserError
from isoscale.observe.events import Event, Logged, Note
from isoscale.observe.metric_log import MetricLog
from isoscale.observe.observers import Observers
from isoscale.observe.text_log import TextLog
from tests.disks import mounted

LOGGED = Logged(50, 0, {"train/loss": 0.5})


class Recorder:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def notify(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


class Failing(Recorder):
    """Fails at everything but a note."""

    def notify(self, event: Event) -> None:
        super().notify(event)
        if not isinstance(event, Note):
            raise OSError(errno.ENOSPC, "No space left on device", "events.out")

    def close(self) -> None:
        super().close()
        raise OSError(errno.ENOSPC, "No space left on device")


def test_everyone_is_told_in_order() -> None:
    first, second = Recorder(), Recorder()
    observers = Observers([first, second])
    observers.notify(LOGGED)
    observers.note("slow disk", "warning")
    observers.close()
    assert first.events == second.events == [LOGGED, Note("slow disk", "warning")]
    assert first.closed and second.closed


def test_an_observer_that_fails_is_dropped_and_the_rest_are_warned_once() -> None:
    before, failing, after = Recorder(), Failing(), Recorder()
    observers = Observers([before, failing, after])
    observers.notify(LOGGED)
    observers.notify(LOGGED)
    for recorder in (before, after):
        assert recorder.events.count(LOGGED) == 2
        (note,) = [event for event in recorder.events if isinstance(event, Note)]
        assert note.level == "warning"
        assert "Failing" in note.text and "No space left on device" in note.text and "events.out" in note.text
    assert failing.events == [LOGGED] and failing.closed


def test_two_observers_that_fail_at_once_are_both_dropped() -> None:
    rest = Recorder()
    observers = Observers([Failing(), Failing(), rest])
    observers.notify(LOGGED)
    assert sum(isinstance(event, Note) for event in rest.events) == 2 and LOGGED in rest.events


def test_a_text_log_on_a_full_disk_is_dropped(tmp_path: Path) -> None:
    rest = Recorder()
    with mounted(tmp_path / "disk") as disk:
        observers = Observers([TextLog(disk.path / "log.txt"), rest])
        disk.leave(0)
        observers.notify(LOGGED)
    assert any(isinstance(event, Note) and "TextLog" in event.text for event in rest.events)


def test_a_metric_log_on_a_full_disk_ends_the_run_and_the_others_are_still_closed(tmp_path: Path) -> None:
    rest = Recorder()
    with mounted(tmp_path / "disk") as disk:
        observers = Observers([MetricLog(disk.path / "metrics.jsonl", start_bytes=0), rest])
        disk.leave(0)
        with pytest.raises(UserError, match=r"metrics\.jsonl: No space left on device"):
            observers.notify(LOGGED)
        with pytest.raises(UserError, match="No space left on device"):
            observers.close()
    assert rest.closed


def test_closing_reaches_everyone_when_one_fails() -> None:
    rest = Recorder()
    Observers([Failing(), rest]).close()
    assert rest.closed and any(isinstance(event, Note) for event in rest.events)
