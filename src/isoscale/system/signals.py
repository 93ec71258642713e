"""What signals that ask for a stop mean to a process, from its first line to its last.

The first one asks it to save and end. Schedulers and launchers repeat theirs, to a process, to its group and to its
launcher, until it is gone: that must never cost the exit code by which a job is started again. Only a second Ctrl-C,
of a person, ends it at once.
"""

import atexit
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Literal

from isoscale.errors import START_AGAIN

OF_JOBS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Of job schedulers and launchers, and of a terminal that is closed."""
ALL = (signal.SIGINT, *OF_JOBS)
APART = 0.3
"""Seconds between two Ctrl-C of a person: a terminal and a launcher may both deliver one, within milliseconds."""
INSIST = 10.0
"""Seconds after the end of a training from which on somebody who still asks for the end of its process gets it."""

Handler = Callable[[int, FrameType | None], Any]
Meaning = Literal["first", "again", "now"]


def heard() -> tuple[signal.Signals, ...]:
    """Those that this process listens to: one that `nohup` has started ignores SIGHUP, and goes on doing so."""
    keeps_on = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in ALL if not (number == signal.SIGHUP and keeps_on))


class Requests:
    """Tells a first request from its repetitions, and from a second Ctrl-C."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self._at: float | None = None
        self.kept: list[tuple[int, Meaning]] = []
        """Signals that somebody has still to pass on, and what they ask for."""

    def keep(self, number: int, frame: FrameType | None) -> None:
        """For a process that waits for others: keep what it has to tell them."""
        self.kept.append((number, self.meaning(number)))

    def meaning(self, number: int) -> Meaning:
        """What a signal that has just come asks for: a stop, nothing new, or the end at once."""
        before, now = self._at, time.monotonic()
        if before is None or number == signal.SIGINT:
            self._at = now
        if before is None:
            return "first"
        return "now" if number == signal.SIGINT and now - before >= APART else "again"


class _Process:
    """What has become of this process so far."""

    is_ours = False
    """Whether it is a command, which ends with its training, and not somebody's script or notebook."""
    num_hearing = 0
    was_asked = False
    ended_at = heard_at = 0.0
    """When the last training ended, and when the last signal came."""
    exit_code: int | None = None
    """Once it is known."""
    ignores_at_end = False


@contextmanager
def hearing(handler: Handler) -> Iterator[None]:
    """Let a function hear the signals, in the main thread of a process; inside of itself, the innermost one hears.

    Afterwards they do no harm to what is left to do: to the end of a command, or of a script that was asked to stop.
    """
    own = os.getpid()

    def hear(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:  # what is forked from a training is not the one to stop
            _Process.was_asked, _Process.heard_at = True, time.monotonic()
            handler(number, frame)

    before: dict[int, Any] = {}
    if not _Process.num_hearing:
        _Process.was_asked = False
    with suppress(ValueError):  # not the main thread: a notebook's worker, say
        for number in heard():
            before[number] = signal.signal(number, hear)
    _Process.num_hearing += bool(before)
    try:
        yield
    finally:
        _Process.num_hearing -= bool(before)
        for each, found in before.items():
            signal.signal(each, found if _Process.num_hearing else _afterwards(each, found))


def own_process() -> None:
    """This process is a command: after its training, nothing comes but its end."""
    _Process.is_ours = True


def end_with(code: int | str | None) -> None:
    """The exit code of this process is known: no signal changes it any more."""
    if not _Process.is_ours:
        return
    _Process.exit_code = code if isinstance(code, int) else 1 if code else 0
    for number in heard():
        signal.signal(number, _afterwards(number, signal.SIG_DFL))


def _afterwards(number: int, before: Any) -> Any:
    """Who hears a signal after a training: nobody for a while, or the one who did before."""
    if not _Process.is_ours and (number == signal.SIGINT or not _Process.was_asked):
        return before
    _Process.ended_at = time.monotonic()
    if not _Process.ignores_at_end:
        _Process.ignores_at_end = True
        atexit.register(_ignore)
    return before if isinstance(before, _Late) else _Late(before)


class _Late:
    """Hears a signal when there is no training any more."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            before, _Process.heard_at = _Process.heard_at, now
            if now - before < APART:
                return
            if _Process.exit_code is None:
                raise KeyboardInterrupt
        elif now - _Process.ended_at < INSIST:
            return
        if _Process.is_ours:
            os._exit(START_AGAIN if _Process.exit_code is None else _Process.exit_code)
        signal.signal(number, self._before)
        os.kill(os.getpid(), number)


def _ignore() -> None:
    """Python gives signals back to the system when it ends, which would end the process with another exit code."""
    for number in OF_JOBS:
        if isinstance(signal.getsignal(number), _Late):
            signal.signal(number, signal.SIG_IGN)
