"""Python processes that start in milliseconds: forked from one that has imported torch, which takes seconds.

`warm.Popen([sys.executable, "-m", "isoscale", "train"])` and `warm.run` are those of `subprocess`, for commands of this
interpreter: a script, `-m` or `-c`. What such a process starts itself with `subprocess` is forked too: the ranks of
`--devices 2`, the runs of a sweep. A test that is about imports, or about the first moments of a process, uses
`subprocess` itself, and is cold.

Each process that wants to start others has a *server*: a child that does nothing else, so that it has no threads and
none of its parent's state. A new process is forked from there by way of one that ends at once, and falls to the
process that asked, which has told the system that it takes such orphans: it is a child like any other. Only Linux has
that; elsewhere all processes are cold.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import io
import json
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "isoscale.api", "isoscale.cli.main", "isoscale.cli.train.init", "isoscale.science.images", "isoscale.study.compare",
    "isoscale.study.report", "isoscale.launch.local", "torch.distributed", "torch._dynamo", "torch.utils.tensorboard",
    "torchmetrics.classification", "pytest", "tests.helpers",
)  # fmt: skip

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_NAME = b"warm server"
_FOR_OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What comes to the group of a server is for the process that it serves."""
_ARGUMENTS = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_control = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_server: socket.socket | None = None
_is_warm = False
"""Whether this process was forked for a test."""
_asking = threading.Lock()


class Popen(subprocess.Popen):
    """A process as `subprocess` has it, forked if it is one of this interpreter and asks for nothing unusual."""

    def _execute_child(self, args: Any, executable: Any, *others: Any) -> None:
        asked = _ARGUMENTS.bind(self, args, executable, *others).arguments
        if not _can_be_forked(asked):
            super()._execute_child(args, executable, *others)  # type: ignore[misc]
            return
        request = {
            "words": [os.fspath(word) for word in args[1:]],
            "folder": os.getcwd() if asked["cwd"] is None else os.fspath(asked["cwd"]),
            "variables": dict(os.environ if asked["env"] is None else asked["env"]),
            "before": asked["preexec_fn"],
            "session": asked["start_new_session"],
            # Not in the group of the tests, on which the kernel might hang up: see the end of this file.
            "group": 0 if asked["process_group"] in (None, -1) and not _is_warm else asked["process_group"],
        }
        pipes = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        try:
            self.pid = _ask(request, [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)])
        finally:
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(asked[name] for name in ends))  # type: ignore[attr-defined]
        self._child_created = True


def run(
    words: Sequence[Any], *, input: Any = None, check: bool = False, timeout: float | None = None,
    capture_output: bool = False, **more: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """A process from start to end."""
    if input is not None:
        more["stdin"] = subprocess.PIPE
    if capture_output:
        more.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Popen(words, **more) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


_CLIENT = """
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(connection, [message], [0, 1, 2])
sys.exit(int(connection.recv(16) or 1))
"""


@contextmanager
def command_in(folder: Path) -> Iterator[None]:
    """A command `isoscale` in a folder, to be put on the PATH of a shell: each call of it is a warm process."""
    address = str(folder / "socket")
    (folder / "client.py").write_text(_CLIENT.format(address=address))
    script = folder / "isoscale"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{folder}/client.py" "$@"\n')
    script.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as calls:
        calls.bind(address)
        calls.listen()
        threading.Thread(target=_answer_calls, args=(calls,), daemon=True).start()
        yield
        calls.shutdown(socket.SHUT_RDWR)


def _answer_calls(calls: socket.socket) -> None:
    with suppress(OSError):  # the end
        while True:
            threading.Thread(target=_answer_call, args=(calls.accept()[0],), daemon=True).start()


def _answer_call(connection: socket.socket) -> None:
    with connection:
        message, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        words, folder, variables = json.loads(message)
        script = str(Path(sys.executable).with_name("isoscale"))
        process = Popen(
            [sys.executable, script, *words], cwd=folder, env=variables, stdin=streams[0], stdout=streams[1],
            stderr=streams[2],
        )  # fmt: skip
        for stream in streams:
            os.close(stream)
        connection.send(str(process.wait()).encode())


def is_server(process: int) -> bool:
    """Whether a child of a warm process is its server."""
    try:
        return Path(f"/proc/{process}/comm").read_text().strip() == _NAME.decode()
    except OSError:
        return False


def _can_be_forked(asked: dict[str, Any]) -> bool:
    """Whether a process is one of this interpreter and asks for nothing that only a new one can have."""
    words = asked["args"]
    is_python = not isinstance(words, (str, bytes, os.PathLike)) and len(words) > 1 and str(words[0]) == sys.executable
    if _control is None or not is_python:
        return False
    is_option = str(words[1]).startswith("-") and str(words[1]) not in ("-m", "-c", "-P")
    if is_option or any(asked[name] for name in ("executable", "pass_fds", "shell")):
        return False
    try:
        return bool(pickle.dumps(asked["preexec_fn"]))
    except (AttributeError, pickle.PicklingError):
        return False


def _ask(request: dict[str, Any], descriptors: list[int]) -> int:
    """Have this process's server start a process; returns its number."""
    global _server
    with _asking:
        if _server is None:
            _server, theirs = socket.socketpair()
            _control(_PR_SET_CHILD_SUBREAPER, 1)
            path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
            # The level leaves out a warning of torch that only forked processes get.
            variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            with theirs:
                subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=variables,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                )  # fmt: skip
        message = pickle.dumps(request)
        socket.send_fds(_server, [struct.pack("q", len(message))], descriptors)
        _server.sendall(message)
        answer = _server.recv(8, socket.MSG_WAITALL)
    assert len(answer) == 8, "the server of warm processes has ended"
    return int(struct.unpack("q", answer)[0])


