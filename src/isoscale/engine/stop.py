"""Requests to stop: signals set a flag, and the loop looks at it between launches."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


class StopRequest:
    """Whether someone asked to stop. The first request finishes the launch and saves; a second Ctrl-C stops now."""

    def __init__(self) -> None:
        """Nobody has asked yet."""
        self.reason: str | None = None

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.reason is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None and number == signal.SIGINT:
            os.write(2, b"\nstopping now; the last checkpoint is the place to go on from\n")
            raise KeyboardInterrupt
        self.reason = signal.Signals(number).name
        hint = "; Ctrl-C again stops now" if number == signal.SIGINT else ""
        os.write(2, f"\n{self.reason}: finishing the launch and saving{hint}\n".encode())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals for a while; outside of the main thread there is nothing to handle."""
        before: dict[int, Any] = {}
        try:
            for number in _SIGNALS:
                before[number] = signal.signal(number, self._handle)
        except ValueError:  # not the main thread: a notebook's worker, say
            pass
        try:
            yield
        finally:
            for listened, handler in before.items():
                signal.signal(listened, handler)
