"""Progress of a run, how fast it goes and how long it still takes; a bar for those who wait for other things."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from isoscale.observe.events import EpochEnded, Logged, Started
from isoscale.observe.text import clock, num_epochs, number, plain_number

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress:
    """Follows the events of a run; times are seconds of any clock that only goes forward."""

    def __init__(self, started: Started, now: float) -> None:
        self.started = started
        self.step = started.step
        self.epoch = started.step // max(1, started.steps_per_epoch)
        self.loss: float | None = None
        self._samples_per_second: float | None = None
        self._time = now
        self._anchor = (now, started.step)
        self._first_log: tuple[float, int] | None = None

    def advance(self, event: Logged | EpochEnded, now: float) -> None:
        """Take over what the event says."""
        self.step, self._time = event.step, now
        if isinstance(event, Logged):
            self.epoch = event.epoch
            self.loss = event.values.get("train/loss", self.loss)
            self._samples_per_second = event.values.get("time/samples_per_second", self._samples_per_second)
            self._move_anchor(now)

    def steps_per_second(self) -> float | None:
        """The mean so far, evaluations and pauses included; a single step, which may be the first, says nothing."""
        time, step = self._anchor
        return (self.step - step) / (self._time - time) if self.step > step + 1 and self._time > time else None

    def seconds_left(self, now: float) -> float | None:
        """Counts down between two events."""
        rate = self.steps_per_second()
        return max(0.0, (self.started.num_steps - self.step) / rate - (now - self._time)) if rate else None

    def place(self) -> str:
        """`epoch 3/30`."""
        total = num_epochs(self.started)
        return f"epoch {min(self.epoch + 1, total):>{len(str(total))}}/{total}"

    def steps(self) -> str:
        """`69/690`, as wide as it will be at the end."""
        total = self.started.num_steps
        return f"{self.step:>{len(str(total))}}/{total}"

    def status(self, now: float) -> str:
        """`loss 0.2134  12,340 samples/s  0:12 left`, as far as it is known."""
        return "  ".join(part for part in (self._loss_text(), self._rate_text(), self._left_text(now)) if part)

    def _move_anchor(self, now: float) -> None:
        # The steps before the first log hold compilation and warm-up, which would make the rest look slow.
        if self._first_log is None:
            self._first_log = (now, self.step)
        else:
            self._anchor = self._first_log

    def _loss_text(self) -> str:
        return "" if self.loss is None else f"loss {number(self.loss)}"

    def _rate_text(self) -> str:
        if self._samples_per_second is not None:
            return f"{plain_number(self._samples_per_second)} samples/s"
        rate = self.steps_per_second()
        return "" if rate is None else f"{plain_number(rate)} steps/s"

    def _left_text(self, now: float) -> str:
        seconds = self.seconds_left(now)
        return "" if seconds is None else f"{clock(seconds)} left"


class Waiting:
    """A bar on standard error, taken away in the end; nothing where nobody looks."""

    def __init__(self, what: str) -> None:
        """`what` is counted."""
        self._what = what
        self._bar: RichProgress | None = None

    def __enter__(self) -> "Waiting":
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)
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
