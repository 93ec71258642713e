"""A worker process that does not come back from a sample: which one, which sample, since when, and in which line.

The training goes on waiting for it, because a disk or network that is gone may come back.
"""

import faulthandler
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds that a sample may take before somebody is told; and told again after twice as long, and so on."""
TO_ANSWER = 1.0
"""Seconds that a process has to say where it is."""
MOST_SHOWN = 8
_ASKS = signal.SIGUSR2
_NOT_BEGUN = -1.0
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STATES = {
    "D": "it waits for a disk or a network that does not answer, which no signal can interrupt",
    "T": "it was stopped (SIGSTOP)",
}


class Pulse:
    """What a worker process is doing, as the training can see it; made by the training and sent to the worker."""

    def __init__(self, context: Any) -> None:
        """For one worker, started by this context of multiprocessing."""
        self._doing = context.RawArray("d", [_NOT_BEGUN, time.monotonic()])
        self._answers, self._answer = context.Pipe(duplex=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"_doing": self._doing, "_answer": self._answer}

    def begin(self) -> None:
        """In the worker: from now on it says where it is when it is asked, also from within a library."""
        os.set_blocking(self._answer.fileno(), False)
        faulthandler.register(_ASKS, file=self._answer.fileno(), all_threads=True, chain=False)

    def reads(self, index: int) -> None:
        """In the worker: the next sample."""
        self._doing[:] = [index, time.monotonic()]

    def is_started(self) -> None:
        """In the training: the worker has its end of the connection."""
        self._answer.close()

    def close(self) -> None:
        """In the training: the worker is gone."""
        self._answers.close()

    @property
    def sample(self) -> int | None:
        """The sample that it read last; None where it has read none."""
        return None if self._doing[0] == _NOT_BEGUN else int(self._doing[0])

    @property
    def seconds(self) -> float:
        """Since when it has been doing that."""
        return time.monotonic() - float(self._doing[1])

    def stack(self, process: int) -> str:
        """Where a worker is, as it says itself; empty where it does not."""
        if self.sample is None:  # it might not listen yet, and would be ended
            return ""
        with suppress(OSError):
            os.kill(process, _ASKS)
            text, seconds = b"", TO_ANSWER
            while self._answers.poll(seconds):
                text, seconds = text + os.read(self._answers.fileno(), 1 << 16), 0.1
            return text.decode(errors="replace")
        return ""


class Waiting:
    """The training waits for a part of the data."""

    def __init__(self) -> None:
        """From now on."""
        self._told_at = 0.0
        self._next = PATIENCE

    def is_due(self, pulse: Pulse) -> bool:
        """Whether it is time to say that a worker has been at one sample for long."""
        if pulse.seconds < self._next:
            return False
        self._told_at = time.monotonic() - pulse.seconds
        self._next = 2 * max(self._next, pulse.seconds)
        return True

    @property
    def ended(self) -> str | None:
        """What to say when the part is there; nothing where nobody was told of the wait."""
        return f"came back after {time.monotonic() - self._told_at:.0f} s" if self._told_at else None


def describe(pulse: Pulse, process: int, asked: Sequence[int], dataset: str) -> str:
    """What a worker does, for whom somebody waits; `asked` are the samples that it was asked for."""
    seconds, sample = f"{pulse.seconds:.0f} s", pulse.sample
    several = f"{', '.join(map(str, asked[:MOST_SHOWN]))}{' …' * (len(asked) > MOST_SHOWN)}"
    doing = f"has not begun to read after {seconds}, and was asked for samples {several}"
    if sample is not None:
        doing = f"has been reading sample {sample} of {dataset} for {seconds}; it was asked for samples {several}"
    # The lines of the thread that reads, the innermost first, down to where the dataset was called.
    threads = re.split(r"^(?:Current thread|Thread) .*$", pulse.stack(process), flags=re.MULTILINE)
    reading = next((thread for thread in threads if _PACKAGE in thread), threads[-1])
    places = []
    for file, line, name in _LINE.findall(reading):
        if file.startswith(_PACKAGE):
            break
        places.append(f"{name}, {file}:{line}")
    state = _STATES.get(_state(process), "")
    lines = [f"{doing}{f': {state}' * bool(state)}", *(f"  in {place}" for place in places[:MOST_SHOWN])]
    lines.append(
        f"training goes on when it comes back. To see more: py-spy dump --pid {process}; if it never does, end the "
        "training (Ctrl-C twice, or kill), look at that sample, and start the same command again"
    )
    return "\n".join(lines)


def _state(process: int) -> str:
    """How the system sees a process, by its letter; empty where it does not say."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
