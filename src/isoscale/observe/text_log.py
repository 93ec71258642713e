"""log.txt: everything that happened in a run, in words, with the time of day."""

import os
import time
from pathlib import Path

from isoscale.observe.events import Ended, EpochEnded, Event, Exhibited, Logged, Note, Started
from isoscale.observe.files import failures_in_words
from isoscale.observe.text import end_lines, epoch_line, logged_line, note_line, start_lines


class TextLog:
    """Appends a line, or a few, for every event."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        with failures_in_words(self._path):
            # A file name or a note may hold what UTF-8 cannot; that must not cost the log.
            self._file = self._path.open("a", encoding="utf-8", errors="backslashreplace")
        self._started: Started | None = None

    def notify(self, event: Event) -> None:
        """Write the event and hand it to the operating system."""
        if isinstance(event, Started):
            self._started = event
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write("".join(f"{stamp}  {line}".rstrip() + "\n" for line in self._lines(event)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _lines(self, event: Event) -> list[str]:
        match event:
            case Logged():
                return [logged_line(event)]
            case EpochEnded():
                return [epoch_line(event, self._started)]
            case Note():
                return note_line(event).split("\n")
            case Started():
                return start_lines(event)
            case Exhibited():
                return [f"to look at: {', '.join(event.exhibits)}"]
            case Ended():
                return end_lines(event, self._started.directory if self._started else "")
