"""A logger behind a thread: never waited for while training, waited for a while at the end, its failure said once."""

import threading
import time
from pathlib import Path

import pytest

from isoscale.observe.events import Ended, Event, Logged, Note, Started
from isoscale.observe.loggers.background import Background, reason

STARTED = Started("digits", "runs/a", [], 0, 100, 10)
LOGGED = Logged(50, 0, {"train/loss": 0.5})
ENDED = Ended("done", 100)


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0
        self.thread: threading.Thread | None = None

    def notify(self, event: Event) -> None:
        self.thread = threading.current_thread()
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


class Failing(Recorder):
    def notify(self, event: Event) -> None:
        super().notify(event)
        if isinstance(event, Logged):
            raise ConnectionError("nobody there")


class Dead(Recorder):
    """Never returns from what it is told, until the test is over."""

    over = threading.Event()

    def notify(self, event: Event) -> None:
        self.over.wait(60)


@pytest.fixture(autouse=True)
def _let_threads_end():
    Dead.over.clear()
    yield
    Dead.over.set()


def behind(observer, **options) -> tuple[Background, list[str]]:
    said: list[str] = []
    return Background(
        observer, lambda text, level: said.append(f"{level}: {text}"), "isoscale runs send", **options
    ), said


def wait_until(condition) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_everything_arrives_in_order_from_another_thread():
    recorder = Recorder()
    background, said = behind(recorder)
    events = [STARTED, *(Logged(step, 0, {}) for step in range(200)), ENDED]
    for event in events:
        background.notify(event)
    background.close()
    assert recorder.events == events and recorder.closed == 1 and said == []
    assert recorder.thread is not threading.current_thread()


def test_a_step_never_waits_for_a_dead_server():
    background, said = behind(Dead(), patience=0.1)
    for event in (STARTED, *[LOGGED] * 100):
        background.notify(event)  # would never come back
    assert said == []
    background.close()


def test_the_end_waits_a_bounded_time_and_says_what_to_type():
    background, said = behind(Dead(), patience=0.2)
    for event in (STARTED, LOGGED, LOGGED, ENDED):
        background.notify(event)
    background.close()  # would never come back
    background.close()
    (text,) = said
    assert text.startswith("warning: Dead failed and is switched off, the run is not affected: no answer within 0.2 s")
    assert "at least 3 events were not sent" in text and text.endswith("later: isoscale runs send")


def test_a_failure_is_said_once_in_the_callers_thread_and_nothing_more_is_sent():
    failing = Failing()
    threads = []
    said: list[str] = []

    def say(text: str, level: str) -> None:
        threads.append(threading.current_thread())
        said.append(text)
        background.notify(Note(text))  # as Observers does

    background = Background(failing, say, "isoscale runs send")
    background.notify(STARTED)
    background.notify(LOGGED)
    wait_until(lambda: failing.closed)
    for _ in range(3):
        background.notify(LOGGED)
    background.close()
    assert threads == [threading.current_thread()]
    assert "Failing failed and is switched off" in said[0] and "nobody there" in said[0]
    assert failing.events == [STARTED, LOGGED] and failing.closed == 1


def test_a_failure_of_the_last_event_is_said_at_the_end():
    background, said = behind(Failing())
    background.notify(STARTED)
    background.notify(LOGGED)
    background.close()
    assert len(said) == 1 and "nobody there" in said[0]


def test_a_logger_that_falls_too_far_behind_is_switched_off():
    background, said = behind(Dead(), patience=1000, capacity=5)
    for event in (STARTED, *[LOGGED] * 20):
        background.notify(event)
    background.close()  # who has failed is not waited for
    assert len(said) == 1 and "it is 5 events behind" in said[0]


def test_a_run_that_never_starts_is_not_told_of():
    recorder = Recorder()
    background, said = behind(recorder)
    background.notify(Ended("failed", 0))
    background.close()
    assert recorder.events == [] and said == []


def test_the_commands_are_the_loggers_own_until_it_fails():
    class Telling(Failing):
        def commands(self, directory: Path) -> list[tuple[str, str]]:
            return [("see it", f"look {directory}")]

    telling = Telling()
    background, _ = behind(telling)
    background.notify(STARTED)
    assert background.commands(Path("runs/a")) == [("see it", "look runs/a")]
    assert behind(Recorder())[0].commands(Path("runs/a")) == []
    background.notify(LOGGED)
    wait_until(lambda: telling.closed)
    assert background.commands(Path("runs/a")) == [("send it", "isoscale runs send")]
    background.close()


def test_a_reason_names_what_the_package_says_and_what_lies_below():
    try:
        try:
            raise ConnectionRefusedError(111, "Connection refused")
        except OSError as below:
            raise RuntimeError("request failed " + "x " * 200) from below
    except RuntimeError as error:
        assert reason(error).endswith("… (Connection refused)") and len(reason(error)) < 200
    assert reason(KeyError()) == "KeyError"
