"""Keeps those who watch a run from writing where this process must not write any more."""

from collections.abc import Callable
from threading import current_thread

from isoscale.observe.events import Event


class Fence:
    """Told before all others; raises where the run is another process's by now, and then nobody else is told."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises; it is asked in the thread that trains, which can end the training."""
        self._check = check
        self._thread = current_thread()

    def notify(self, event: Event) -> None:
        """Ask."""
        if current_thread() is self._thread:
            self._check()

    def close(self) -> None:
        """Nothing to close."""
