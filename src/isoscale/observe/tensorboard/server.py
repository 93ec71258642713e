"""TensorBoard as a process that shows several runs, each under a short name."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from isoscale.errors import UserError
from isoscale.system.printing import one_line

USUAL_PORT = 6006
EVERYWHERE = ("0.0.0.0", "::", "")
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
_PROGRAM = """
import os, signal, sys, threading

def end_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGTERM)

threading.Thread(target=end_with_parent, daemon=True).start()
from tensorboard.main import run_main
sys.exit(run_main())
"""
"""TensorBoard that also ends when whoever started it was killed, seen by the end of its standard input."""
LONGEST_NAME = 120
"""Of a run, in characters, where names of links have to be different and may have 255 bytes."""
_SECONDS_TO_START = 120.0
_SECONDS_TO_END = 5.0


class TensorBoardServer:
    """TensorBoard on a folder of links, one per run, so that charts say `digits-1/val` wherever the runs are."""

    def __init__(self, host: str, port: int) -> None:
        """Starts with the `with` statement, and is gone after it."""
        self.host = host
        self.port = port
        self._shown: dict[str, Path] = {}

    def __enter__(self) -> Self:
        """Start the process; `wait_until_ready` says when it answers."""
        self._folder = tempfile.TemporaryDirectory(prefix="isoscale-tensorboard-")
        self._links = Path(self._folder.name) / "runs"
        self._links.mkdir()
        self._output = (Path(self._folder.name) / "output.txt").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, "--logdir", str(self._links), "--host", self.host,
             "--port", str(self.port), "--reload_multifile", "true", "--samples_per_plugin", "images=100"],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, stdin=subprocess.PIPE, stdout=self._output,
            stderr=subprocess.STDOUT, start_new_session=True,  # Ctrl-C ends it through us, with its own children
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process and what it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(_SECONDS_TO_END)
            except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                continue
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._output.close()
        self._folder.cleanup()

    def show(self, runs: Iterable[tuple[str, Path]]) -> None:
        """Show these folders of events, each under its name; those shown already stay as they are."""
        for name, folder in runs:
            if folder not in self._shown.values():
                name = self._free_name(one_line(name)[:LONGEST_NAME], folder)
                (self._links / name).symlink_to(folder, target_is_directory=True)
                self._shown[name] = folder

    def _free_name(self, name: str, folder: Path) -> str:
        longer = f"{one_line(folder.parents[1].name)[:LONGEST_NAME]}-{name}"
        names = [name, longer, *(f"{longer}-{number}" for number in range(2, 1000))]
        return next(candidate for candidate in names if candidate not in self._shown)

    @property
    def names(self) -> list[str]:
        """Of the runs that are shown."""
        return list(self._shown)

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Wait until the page answers."""
        give_up = time.monotonic() + _SECONDS_TO_START
        while not self._answers():
            if not self.running or time.monotonic() > give_up:
                raise UserError(f"TensorBoard did not start; it said:\n{self.output()}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(reachable(self.host), self.port, timeout=5)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def output(self) -> str:
        """What TensorBoard itself said."""
        return Path(self._output.name).read_text(errors="replace").strip()


def reachable(host: str) -> str:
    """Where a browser on this machine finds a server that listens on `host`."""
    return "localhost" if host in (*EVERYWHERE, *THIS_MACHINE) else host


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UserError(f"cannot listen on {host}: {error.strerror}; give an address of this machine") from None
    family, *_, address = found[0]
    try:
        socket.create_server(address, family=family).close()
    except OSError:
        return False
    return True


def free_port(host: str) -> int:
    """TensorBoard's usual port, or the next one that nobody uses."""
    ports = range(USUAL_PORT, USUAL_PORT + 100)
    port = next((port for port in ports if is_free(host, port)), None)
    if port is None:
        raise UserError(f"cannot listen on {host} at any port of {ports[0]}…{ports[-1]}; name one with --port")
    return port
