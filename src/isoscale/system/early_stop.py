"""A request to stop that comes before the training listens for one itself.

It raises wherever the process is just then. That may be inside an import or a library's own code, where it comes out as
another error, or as none; and a library may not let Python hear of it for minutes. So a thread makes sure of the end.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from isoscale.errors import INTERRUPTED, START_AGAIN, StoppedEarly
from isoscale.system import signals
from isoscale.system.printing import shout

PATIENCE = 5.0
"""Seconds to end in an orderly way."""
_asked: str | None = None
_requests = signals.Requests()
_guard: threading.Thread | None = None


def listen() -> None:
    """From now on such a request ends the process as it would later: start me again. Ctrl-C interrupts it."""
    global _asked, _guard, _requests
    if signal.getsignal(signal.SIGTERM) is _stop:
        return
    signals.own_process()
    _asked, _requests = None, signals.Requests()
    for number in signals.heard():
        signal.signal(number, _stop)
    if _guard is None:
        sys.unraisablehook = partial(_report_unraisable, sys.unraisablehook)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # told at once, whatever the main thread is in
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a signal to a child is not for this one
        _guard = threading.Thread(target=_see_to_it, args=(reading,), daemon=True, name="isoscale-early-stop")
        _guard.start()


def _report_unraisable(report: Callable[[Any], Any], found: Any) -> None:
    """A request that comes where nothing can be raised is no error: `asked` tells it to whoever trains."""
    if not isinstance(found.exc_value, StoppedEarly):
        report(found)


def asked() -> str | None:
    """The signal that came, if one did."""
    return _asked


def exit_code() -> int | None:
    """What the process ends with because of that signal, if one came."""
    return None if _asked is None else _code(signal.Signals[_asked])


def _code(number: int) -> int:
    return INTERRUPTED if number == signal.SIGINT else START_AGAIN


def _stop(number: int, frame: object) -> None:
    """Raise once: raised again on the way out, it would be an error of its own."""
    global _asked
    meaning = _requests.meaning(number)
    if meaning == "now":
        os._exit(exit_code() or INTERRUPTED)
    if meaning == "again":
        return
    _asked = signal.Signals(number).name
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    shout(f"{_asked}: stopped before the training began; nothing is lost\n")
    raise StoppedEarly


def _see_to_it(reading: int) -> None:
    """End a process that has not ended by itself and did not listen, neither when it was asked nor since."""
    while received := os.read(reading, 1):
        number = received[0]
        if number in signals.ALL and signal.getsignal(number) is _stop:
            time.sleep(PATIENCE)
            if signal.getsignal(number) is _stop:
                if number == signal.SIGINT:
                    shout("interrupted\n")
                os._exit(_code(number))
