"""What a run says on standard output: for a person at a terminal, for a file, or for a program."""

import io
import json
import math
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal, TextIO

from isoscale.observe.events import (
    Ended,
    EpochEnded,
    Event,
    FiguresMade,
    Level,
    Logged,
    Note,
    Observer,
    Said,
    Started,
)
from isoscale.observe.progress import Progress
from isoscale.observe.terminal import TerminalDisplay
from isoscale.observe.text import end_lines, epoch_line, heading, note_line, prefixed, rank_prefix, start_lines
from isoscale.system.printing import echo

LEVELS = ("debug", "info", "warning", "error")
SECONDS_BETWEEN_LINES = 10.0


class Console:
    """Prints what happens, as far as `level` wants it: from `warning` on only such notes and one line at the end."""

    def __init__(
        self,
        level: Level = "info",
        format: Literal["text", "json"] = "text",
        stream: TextIO | None = None,
        rank: int | None = None,
    ) -> None:
        """With `rank`, every line names the rank that it comes from, and events are of that one."""
        self._lowest_level = LEVELS.index(level)
        quiet = self._lowest_level > LEVELS.index("info")
        self._display = _display(format, stream or sys.stdout or _nowhere(), quiet, rank)

    def notify(self, event: Event) -> None:
        """Print the event, unless it is a note that nobody asked for."""
        if not isinstance(event, Note) or self._is_wanted(event):
            self._display.notify(event)

    def _is_wanted(self, note: Note) -> bool:
        if isinstance(note, Said) and note.source != "note":
            return note.source == "print"
        return LEVELS.index(note.level) >= self._lowest_level

    def close(self) -> None:
        """Take the progress bar away, if there is one."""
        self._display.close()


class PlainDisplay:
    """Lines for a file or a pipe; between two epochs at most one every ten seconds."""

    def __init__(self, stream: TextIO, quiet: bool, rank: int | None = None) -> None:
        self._stream = stream
        self._quiet = quiet
        self._rank = rank
        self._prefix = ""
        self._progress: Progress | None = None
        self._next_line_at = 0.0

    def notify(self, event: Event) -> None:
        """Print the event."""
        self._prefix = rank_prefix(event, self._rank)
        match event:
            case Logged():
                self._advance(event)
            case EpochEnded():
                self._end_epoch(event)
            case Note():
                self._print(*note_line(event).split("\n"))
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
        echo(*prefixed(lines, self._prefix), sep="\n", file=self._stream)


class JsonDisplay:
    """One JSON object per line, for programs; a number that is not finite is written as "nan", "inf" or "-inf"."""

    def __init__(self, stream: TextIO, quiet: bool, rank: int | None = None) -> None:
        self._stream = stream
        self._quiet = quiet
        self._of_rank = {} if rank is None else {"rank": rank}

    def notify(self, event: Event) -> None:
        """Print the event with the time it happened; of what a rank says, each line for itself."""
        if isinstance(event, Said):
            for line in event.text.split("\n"):
                self._print(replace(event, text=line))
        elif not self._quiet or isinstance(event, Note | Ended):
            self._print(event)

    def _print(self, event: Event) -> None:
        head = {"event": _snake_case(type(event).__name__), "time": round(time.time(), 3)}
        echo(_json({**head, **self._of_rank, **_fields(event)}), file=self._stream)

    def close(self) -> None:
        """Nothing is open: the stream belongs to others."""


def _nowhere() -> TextIO:
    """Where words go in a process that has no standard output."""
    return open(os.devnull, "w")


def _display(format: str, stream: TextIO, quiet: bool, rank: int | None) -> Observer:
    if isinstance(stream, io.TextIOWrapper):
        # A note with a letter that the terminal's encoding lacks must not cost the console.
        stream.reconfigure(errors="replace")
    if format == "json":
        return JsonDisplay(stream, quiet, rank)
    return TerminalDisplay(stream, rank) if _is_terminal(stream) and not quiet else PlainDisplay(stream, quiet, rank)


def _is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at it, and a bar can be drawn."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not _ends_behind_mpirun(stream)


def _ends_behind_mpirun(stream: TextIO) -> bool:
    """Whether Open MPI has made this terminal, as it does for rank 0, while its own output goes to a file."""
    if "OMPI_COMM_WORLD_RANK" not in os.environ:
        return False
    try:
        own = where = os.readlink(f"/proc/self/fd/{stream.fileno()}")
        process = os.getppid()
        while where == own and process > 1:  # a shell between has the same terminal
            where, process = os.readlink(f"/proc/{process}/fd/1"), _parent(process)
    except OSError:  # no Linux, or a process of someone else
        return False
    return not where.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _fields(event: Event) -> dict[str, object]:
    if isinstance(event, FiguresMade):
        return {"step": event.step, "epoch": event.epoch, "exhibits": list(event.figures)}
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
