"""Several ranks on this machine: one process each, started, listened to and ended together.

The launcher imports nothing heavy. Rank 0 has the terminal; what the others say is kept, and shown where one of them
ends and nobody could tell why.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from isoscale.errors import DONE, FAILED, INTERRUPTED, START_AGAIN, UserError
from isoscale.parallel import secret
from isoscale.parallel.environments.find import PARENT, find
from isoscale.parallel.health.server import GO_ON
from isoscale.system import signals
from isoscale.system.printing import echo

_LOOK_EVERY = 0.05
TO_END = 10.0
"""Seconds that the other ranks have to end by themselves after one has failed."""
TO_OBEY = 5.0
"""Seconds that a rank has to end when it is told to."""
LINES_SHOWN = 30
FIRST_PORT, NUM_PORTS, APART = 20000, 12000, 61
"""Ports below those that systems hand out, and how far those of processes that follow each other are apart."""
PR_SET_PDEATHSIG = 1
_control: Any = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None
"""Looked up here: between fork and exec, where other threads may hold its locks, the linker must not be asked."""


def launch(num_ranks: int, words: Sequence[str]) -> int:
    """Run a command (its words, the program first) as several ranks; the exit code of all of them together."""
    found = find()
    if found.world > 1 or "WORLD_SIZE" in os.environ:
        raise UserError(
            f"--devices starts ranks, but this process is already rank {found.rank} of {found.world}, started by "
            f"{found.launcher}; leave out --devices"
        )
    crew = _Crew()
    with crew.listening():
        try:
            crew.start(command_of(words), num_ranks)
            crew.wait()
        finally:
            crew.kill()
    crew.tell()
    return crew.exit_code


def check_alone(what: str) -> None:
    """Refuse to be one of several processes, where this one starts others: `what` says which."""
    found = find()
    if found.world > 1:
        raise UserError(
            f"{what} itself, and this process is rank {found.rank} of {found.world}, started by {found.launcher}; "
            "start it once, or with --job on a login node"
        )


def is_rank() -> bool:
    """Whether this process is one that `launch` has started."""
    return PARENT in os.environ


def command_of(words: Sequence[str]) -> list[str]:
    """The same command once more: by the script that was started, if it was one, or else without the working folder."""
    script = Path(words[0])
    started = ["-P", "-m", "isoscale"] if script.name == "__main__.py" or not script.is_file() else [str(script)]
    return [sys.executable, *started, *words[1:]]


class _Rank:
    """One process, and the last lines that it wrote."""

    def __init__(self, command: Sequence[str], rank: int, variables: dict[str, str]) -> None:
        kept = {}
        if rank > 0:
            kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            variables = {**variables, "PYTHONUNBUFFERED": "1"}  # or what it printed before an error comes after it
        self.rank = rank
        self.was_told = False
        """Whether the launcher has ended it."""
        self._passed_on: set[int] = set()
        self.lines: deque[str] = deque(maxlen=LINES_SHOWN)
        # In a group of its own, it gets a Ctrl-C of the terminal once, from the launcher, and not twice.
        self.process: subprocess.Popen[str] = subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, text=True, errors="replace",
            process_group=0, preexec_fn=end_with_parent(os.getpid()), **kept,
        )  # type: ignore[call-overload]  # fmt: skip
        self._reader = threading.Thread(target=self._keep, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _keep(self, output: IO[str] | None) -> None:
        for line in output or ():
            self.lines.append(line)

    def tell(self, number: int) -> None:
        """Pass a request on to a process that still runs; its sender may have reached it already."""
        self._passed_on.add(number)
        if self.process.poll() is None:
            self.process.send_signal(number)

    @property
    def was_asked(self) -> bool:
        """Whether a request to stop was passed on to it."""
        return bool(self._passed_on)

    def end(self, number: int) -> None:
        """End a process that does not end by itself."""
        if self.process.poll() is None:
            self.was_told = True
            self.process.send_signal(number)

    @property
    def code(self) -> int | None:
        """The exit code; negative for a signal, None while it runs.

        One that a request to stop has ended, because it came before the process could listen, has stopped on request.
        """
        code = self.process.poll()
        if code is None or -code not in self._passed_on:
            return code
        return INTERRUPTED if -code == signal.SIGINT else START_AGAIN

    @property
    def failed(self) -> bool:
        """Whether it ended by itself, and not well."""
        return not self.was_told and self.code not in (None, DONE, START_AGAIN)

    def last_lines(self) -> str:
        """What it wrote last; a worker that it left behind may hold its output open."""
        self._reader.join(timeout=1)
        return "".join(self.lines)


class _Crew:
    """All ranks of this machine."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._requests = signals.Requests()
        self._first_failed: _Rank | None = None
        self._first_stopped: float | None = None
        """When the first of them had stopped on request."""
        self._deadline: tuple[float, int] | None = None
        """When to end the ranks that are left, and by which signal."""

    def listening(self) -> AbstractContextManager[None]:
        """Keep the signals that come, for `wait` to pass them on."""
        return signals.hearing(self._requests.keep)

    def start(self, command: Sequence[str], num_ranks: int) -> None:
        """Start all ranks."""
        common = {
            PARENT: str(os.getpid()), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()),
            secret.VARIABLE: secret.fresh(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores() // num_ranks)),
        }  # fmt: skip
        for rank in range(num_ranks):
            self._ranks.append(_Rank(command, rank, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}))

    def wait(self) -> None:
        """Wait until all have ended, and see to it that they do."""
        while any(rank.code is None for rank in self._ranks):
            self._pass_signals_on()
            self._stop_together()
            if self._first_failed is None:
                self._notice_failure()
            if self._deadline is not None and time.monotonic() > self._deadline[0]:
                self._end_all(self._deadline[1])
            time.sleep(_LOOK_EVERY)
        self._notice_failure()

    def _notice_failure(self) -> None:
        failed = [rank for rank in self._ranks if rank.failed]
        if failed and self._first_failed is None:
            # Of those that failed at the same time, one that was killed is the reason for the others.
            self._first_failed = min(failed, key=lambda rank: (rank.code or 0) > 0)
            self._deadline = self._deadline or (time.monotonic() + TO_END, signal.SIGTERM)

    def _stop_together(self) -> None:
        """A rank that somebody has stopped before it met the others leaves them waiting for it: they stop too."""
        if not any(rank.code == START_AGAIN for rank in self._ranks):
            return
        self._first_stopped = self._first_stopped or time.monotonic()
        if time.monotonic() > self._first_stopped + TO_OBEY:  # those that are on their way out need no word
            for rank in self._ranks:
                if not rank.was_asked:
                    rank.tell(signal.SIGTERM)

    def _pass_signals_on(self) -> None:
        while self._requests.kept:
            number, meaning = self._requests.kept.pop(0)
            for rank in self._ranks:
                rank.tell(number)
            if meaning == "now" and self._was_interrupted:
                self._deadline = (time.monotonic() + TO_OBEY, signal.SIGKILL)
            self._was_interrupted |= number == signal.SIGINT

    _was_interrupted = False
    """Whether somebody has pressed Ctrl-C; a second one ends also those who do not listen."""

    def _end_all(self, number: int) -> None:
        for rank in self._ranks:
            rank.end(number)
        self._deadline = (time.monotonic() + TO_OBEY, signal.SIGKILL)

    def kill(self) -> None:
        """End what still runs, however it came to that."""
        for rank in self._ranks:
            rank.end(signal.SIGKILL)

    def tell(self) -> None:
        """Show why a rank failed, where no rank could."""
        failed = self._first_failed
        if failed is None or not failed.failed:
            return
        code = failed.code or 0
        first = self._ranks[0]
        is_told = first.failed and (first.code or 0) > 0
        if code < 0:
            ended = f"error: rank {failed.rank} was ended by {signal.Signals(-code).name}"
            echo(ended if is_told else f"{ended}\n  {GO_ON}", err=True)
        text = failed.last_lines()
        if text and (code < 0 or not is_told):
            echo(f"the last lines of rank {failed.rank}:\n{text}".rstrip(), err=True)

    @property
    def exit_code(self) -> int:
        """0 if all are done, 75 if they stopped on request, or else that of the first to fail; 1 for a signal."""
        if self._first_failed is not None and self._first_failed.failed:  # and was not asked to end, as heard later
            return max(self._first_failed.code or FAILED, FAILED)
        codes = [rank.code for rank in self._ranks]
        return DONE if not any(codes) else START_AGAIN if START_AGAIN in codes else FAILED


def end_with_parent(parent: int) -> Callable[[], None] | None:
    """For a process about to start: be asked to stop by the system when the launcher ends, however it ends."""
    return partial(_end_with, parent) if _control is not None else None


def _end_with(parent: int) -> None:
    _control(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(FAILED)


def _free_port() -> int:
    """A port that nobody has, and that the system gives to nobody before rank 0 listens there, seconds from now."""
    start = os.getpid() * APART
    for number in range(start, start + NUM_PORTS):
        port = FIRST_PORT + number % NUM_PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise UserError(f"all ports from {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1} are taken; use torchrun --standalone")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
