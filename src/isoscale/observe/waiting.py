"""A word to a person who waits at a terminal while data is gone through."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class Waiting:
    """A bar on standard error, taken away in the end; nothing where nobody looks."""

    def __init__(self, what: str) -> None:
        """`what` is counted."""
        self._what = what
        self._bar: Progress | None = None

    def __enter__(self) -> "Waiting":
        if sys.stderr is not None and sys.stderr.isatty():
            self._bar = _bar()
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def at(self, done: int, total: int) -> None:
        """So many are done; where data is gone through again, it begins anew."""
        if self._bar is None:
            return
        if not self._bar.task_ids:
            self._bar.add_task(self._what)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)


def _bar() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
