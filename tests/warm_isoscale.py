"""The command `isoscale` without its start: a process that has imported everything, and forks for each command.

`python tests/warm_isoscale.py SOCKET --serve` waits for commands, and `… SOCKET train` is one. Most of the time of
a short command is the import of torch, and the pages of the documentation have dozens of them.
"""

import importlib
import json
import os
import signal
import socket
import sys
from typing import NoReturn

IMPORTED = (
    "isoscale.api", "isoscale.cli.main", "isoscale.project", "isoscale.science.images", "isoscale.study.compare",
    "isoscale.study.report", "torch._dynamo",
)  # fmt: skip


def serve(address: str) -> NoReturn:
    """Take commands for as long as somebody lets this process live."""
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        while True:
            connection, _ = server.accept()
            message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
            if os.fork() == 0:
                keep(json.loads(message), descriptors, connection)
            for descriptor in (*descriptors, connection.detach()):
                os.close(descriptor)


def keep(command: dict, descriptors: list[int], connection: socket.socket) -> NoReturn:
    """Have the command that was asked for done, and tell how it ended: some end without a word to Python."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        connection.close()
        become(command, descriptors)
    _, status = os.waitpid(child, 0)
    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(command: dict, descriptors: list[int]) -> NoReturn:
    """Be the command that was asked for: its words, folder, variables, input and output."""
    from isoscale.cli.main import run

    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["variables"])
    sys.argv = ["isoscale", *command["words"]]
    sys.path[0] = os.path.dirname(sys.executable)
    code: object = 1
    try:
        run()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def ask(address: str, words: list[str]) -> int:
    """Have a command done; returns its exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        message = {"words": words, "folder": os.getcwd(), "variables": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(message).encode()], [0, 1, 2])
        return int(connection.recv(16) or 1)


if __name__ == "__main__":
    if sys.argv[2:] == ["--serve"]:
        serve(sys.argv[1])
    sys.exit(ask(sys.argv[1], sys.argv[2:]))
