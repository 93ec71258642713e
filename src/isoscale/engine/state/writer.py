"""Saving while the training goes on: a copy of the state is made in its way, and written in a thread beside it."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from types import TracebackType

from isoscale.engine.state.checkpoint import Checkpoints, State
from isoscale.engine.state.host_snapshot import HostSnapshot, Snapshot
from isoscale.errors import Stopped
from isoscale.observe.metric_log import MetricLog

SHARE = 0.05
"""Of the training's time, for saving where the recipe leaves it to us when to save."""
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT}


class Saver:
    """Writes one checkpoint at a time; what goes wrong is raised in the thread of the caller.

    Leaving it as a context waits for what is being written, unless by Ctrl-C: the writer never keeps a process alive.
    """

    def __init__(self, checkpoints: Checkpoints, sync_log: Callable[[], None] = lambda: None) -> None:
        """Save to `checkpoints`; `sync_log` brings to the disk what a checkpoint relies on, before it gets its name."""
        self._checkpoints = checkpoints
        self._sync_log = sync_log
        self._snapshot = HostSnapshot()
        self._best_snapshot = HostSnapshot()
        self._best: tuple[int, Snapshot] | None = None
        """The best state since the last checkpoint, where it was too early to write it."""
        self._writes_best = False
        self._spent = self._last_spent = 0.0
        """Seconds that all checkpoints, and the last one, took: the training's waiting, and the writer's work."""
        self._thread: Thread | None = None
        self._failure: BaseException | None = None
        self.newest: tuple[int, Snapshot, bool] | None = None
        """Step and state of the last checkpoint, and whether it was the best; the next one takes its place."""
        self.longest = 0.0
        """Seconds that a checkpoint took, from the copy to the disk."""

    def is_early(self, seconds: float) -> bool:
        """Whether one more checkpoint would make saving more than its share of a training of so many seconds."""
        return self._spent + self._last_spent > SHARE * seconds

    def keep_best(self, step: int, state: State) -> None:
        """Copy the best state so far, to be written before the next checkpoint."""
        began = time.perf_counter()
        if self._writes_best:  # from the same memory
            self.wait()
        self._best = step, self._best_snapshot.take(*state)
        self._spent += time.perf_counter() - began

    def save(self, step: int, state: State, best: bool = False) -> None:
        """Copy the state, after waiting for the last one to be written, and leave the rest to the writer."""
        began = time.perf_counter()
        self.wait()
        self._began = time.perf_counter()
        self.newest = None
        snapshot = self._snapshot.take(*state)
        self.newest = step, snapshot, best
        states = [(step, snapshot, best)]
        self._writes_best = self._best is not None and not best
        if self._best is not None and not best:
            states.insert(0, (*self._best, True))
        self._best = None
        self._last_spent = time.perf_counter() - began
        self._spent += self._last_spent
        self._thread = Thread(target=self._write, args=(states,), name="isoscale-saver", daemon=True)
        with _signals_blocked():
            self._thread.start()

    def check(self) -> None:
        """Raise what the writer ran into, if it has ended."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, Stopped):
            self.wait()
        elif isinstance(error, Exception):
            try:
                self.wait()
                if self._best is not None:
                    self._write([(*self._best, True)])
                    self.wait()
            except Exception as failure:
                error.add_note(str(failure))  # what went wrong first is what the user reads first

    def _write(self, states: Sequence[tuple[int, Snapshot, bool]]) -> None:
        began = time.thread_time()
        try:
            for step, snapshot, best in states:
                snapshot.wait()
                self._checkpoints.write(step, snapshot, best, self._sync_log)
            self.longest = max(self.longest, time.perf_counter() - self._began)
        except BaseException as error:
            self._failure = error
        worked = time.thread_time() - began
        self._last_spent += worked
        self._spent += worked


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A thread that starts here gets no signals: the main thread must wake up for them, and nothing else may."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _FAULTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class Output:
    """Where a training writes; as it stands, nowhere."""

    checkpoints: Checkpoints | None = None
    metric_log: MetricLog | None = None
    folder: Path | None = None
    """Where people leave the files STOP and SAVE."""
    check_folder: Callable[[], None] = lambda: None
    """Raises where the folder is not this process's any more."""
    trace: Path | None = None
    """Where a trace of some steps goes, where time is measured."""
    record: Callable[..., None] = lambda **values: None
    """Writes something down about the run."""

    @property
    def saver(self) -> Saver | None:
        """What writes checkpoints beside the training."""
        if self.checkpoints is None:
            return None
        return Saver(self.checkpoints, self.metric_log.sync) if self.metric_log else Saver(self.checkpoints)


NOWHERE = Output()
