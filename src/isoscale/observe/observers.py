"""Everyone who watches a run, as one observer."""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from isoscale.errors import UserError
from isoscale.observe.events import Event, Level, Note, Observer


class Observers:
    """Tells every observer; one that fails is dropped with a warning to the rest.

    An observer that the run cannot go on without, such as the metric log, raises a UserError, which ends the run.
    """

    def __init__(self, observers: Iterable[Observer], directory: Path | None = None) -> None:
        """Those who watch a run, which is in `directory` if it is anywhere."""
        self._observers = list(observers)
        self.directory = directory
        self.lock = threading.RLock()
        """Held while an event is told: what other ranks say comes from another thread."""

    def add(self, observer: Observer, first: bool = False) -> None:
        """One more who is told from now on, after those who are there or before them."""
        self._observers.insert(0 if first else len(self._observers), observer)

    def notify(self, event: Event) -> None:
        """Tell all."""
        with self.lock:
            for observer in list(self._observers):
                try:
                    observer.notify(event)
                except UserError:
                    raise
                except Exception as error:
                    self._drop(observer, error)

    def forget(self, *kinds: type[Observer]) -> None:
        """Let go of some without a last word: what they write to is no longer ours."""
        with self.lock:
            self._observers = [observer for observer in self._observers if not isinstance(observer, kinds)]

    def writer(self) -> Any | None:
        """TensorBoard's SummaryWriter, for what a task shows itself; None where nobody writes for TensorBoard."""
        make = next((each.writer for each in self._observers if hasattr(each, "writer")), None)
        return None if make is None else make()

    def flush(self) -> None:
        """Let observers bring to their files what they hold back."""
        with self.lock:
            for observer in list(self._observers):
                flush = getattr(observer, "flush", None)
                try:
                    if flush is not None:
                        flush()
                except Exception as error:
                    self._drop(observer, error)

    def note(self, text: str, level: Level = "info") -> None:
        """Tell all one line that the user should know."""
        self.notify(Note(text, level))

    def close(self) -> None:
        """Close all, also when one fails; what the run cannot do without is raised at the end."""
        failure: UserError | None = None
        while self._observers:
            observer = self._observers[0]
            try:
                observer.close()
                self._observers.remove(observer)
            except UserError as error:
                failure = failure or error
                self._observers.remove(observer)
            except Exception as error:
                self._drop(observer, error)
        if failure:
            raise failure

    def _drop(self, observer: Observer, error: Exception) -> None:
        if observer not in self._observers:
            return
        self._observers.remove(observer)
        with suppress(Exception):
            observer.close()
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        self.note(f"{type(observer).__name__} failed and is switched off, training goes on: {reason}{where}", "warning")


class Fence:
    """Told before all others; raises where the run is another process's by now, and then nobody else is told."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises; it is asked in the thread that trains, which can end the training."""
        self._check = check
        self._thread = threading.current_thread()

    def notify(self, event: Event) -> None:
        """Ask."""
        if threading.current_thread() is self._thread:
            self._check()

    def close(self) -> None:
        """Nothing to close."""
