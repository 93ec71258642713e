"""`isoscale tensorboard`."""

import getpass
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isoscale.cli import complete
from isoscale.errors import UserError
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.observe.tensorboard.server import TensorBoardServer
    from isoscale.runs.run import Run

SECONDS_BETWEEN_LOOKS = 5.0
MOST_NAMES = 8


def tensorboard(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Directories or names of runs, or folders of runs; by default all in `runs`.",
            autocompletion=complete.runs,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, metavar="N", help="Port; by default the first free one from 6006 on."),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0 lets other machines in, and everyone there.")
    ] = "127.0.0.1",
) -> None:
    """Show runs in TensorBoard, and say how to reach it from your own computer."""
    from isoscale.observe.tensorboard.server import THIS_MACHINE, TensorBoardServer

    words = runs or []
    meant = _meant(words)
    shown = _with_events(meant)
    chosen = _port(host, port)
    if host not in THIS_MACHINE:
        echo(f"warning: everyone who can reach this machine at {host} can read these runs", err=True)
    # Let the end of a job or a terminal end TensorBoard as well, unless somebody asked to ignore it (nohup).
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        with TensorBoardServer(host, chosen) as server:
            server.show(shown)
            _say(_overview(server.names, len(meant) - len(shown)))
            server.wait_until_ready()
            _say(*_address(server))
            _wait(server, words)
    except KeyboardInterrupt:
        _say("\nTensorBoard has ended")


def _meant(words: list[str]) -> "list[Run]":
    """Each run once, whether it is named itself or lies in a folder that is named."""
    from isoscale.runs.run import Run

    found = [run for word in words for run in Run.all(Path(word)) or [Run.find(word)]]
    found = found if words else Run.all() or [Run.find()]
    return list({run.path.resolve(): run for run in found}.values())


def _with_events(runs: "list[Run]") -> list[tuple[str, Path]]:
    """Name and folder of every run that TensorBoard can show."""
    folders = {run: run.tensorboard.resolve() for run in runs}
    without = [run for run, folder in folders.items() if not any(folder.glob("*/events.*"))]
    if len(without) == len(runs):
        raise UserError(
            f"TensorBoard has nothing to show of {', '.join(str(run.path) for run in runs)}: no events were written "
            "there; train with observe.tensorboard=1 for curves, or 2 for pictures, figures and histograms too"
        )
    return [(run.path.resolve().name, folder) for run, folder in folders.items() if run not in without]


def _port(host: str, wanted: int | None) -> int:
    from isoscale.observe.tensorboard.server import USUAL_PORT, free_port, is_free

    if wanted is not None:
        if not is_free(host, wanted):
            raise UserError(f"cannot listen on port {wanted} of {host}; leave --port out to take one that is free")
        return wanted
    port = free_port(host)
    if port != USUAL_PORT:
        _say(f"port {USUAL_PORT} is taken, so that this is {port}")
    return port


def _wait(server: "TensorBoardServer", words: list[str]) -> None:
    """Until somebody ends it; runs that begin in the meantime are shown too, and those that go away do no harm."""
    while server.running:
        with suppress(UserError, OSError):
            server.show(_with_events(_meant(words)))
        time.sleep(SECONDS_BETWEEN_LOOKS)
    raise UserError(f"TensorBoard ended by itself; it said:\n{server.output()}")


def _say(*lines: str) -> None:
    echo(*lines, sep="\n")


def _overview(names: list[str], num_without: int) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    without = f"; of {num_without} more there are no events (observe.tensorboard=0)" if num_without else ""
    return f"TensorBoard shows {', '.join(names[:MOST_NAMES])}{more}{without}"


def _address(server: "TensorBoardServer") -> list[str]:
    """Where it is, and how to get there from elsewhere."""
    from isoscale.observe.tensorboard.server import reachable
    from isoscale.observe.text import table

    address = f"http://{reachable(server.host)}:{server.port}/"
    return table([("address", address), *_tunnel(server), ("end it", "Ctrl-C")])


def _tunnel(server: "TensorBoardServer") -> list[tuple[str, str]]:
    """On a cluster or at the other end of ssh, the node and the way to it."""
    from isoscale.parallel.environments.batch import batch_job

    job = batch_job()
    if job is None and "SSH_CONNECTION" not in os.environ:
        return []
    node = socket.gethostname() if job else socket.getfqdn()  # inside a cluster, nodes know each other by short names
    login = job.login or "LOGIN" if job else node
    where = f"{node}, in {job}" if job else node
    command = _tunnel_command(server, node, login)
    return [("runs on", where), ("tunnel", f"{command}\ntype this on your own computer, then open the address there")]


def _tunnel_command(server: "TensorBoardServer", node: str, login: str) -> str:
    """The ssh command that brings the page to one's own computer, from where only `login` can be reached."""
    from isoscale.observe.tensorboard.server import THIS_MACHINE

    port, user = server.port, getpass.getuser()
    if server.host not in THIS_MACHINE:
        return f"ssh -N -L {port}:{node}:{port} {user}@{login}"
    jump = "" if login == node else f"-J {user}@{login} "
    return f"ssh -N -L {port}:localhost:{port} {jump}{user}@{node}"
