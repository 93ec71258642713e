"""What people see of a sweep while it runs: a table that moves on a terminal, lines elsewhere."""

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from isoscale.observe.text import number
from isoscale.study.sweep.plan import Sweep
from isoscale.study.sweep.states import FAILED, STARTING, WAITING, State, counts, table
from isoscale.system.printing import echo, one_line, visible

MARGIN = 4
"""Lines of the terminal that are left to titles, counts and the prompt."""
STYLES = {"running": "bold", STARTING: "bold", "done": "green", "stopped": "yellow", WAITING: "dim"}


class Display(Protocol):
    """Where the states of points are shown."""

    def show(self, states: Sequence[State]) -> None:
        """How all points stand now."""

    def say(self, text: str) -> None:
        """A word beside them."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...


def display_on(stream: TextIO, sweep: Sweep) -> Display:
    """The display that fits a stream."""
    is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return TerminalDisplay(stream, sweep) if is_terminal else PlainDisplay(stream, sweep)


class PlainDisplay:
    """A line whenever a point begins or ends."""

    def __init__(self, stream: TextIO, sweep: Sweep) -> None:
        """Show the points of a sweep on a stream."""
        self._stream, self._metric = stream, sweep.record["monitor"]
        self._before: dict[str, str] = {}

    def show(self, states: Sequence[State]) -> None:
        """Only what has changed."""
        for state in states:
            before = self._before.get(state.point.name)
            self._before[state.point.name] = state.status
            if before is not None and state.status not in (before, WAITING, STARTING):
                self.say(f"{state.point.name}: {self._told(state)}")

    def _told(self, state: State) -> str:
        best = [f"{self._metric} {number(state.best)}"] if state.best is not None else []
        steps = [f"step {state.steps}"] if state.steps else []
        message = [(state.message or "").partition("\n")[0]] if state.status in FAILED else []
        return ", ".join([state.status, *steps, *best, *message])

    def say(self, text: str) -> None:
        """Print a line at once."""
        echo(text, file=self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class TerminalDisplay:
    """A table with a line for each point, as many as there is room for."""

    def __init__(self, stream: TextIO, sweep: Sweep) -> None:
        """Show the points of a sweep on a terminal."""
        from rich.console import Console
        from rich.live import Live

        self._sweep = sweep
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def show(self, states: Sequence[State]) -> None:
        """Draw the table anew."""
        self._live.update(self._drawn(states), refresh=True)

    def _drawn(self, states: Sequence[State]) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        room = max(1, self._console.height - MARGIN)
        shown = _most_interesting(states, room)
        titles, *rows = table(self._sweep, shown)
        drawn = Table(*titles[:-1], box=None, pad_edge=False, header_style="dim")
        for state, row in zip(shown, rows, strict=True):
            drawn.add_row(*map(one_line, row[:-1]), style=STYLES.get(state.status, "red"))
        more = f", {len(states) - len(shown)} more are not shown" if len(shown) < len(states) else ""
        return Group(drawn, Text(counts(states) + more, "dim"))

    def say(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(visible(text))

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()


def _most_interesting(states: Sequence[State], room: int) -> list[State]:
    """What fits: running points first, then those that ended, then those that wait; in the order of the sweep."""
    if len(states) <= room:
        return list(states)
    rank = {"running": 0, STARTING: 0, WAITING: 2}
    chosen = sorted(range(len(states)), key=lambda index: rank.get(states[index].status, 1))[:room]
    return [states[index] for index in sorted(chosen)]
