"""Real processes that are ranks, for tests: started with plain variables, and all ended at the end."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests import warm

PATIENCE = 90


@dataclass
class Ended:
    code: int
    out: str
    err: str
    seconds: float
    """From the start of the wait to the end of the process."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def variables(rank: int, world: int, port: int, **more: str) -> dict[str, str]:
    return {
        **os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        **more,
    }  # fmt: skip


@contextmanager
def ranks(
    script: Path, *words: str, world: int = 2, started: Sequence[int] | None = None, **more: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Some or all ranks of a world; nothing is left of them afterwards."""
    port = free_port()
    running = [
        warm.Popen(
            [sys.executable, str(script), *words], env=variables(rank, world, port, **more),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (range(world) if started is None else started)
    ]  # fmt: skip
    try:
        yield running
    finally:
        for process in running:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def ends(running: Sequence[subprocess.Popen[str]]) -> list[Ended]:
    """How they end, all of them by themselves."""
    begun = time.monotonic()
    found = []
    for process in running:
        out, err = process.communicate(timeout=PATIENCE)
        found.append(Ended(process.returncode, out, err, time.monotonic() - begun))
    return found


def take_terminal() -> None:
    """For a process about to start in a session of its own: its input is the terminal from which signals come."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def children(process: int) -> list[int]:
    """The processes that a process has started, but not the one that serves it."""
    try:
        found = [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [child for child in found if not warm.is_server(child)]


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and that nobody asked about does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until_gone(processes: Sequence[int], seconds: float = PATIENCE) -> float:
    """Seconds until none of them runs; fails if that takes too long."""
    begun = time.monotonic()
    while any(is_alive(process) for process in processes):
        if time.monotonic() - begun > seconds:
            left = [process for process in processes if is_alive(process)]
            for process in left:
                os.kill(process, signal.SIGKILL)
            raise AssertionError(f"still alive after {seconds} s: {left}")
        time.sleep(0.05)
    return time.monotonic() - begun
