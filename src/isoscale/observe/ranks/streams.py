"""What code prints, line by line, to someone else: sys.stdout, sys.stderr, and with them `logging` and `warnings`."""

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

LONGEST = 4000
"""Characters of a line that are kept."""

Take = Callable[[str], bool]
"""Takes a line; False where it cannot."""


class Overheard:
    """Stands in for the standard streams of this process until it is released."""

    def __init__(self, take: Take) -> None:
        """`take` gets every line that is printed from here on."""
        self._names = [name for name in ("stdout", "stderr") if getattr(sys, name) is not None]  # or it was closed
        self._streams = [_Stream(getattr(sys, name), take) for name in self._names]
        for name, stream in zip(self._names, self._streams, strict=True):
            setattr(sys, name, stream)
            _redirect_handlers(stream.original, stream)

    def finish_lines(self) -> None:
        """Pass on what was printed without an end of line."""
        for stream in self._streams:
            stream.finish_line()

    def release(self) -> None:
        """Give the streams back; who has kept a stand-in writes through it from now on."""
        for name, stream in zip(self._names, self._streams, strict=True):
            stream.release()
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.original)
            _redirect_handlers(stream, stream.original)


class _Stream:
    """A text stream whose lines are passed on; everything else is asked of the original."""

    def __init__(self, original: TextIO, take: Take) -> None:
        self.original = original
        self._take = take
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._begun = ""
        self._is_released = False

    def write(self, text: str) -> int:
        """Pass on the lines that are complete now."""
        if self._is_released or os.getpid() != self._process:  # a worker forked from here has no thread that delivers
            return self.original.write(text)
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                self._pass_on(_last_state(line))
            if len(self._begun) > 2 * LONGEST:
                self._begun = _last_state(self._begun)[: 2 * LONGEST]
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Pass on several."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """A line is passed on when it is complete."""
        if self._is_released:
            self.original.flush()

    def isatty(self) -> bool:
        """Nobody can move a cursor here."""
        return False

    def finish_line(self) -> None:
        """Pass on what was begun."""
        with self._lock:
            begun, self._begun = self._begun, ""
            if begun:
                self._pass_on(_last_state(begun))

    def release(self) -> None:
        """Write through from now on."""
        self.finish_line()
        self._is_released = True

    def _pass_on(self, line: str) -> None:
        if not self._take(line if len(line) <= LONGEST else f"{line[:LONGEST]}…"):
            self.original.write(line + "\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def _last_state(line: str) -> str:
    """What a terminal would show in the end of a line that was written over and over, such as a progress bar."""
    kept = line.rstrip("\r")
    return kept[kept.rfind("\r") + 1 :]


def _redirect_handlers(old: Any, new: Any) -> None:
    """Handlers of `logging` keep the stream that they were made with."""
    for handler in _handlers():
        if handler.stream is old:
            handler.setStream(new)


def _handlers() -> Iterator["logging.StreamHandler[Any]"]:
    known = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in known:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler
