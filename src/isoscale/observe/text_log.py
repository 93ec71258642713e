"""log.txt: everything that happened in a run, in words, with the time of day."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from isoscale.errors import UserError
from isoscale.observe.events import Ended, EpochEnded, Event, FiguresMade, Logged, LoggedByTask, Note, Started
from isoscale.observe.text import end_lines, epoch_line, logged_line, note_line, prefixed, rank_prefix, start_lines
from isoscale.system.files import failures_in_words, open_own
from isoscale.system.printing import visible


class TextLog:
    """Appends a line, or a few, for every event."""

    def __init__(
        self, path: str | os.PathLike[str], rank: int | None = None, opened: Callable[..., TextIO] = open_own
    ) -> None:
        """Where it is; with `rank`, every line names the rank that it comes from, and events are of that one."""
        self._path = Path(path)
        self._rank = rank
        with failures_in_words(self._path):
            # A file name or a note may hold what UTF-8 cannot; that must not cost the log.
            self._file = opened(self._path, "a", encoding="utf-8", errors="backslashreplace")
        self._started: Started | None = None

    @classmethod
    def named(cls, path: str | os.PathLike[str], rank: int | None = None) -> "TextLog":
        """A log where the user wants one, with the folders above it."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            return cls(path, rank, open)  # a link is what the user has named, such as /dev/stderr
        except (OSError, UserError) as error:
            cause = error.__cause__ or error
            is_below_file = isinstance(cause, FileExistsError | NotADirectoryError)
            reason = "what should be a folder is a file" if is_below_file else getattr(cause, "strerror", cause)
            raise UserError(f"cannot write the log to {path}: {reason}; name another file: --log-file PATH") from cause

    def notify(self, event: Event) -> None:
        """Write the event and hand it to the operating system."""
        if isinstance(event, Started):
            self._started = event
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = prefixed(self._lines(event), rank_prefix(event, self._rank))
        try:
            self._file.write("".join(f"{stamp}  {visible(line)}".rstrip() + "\n" for line in lines))
            self._file.flush()
        except OSError as error:
            error.filename = error.filename or str(self._path)
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _lines(self, event: Event) -> list[str]:
        match event:
            case Logged() | LoggedByTask():
                return [logged_line(event)]
            case EpochEnded():
                return [epoch_line(event, self._started)]
            case Note():
                return note_line(event).split("\n")
            case Started():
                return start_lines(event)
            case FiguresMade():
                return [f"to look at: {', '.join(event.figures)}"]
            case Ended():
                return end_lines(event, self._started.directory if self._started else "")
