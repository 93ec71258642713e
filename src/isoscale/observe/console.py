"""What a run says on standard output: for a person at a terminal, for a file, or for a program."""

import io
import json
import math
import os
import re
import sys
import time
from typing import Literal, TextIO

from isoscale.observe.events import Ended, EpochEnded, Event, Exhibited, Logged, Note, Observer, Started
from isoscale.observe.progress import Progress
from isoscale.observe.terminal import TerminalDisplay
from isoscale.observe.text import end_lines, epoch_line, heading, note_line, start_lines

LEVELS = ("debug", "info", "warning", "error")
SECONDS_BETWEEN_LINES = 10.0


class Console:
    """Prints what happens, as far as `level` wants it: from `warning` on only such notes and one line at the end."""

    def __init__(
        self,
        level: Literal["debug", "info", "warning", "error"] = "info",
        format: Literal["text", "json"] = "text",
        stream: TextIO | None = None,
    ) -> None:
        self._lowest_level = LEVELS.index(level)
        quiet = self._lowest_level > LEVELS.index("info")
        self._display = _display(format, stream or sys.stdout, quiet)

    def notify(self, event: Event) -> None:
        """Print the event, unless it is a note that nobody asked for."""
        if not isinstance(event, Note) or LEVELS.index(event.level) >= self._lowest_level:
            self._display.notify(event)

    def close(self) -> None:
        """Take the progress bar away, if there is one."""
        self._display.close()


class PlainDisplay:
    """Lines for a file or a pipe; between two epochs at most one every ten seconds."""

    def __init__(self, stream: TextIO, quiet: bool) -> None:
        self._stream = stream
        self._quiet = quiet
        self._progress: Progress | None = None
        self._next_line_at = 0.0

    def notify(self, event: Event) -> None:
        """Print the event."""
        match event:
            case Logged():
                self._advance(event)
            case EpochEnded():
                self._end_epoch(event)
            case Note():
                self._print(note_line(event))
            case Started():
                self._start(event)
            case Ended():
                self._end(event)

    def close(self) -> None:
        """Nothing is open: the stream belongs to others."""

    def _start(self, event: Started) -> None:
        self._progress = Progress(event, time.monotonic())
        if not self._quiet:
            self._print(*start_lines(event), "")

    def _advance(self, event: Logged) -> None:
        now = time.monotonic()
        if self._progress is None or self._quiet:
            return
        self._progress.advance(event, now)
        if now >= self._next_line_at:
            self._print(f"{self._progress.place()}  step {self._progress.steps()}  {self._progress.status(now)}")

    def _end_epoch(self, event: EpochEnded) -> None:
        if self._progress:
            self._progress.advance(event, time.monotonic())
        if not self._quiet:
            self._print(epoch_line(event, self._progress.started if self._progress else None))

    def _end(self, event: Ended) -> None:
        directory = self._progress.started.directory if self._progress else ""
        if self._quiet:
            self._print(heading(event, directory))
        else:
            self._print("", *end_lines(event, directory))

    def _print(self, *lines: str) -> None:
        self._next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES
        print(*lines, sep="\n", file=self._stream, flush=True)


class JsonDisplay:
    """One JSON object a line, for programs; a number that is not finite is written as "nan", "inf" or "-inf"."""

    def __init__(self, stream: TextIO, quiet: bool) -> None:
        self._stream = stream
        self._quiet = quiet

    def notify(self, event: Event) -> None:
        """Print the event with the time it happened."""
        if not self._quiet or isinstance(event, Note | Ended):
            fields = {"event": _snake_case(type(event).__name__), "time": round(time.time(), 3), **_fields(event)}
            print(_json(fields), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is open: the stream belongs to others."""


def _display(format: str, stream: TextIO, quiet: bool) -> Observer:
    if isinstance(stream, io.TextIOWrapper):
        # A note with a letter that the terminal's encoding lacks must not cost the console.
        stream.reconfigure(errors="replace")
    if format == "json":
        return JsonDisplay(stream, quiet)
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return TerminalDisplay(stream) if is_terminal and not quiet else PlainDisplay(stream, quiet)


def _fields(event: Event) -> dict[str, object]:
    if isinstance(event, Exhibited):
        return {"step": event.step, "epoch": event.epoch, "exhibits": list(event.exhibits)}
    fields = dict(vars(event))
    if isinstance(event, Started):
        fields["layers"] = [vars(layer) for layer in event.layers]
    return fields


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _json(fields: dict[str, object]) -> str:
    values = fields.get("values")
    if isinstance(values, dict):
        fields["values"] = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
    return json.dumps(fields, allow_nan=False)