def _serve(asked: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Start what is asked for, for as long as the parent lives; returns in each new process, with the request."""
    _control(_PR_SET_NAME, _NAME)
    for number in _FOR_OTHERS:
        signal.signal(number, signal.SIG_IGN)
    while True:
        header, descriptors, _, _ = socket.recv_fds(asked, 8, 3)
        if not header:
            os._exit(0)
        message = asked.recv(struct.unpack("q", header)[0], socket.MSG_WAITALL)
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == middle:
                time.sleep(0.0002)
            for number in _FOR_OTHERS:
                signal.signal(number, signal.SIG_DFL)
            asked.sendall(struct.pack("q", os.getpid()))
            asked.close()
            return pickle.loads(message), descriptors
        os.waitpid(middle, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Have the streams, folder and variables that were asked for, as a new process has them."""
    global _is_warm
    _is_warm = True
    assert _server is not None
    _control(_PR_SET_NAME, b"python")
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.closerange(3, _server.fileno())
    os.closerange(_server.fileno() + 1, 1 << 20)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if request["variables"].get("PYTHONUNBUFFERED"):
        sys.stdout = io.TextIOWrapper(open(1, "wb", buffering=0, closefd=False), write_through=True)  # noqa: SIM115
    else:
        sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    subprocess.Popen = Popen  # type: ignore[misc]
    np.random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    is_number = threads.isascii() and threads.isdecimal() and 0 < int(threads) <= 1024
    torch.set_num_threads(int(threads) if is_number else os.cpu_count() or 1)
    if request["before"] is not None:
        request["before"]()


def _execute(words: list[str]) -> None:
    """What Python does with its words: `-m` a module, `-c` code, or else a script; after `-P` not from there."""
    is_safe, words = words[0] == "-P", words[words[0] == "-P" :]
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        del sys.path[:is_safe]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        del sys.path[:is_safe]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent.resolve())
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def _live(words: list[str], server: int) -> NoReturn:
    """Be the process that was asked for, to its end."""
    code: Any = 0
    try:
        _execute(words)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        lines = error.__traceback__
        while lines is not None and lines.tb_frame.f_code.co_filename == __file__:
            lines = lines.tb_next
        sys.excepthook(type(error), error, lines)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from here on this is no command any more
    with suppress(OSError):
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    if code == -signal.SIGINT:  # as Python ends after a Ctrl-C that nothing caught
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


if __name__ == "__main__":
    import numpy as np
    import torch

    sys.modules["tests.warm"] = sys.modules["__main__"]
    for name in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is there stays there: to look at it again would copy its memory in each new process
    asked = socket.socket(fileno=int(sys.argv[1]))
    while True:
        request, descriptors = _serve(asked)
        _server, asked = socket.socketpair()
        # Before the server is there, which shares it: where a process ends whose parent is in another group, and one in
        # its own stands still, the kernel hangs up on that group, which would be that of all tests.
        if request["session"]:
            os.setsid()
        elif request["group"] not in (None, -1):
            os.setpgid(0, request["group"])
        server = os.fork()
        if server:
            asked.close()
            _control(_PR_SET_CHILD_SUBREAPER, 1)
            _become(request, descriptors)
            _live(request["words"], server)
        _server.close()  # from here on this is the server of the new process
        _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in descriptors:
            os.close(descriptor)
