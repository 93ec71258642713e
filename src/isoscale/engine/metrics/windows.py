"""From accumulators on the device to what people see: one read-back a window, handled while the device goes on."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from isoscale.engine.metrics.accumulators import Reading, means
from isoscale.engine.step.context import OfEpoch, StepContext
from isoscale.engine.step.nan_guard import NanGuard
from isoscale.errors import UserError
from isoscale.observe.events import Logged
from isoscale.observe.observers import Observers
from isoscale.system.devices import Accelerator, Moment

MOST_IN_A_ROW = 50
"""Steps that may be left out one after the other, because they were not finite, before the training ends."""


class NotFinite(UserError):
    """The training broke down: a loss or gradient was NaN or infinite."""

    def __init__(self, since: int, step: int, loss: float) -> None:
        """It was sound at the step `since`, and at `step` it was not."""
        self.since, self.step = since, step
        self.what = (
            f"a loss or gradient became NaN or infinite between step {since} and step {step} (mean loss {loss:g}); "
            "nothing was saved since, what was saved before is good"
        )
        super().__init__(
            f"{self.what}. Try a smaller optimizer.lr, a longer schedule.warmup, train.clip=1, or look for bad samples "
            "in the data"
        )


class NothingTrained(NotFinite):
    """All steps of a training were left out."""

    def __init__(self, step: int) -> None:
        """There were so many."""
        super().__init__(0, step, math.nan)
        steps = "the only step was" if step == 1 else f"all {step:,} steps were"
        self.what = f"nothing was trained: {steps} left out, because a loss or gradient was NaN or infinite (train.nan)"
        self.args = (f"{self.what}. Look for bad samples in the data, or try train.nan=stop, which names the first",)


@dataclass
class _Pending:
    step: int
    epoch: int
    samples: int
    reading: Reading
    moment: Moment
    extra: dict[str, float]


class Journal:
    """Reads the accumulators of the training stage and tells the observers."""

    def __init__(
        self, context: StepContext, observers: Observers, nan_guard: NanGuard | None, accelerator: Accelerator
    ) -> None:
        """A journal of `context`; what is known of the nan_guard of steps is read along."""
        self._accelerator = accelerator
        self._context = context
        self._observers = observers
        self._flags = (nan_guard.latch, nan_guard.count) if nan_guard is not None else ()
        self._nan_guard = nan_guard
        self._mended = self._in_a_row = self._mended_before = 0
        self._pending: _Pending | None = None
        self._before: dict[str, tuple[float, float]] = {}
        self._last: tuple[int, int] = (0, 0)
        """Step and samples of the last log."""
        self._began = accelerator.moment()
        """When the running window began."""
        self._excluded = 0.0
        self._saving = 0.0
        """Seconds that the running window has spent on saving."""
        self.rates: list[tuple[int, float]] = []
        """(samples, seconds) of every window of this process, the first one left out: it holds warm-up."""
        self._first = True

    def start_clock(self) -> None:
        """Training begins now."""
        self._began = self._accelerator.moment()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave the time that this takes out of the rate of training: an evaluation, a checkpoint."""
        self.flush()
        begin = self._accelerator.moment()
        try:
            yield
        finally:
            self._excluded += begin.seconds_until(self._accelerator.moment())

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The same for a checkpoint; what the host spends on it is told with the next window."""
        with self.excluded():
            begin = time.perf_counter()
            try:
                yield
            finally:
                self._saving += time.perf_counter() - begin

    def begin(self, step: int, epoch: int, samples: int, extra: dict[str, float]) -> None:
        """Start reading the window that ends at `step`; it is told at the next `flush`, or at once if it is there."""
        self.flush()
        reading = self._context.recorder.read(*self._flags)
        self._pending = _Pending(step, epoch, samples, reading, self._accelerator.moment(), extra)
        if self._pending.reading.arrived:
            self.flush()

    def flush(self) -> None:
        """Tell what was read; waits only for work that was issued before the reading."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pairs = pending.reading.pairs()
        values = means(pairs, self._before)
        self._check(pending.step, pending.reading, values)
        self._tell_mended(pending)
        self._before = pairs
        shown = self._context.recorder.shown(values)
        named = self._context.of_window(shown)
        rate = self._rate(pending)
        self._last = pending.step, pending.samples
        self._observers.notify(Logged(pending.step, pending.epoch, {**named, **pending.extra, **rate}))

    def _tell_mended(self, pending: _Pending) -> None:
        """Say when steps were skipped, or gradients set to zero, since the last window."""
        count, self._mended = pending.reading.count - self._mended, pending.reading.count
        self._in_a_row = self._in_a_row + count if count == pending.step - self._last[0] else 0
        if self._in_a_row >= MOST_IN_A_ROW:  # the weights themselves are beyond repair: leaving out more is no training
            raise NotFinite(pending.step - self._in_a_row, pending.step, math.nan)
        if count:
            pending.extra["train/not_finite"] = float(count)
            steps = "a step" if count == 1 else f"{count} steps"
            self._observers.note(
                f"{steps} between step {self._last[0]} and step {pending.step} had losses or gradients that were NaN "
                "or infinite: left out, as train.nan says",
                "warning",
            )

    def check(self, step: int) -> None:
        """Look at the window that is still running: what is about to be saved must be sound."""
        self.flush()
        reading = self._context.recorder.read(*self._flags)
        self._check(step, reading, means(reading.pairs(), self._before))

    def _check(self, step: int, reading: Reading, values: dict[str, float]) -> None:
        loss = values.get("loss", 0.0)
        if reading.flag or not math.isfinite(loss):
            raise NotFinite(self._last[0], step, loss)

    def _rate(self, pending: _Pending) -> dict[str, float]:
        seconds = self._began.seconds_until(pending.moment) - self._excluded
        self._began, self._excluded = pending.moment, 0.0
        steps, samples = pending.step - self._last[0], pending.samples - self._last[1]
        if not self._first:
            self.rates.append((samples, seconds))
        self._first = False
        saving = {"time/saving_seconds": self._saving} if self._saving else {}
        self._saving = 0.0
        rates = {"time/samples_per_second": samples, "time/steps_per_second": steps}
        return {**{name: count / max(seconds, 1e-9) for name, count in rates.items()}, **saving}

    def show_epoch(self) -> None:
        """Let those who look at what was logged find the means over the running epoch, which ends."""
        context = self._context
        context.shown.update(context.of_epoch(context.recorder.read().pairs()).shown)

    def check_trained(self, step: int) -> None:
        """At the end, after so many steps: refuse to call it a training where all of them were left out."""
        if step and self._leaves_out and self._context.recorder.read(*self._flags).count >= step:
            raise NothingTrained(step)

    @property
    def _leaves_out(self) -> bool:
        return self._nan_guard is not None and self._nan_guard.policy != "zero"

    def end_epoch(self, epoch: int, num_steps: int) -> OfEpoch:
        """The means over an epoch of so many steps, and start counting anew."""
        self.flush()
        reading = self._context.recorder.read(*self._flags)
        if self._leaves_out and reading.count - self._mended_before >= num_steps:
            self._observers.note(
                f"no step of epoch {epoch} counts: the losses or gradients of all {num_steps} were NaN or infinite, so "
                "that the weights are those of the epoch before",
                "warning",
            )
        self._mended_before = reading.count
        found = self._context.of_epoch(reading.pairs())
        self._context.shown.update(found.shown)
        self._context.reset_metrics()
        self._context.recorder.reset()
        self._before = {}
        return found

    @property
    def mean_rate(self) -> float | None:
        """Samples a second over all windows but the first."""
        seconds = sum(rate[1] for rate in self.rates)
        return sum(rate[0] for rate in self.rates) / seconds if seconds else None

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where the running window began."""
        self.flush()
        before = {name: list(pair) for name, pair in self._before.items()}
        mended = {"mended": self._mended, "mended_before": self._mended_before}
        return {}, {"before": before, "last": list(self._last), **mended}

    def load(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """Take over a state."""
        self._before = {name: (pair[0], pair[1]) for name, pair in values["before"].items()}
        self._last = values["last"][0], values["last"][1]
        self._mended, self._mended_before = values.get("mended", 0), values.get("mended_before", 0)
