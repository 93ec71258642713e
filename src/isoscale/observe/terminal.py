"""The console on a terminal: a progress bar below, everything else above it."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.progress import BarColumn, ProgressColumn, Task
from rich.progress import Progress as RichProgress
from rich.table import Column, Table
from rich.text import Text

from isoscale.observe.events import Ended, EpochEnded, Event, Logged, Note, Started
from isoscale.observe.progress import Progress
from isoscale.observe.text import (
    epoch_line,
    heading,
    label_width,
    note_line,
    prefixed,
    rank_prefix,
    start_rows,
    start_tables,
)
from isoscale.system.printing import visible

REFRESHES_PER_SECOND = 5
WIDE = 100
"""Columns from which on there is room for the step beside the epoch."""
NOTE_STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red"}


class TerminalDisplay:
    """Events for a person at a terminal."""

    def __init__(self, stream: TextIO, rank: int | None = None) -> None:
        """With `rank`, epochs and notes name the rank that they come from; the summaries are of all ranks."""
        self._stream = stream
        self._rank = rank
        self._console = RichConsole(file=stream, highlight=False, markup=False, emoji=False)
        self._progress: Progress | None = None
        self._bar: RichProgress | None = None

    def notify(self, event: Event) -> None:
        """Print the event, or let the bar know; its own thread draws it."""
        match event:
            case Logged():
                self._advance(event)
            case EpochEnded():
                self._advance(event)
                self._print(self._epoch_text(event))
            case Note():
                lines = prefixed(note_line(event).split("\n"), rank_prefix(event, self._rank))
                self._print(_text("\n".join(lines), NOTE_STYLES[event.level]))
            case Started():
                self._start(event)
            case Ended():
                self._end(event)

    def close(self) -> None:
        """Take the bar away and give the cursor back."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _start(self, event: Started) -> None:
        self.close()
        self._print(_text(heading(event), "bold"))
        self._console.print(_grid(start_rows(event)))
        tables = start_tables(event)
        if tables:
            self._console.print(_text("\n".join(tables), "dim"), no_wrap=True, overflow="ellipsis", crop=True)
        self._console.print()
        self._progress = Progress(event, time.monotonic())
        self._bar = _bar(self._progress, self._console, self._stream)
        self._bar.start()

    def _advance(self, event: Logged | EpochEnded) -> None:
        if self._progress and self._bar:
            self._progress.advance(event, time.monotonic())
            self._bar.update(self._bar.task_ids[0], completed=event.step)

    def _end(self, event: Ended) -> None:
        self.close()
        directory = self._progress.started.directory if self._progress else ""
        self._console.print()
        self._print(_text(heading(event, directory), "bold"))
        if event.rows:
            self._console.print(_grid(event.rows))
        if event.commands:
            self._print(Text("\nnext:"))
        width = label_width(event.commands)
        for purpose, command in event.commands:
            # A command that is broken over two lines could not be copied: the terminal itself wraps it.
            self._console.print(
                Text.assemble((f"  {visible(purpose):<{width}}  ", "dim"), visible(command)), soft_wrap=True
            )

    def _epoch_text(self, event: EpochEnded) -> Text:
        started = self._progress.started if self._progress else None
        prefix = rank_prefix(event, self._rank)
        lines = epoch_line(event, started, self._console.width - len(prefix)).split("\n")
        text = _text("\n".join(prefixed(lines, prefix)))
        text.highlight_regex(r" \* ", "bold green")
        return text

    def _print(self, text: Text) -> None:
        self._console.print(text)


class _Words(ProgressColumn):
    """A column of the bar whose text is asked for at every refresh."""

    def __init__(self, words: Callable[[], str]) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._words = words

    def render(self, task: Task) -> Text:
        """The text as it is now."""
        return _text(self._words())


class _Bar(RichProgress):
    """A bar that leaves room for the ^C that the terminal writes behind it: on a new line it could not be erased."""

    def get_renderable(self) -> RenderableType:
        """The bar, a little narrower than the terminal."""
        return _Narrower(super().get_renderable())


class _Narrower:
    """Something drawn in less than the full width."""

    def __init__(self, drawn: RenderableType) -> None:
        self._drawn = drawn

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        yield Constrain(self._drawn, options.max_width - len("^C^C") - 1)


def _bar(progress: Progress, console: RichConsole, stream: TextIO) -> RichProgress:
    bar = _Bar(
        _Words(progress.place),
        BarColumn(bar_width=None, complete_style="cyan", finished_style="cyan"),
        _Words(lambda: progress.steps() if console.width >= WIDE else ""),
        _Words(lambda: progress.status(time.monotonic())),
        console=console,
        transient=True,
        expand=True,
        refresh_per_second=REFRESHES_PER_SECOND,
        # What others print appears above the bar, except where the user sends it to a file.
        redirect_stdout=stream is sys.stdout,
        redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
    )
    bar.add_task("", total=progress.started.num_steps, completed=progress.step)
    return bar


def _text(text: str, style: str = "") -> Text:
    return Text(visible(text), style)


def _grid(rows: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=True)
    grid.add_column(width=2 + label_width(rows), no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(_text(f"  {label}"), _text(text))
    return grid
