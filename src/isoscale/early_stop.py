"""A request to stop that comes before the training listens for one itself."""

import os
import signal

from isoscale.errors import Stopped

_asked: str | None = None


def listen() -> None:
    """From now on such a request ends the process as it would later: start me again."""
    global _asked
    _asked = None
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _stop)


def asked() -> str | None:
    """The signal that came, if one did.

    What it raises may reach nobody, or as another error: it interrupts whatever runs, imports and C code among it.
    """
    return _asked


def _stop(number: int, frame: object) -> None:
    global _asked
    _asked = signal.Signals(number).name
    os.write(2, f"{_asked}: stopped before the training began; nothing is lost\n".encode())
    raise Stopped
