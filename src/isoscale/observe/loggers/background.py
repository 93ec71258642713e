"""A thread between a run and a logger, so that a slow or dead server never holds up a training step."""

import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Literal

from isoscale.observe.events import Event, Note, Observer, Started

Say = Callable[[str, Literal["warning"]], None]


class Background:
    """Tells an observer from a thread of its own; a failure switches it off and is said once.

    Whatever is said is said in the thread of the caller, at the next event or at the end.
    """

    def __init__(
        self, observer: Observer, say: Say, send_command: str, patience: float = 20.0, capacity: int = 1000
    ) -> None:
        """Keep up to `capacity` events waiting, and at the end wait `patience` seconds for them."""
        self._observer = observer
        self._say = say
        self._send_command = send_command
        self._patience = patience
        self._queue: Queue[Event | None] = Queue(capacity)
        self._failure: str | None = None
        self._is_said = False
        self._is_closed = False
        self._thread = Thread(target=self._work, name=self._name, daemon=True)

    def notify(self, event: Event) -> None:
        """Leave the event for the thread and return at once; a run that never starts is nothing to tell of."""
        if isinstance(event, Note) or self._is_closed:
            return
        if isinstance(event, Started) and not self._thread.ident:
            self._thread.start()
        if self._thread.ident and self._failure is None:
            try:
                self._queue.put_nowait(event)
            except Full:
                self._failure = f"it is {self._queue.maxsize:,} events behind"
        self._say_failure()

    def close(self) -> None:
        """Wait a bounded time for what is left, and say what was not sent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.ident and self._failure is None:
            self._wait()
        self._say_failure()

    def commands(self, directory: Path) -> list[tuple[str, str]]:
        """What to type to see or to send what the observer has written: purpose and command."""
        if self._failure is not None:
            return [("send it", self._send_command)]
        ask = getattr(self._observer, "commands", None)
        return ask(directory) if ask else []

    @property
    def _name(self) -> str:
        return type(self._observer).__name__

    def _work(self) -> None:
        try:
            while self._failure is None and (event := self._queue.get()) is not None:
                self._observer.notify(event)
            self._observer.close()
        except Exception as error:
            self._failure = self._failure or reason(error)
            with suppress(Exception):
                self._observer.close()

    def _wait(self) -> None:
        end = time.monotonic() + self._patience
        with suppress(Full):
            self._queue.put(None, timeout=self._patience)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive() and self._failure is None:
            waiting = max(1, self._queue.qsize() - 1)  # the mark of the end is no event
            self._failure = f"no answer within {self._patience:g} s, and at least {waiting:,} events were not sent"

    def _say_failure(self) -> None:
        if self._failure is not None and not self._is_said:
            self._is_said = True
            self._say(
                f"{self._name} failed and is switched off, the run is not affected: {self._failure}\n"
                f"send what is missing later: {self._send_command}",
                "warning",
            )


def reason(error: BaseException) -> str:
    """Why something failed, in one line: what the package says, and what lies at the bottom of it."""
    said = textwrap.shorten(_words(error), 160, placeholder=" …")
    bottom = error
    while (below := bottom.__cause__ or bottom.__context__) is not None:
        bottom = below
    return said if _words(bottom) in said else f"{said} ({textwrap.shorten(_words(bottom), 80, placeholder=' …')})"


def _words(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
