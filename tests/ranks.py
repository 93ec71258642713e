"""Several ranks in a test: processes forked from one that has imported torch already, which takes seconds.

A function of a module is called on every rank with the variables of a launcher set, and its results come back.
"""

import atexit
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import isoscale
from tests.helpers import QUIET
from tests.parallel.processes import Ended

PATIENCE = 120.0
"""Seconds after which ranks that have not come back are ended."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["isoscale.api", "isoscale.cli.main", "isoscale.science.images", "torch.distributed",
     "torchmetrics.classification", "pytest", "torch._dynamo", "tests.helpers"]
)  # fmt: skip


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, **environment: str) -> list[Any]:
    """What `function(*arguments)` returns on each of so many ranks; an error of one is raised here."""
    port = free_port()
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = _context.Pipe(duplex=False)
        variables = {**launcher_variables(rank, world, port), **environment}
        process = _context.Process(target=_be_rank, args=(variables, theirs, function, arguments))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        found = [_received(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    errors = [words for is_error, words in found if is_error]
    if errors:
        raise AssertionError("\n".join(errors))
    return [value for _, value in found]


def launcher_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank; nothing where it is alone."""
    if world == 1:
        return {}
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _received(pipe: Any) -> tuple[bool, Any]:
    if not pipe.poll(PATIENCE):
        return True, "a rank has not come back"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return True, "a rank ended without a word"


def _be_rank(variables: dict[str, str], pipe: Any, function: Callable[..., Any], arguments: Iterable[Any]) -> None:
    import torch

    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        answer = (False, function(*arguments))
    except BaseException:
        answer = (True, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()


def train_on(world: int, path: Path, recipe: Any = "images/digits", **overrides: Any) -> isoscale.Run:
    """Train quietly on so many ranks; keys are written with double underscores for points."""
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    on_ranks(world, _train, str(path), recipe, {"train.threads": 1, **QUIET, **keys})
    return _trained_on(world, path)


def _train(path: str, recipe: Any, keys: dict[str, Any]) -> None:
    isoscale.train(recipe, run=path, **keys)


def fit_on(world: int, path: Path, make: Callable[[], tuple[Any, Any]], **overrides: Any) -> isoscale.Run:
    """Train on so many ranks what a function makes: a task and its data."""
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    on_ranks(world, _fit, str(path), make, {"train.threads": 1, **QUIET, **keys})
    return _trained_on(world, path)


def _trained_on(world: int, path: Path) -> isoscale.Run:
    """The run, of which so many processes were a part."""
    run = isoscale.Run(path)
    processes = {each["process"] for each in run.record["map"]}  # nobody lists a process that is alone
    assert run.record["ranks"] == world == max(len(processes), 1)
    return run


def _fit(path: str, make: Callable[[], tuple[Any, Any]], keys: dict[str, Any]) -> None:
    import torch

    torch.manual_seed(0)
    isoscale.Trainer(run=path, **keys).fit(*make())


class Command:
    """The command line as ranks that run: forked, and from there on processes like any other."""

    def __init__(
        self, world: int, folder: Path, words: Sequence[str], before: Callable[[], Any] | None = None, **variables: str
    ) -> None:
        """Start it in a folder; each rank calls `before` first, a function that can be pickled."""
        port = free_port()
        self._began = time.monotonic()
        self._files = [folder / f".rank{rank}-{port}" for rank in range(world)]
        self.processes = [
            _context.Process(
                target=_be_command,
                args=({**launcher_variables(rank, world, port), **variables}, folder, file, words, before),
            )
            for rank, file in enumerate(self._files)
        ]
        for process in self.processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        """The process of every rank."""
        return [process.pid or 0 for process in self.processes]

    @property
    def running(self) -> bool:
        """Whether a rank has not ended."""
        return any(process.is_alive() for process in self.processes)

    def tell(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in ranks or range(len(self.processes)):
            if self.processes[rank].is_alive():
                os.kill(self.pids[rank], number)

    def ended(self, seconds: float = PATIENCE) -> list[Ended]:
        """How all ranks ended by themselves; fails where one has not."""
        until, found, late = time.monotonic() + seconds, [], []
        for rank, (process, file) in enumerate(zip(self.processes, self._files, strict=True)):
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                late.append(rank)
                process.kill()
                process.join()
            seconds_taken = time.monotonic() - self._began
            found.append(Ended(process.exitcode or 0, _text(file, "out"), _text(file, "err"), seconds_taken))
        assert not late, f"ranks {late} did not end by themselves: {[(end.code, end.out, end.err) for end in found]}"
        return found


def _text(file: Path, kind: str) -> str:
    """What a rank wrote, without a warning of torch that only forked processes get."""
    path = file.with_suffix(f".{kind}")
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    return "".join(line for line in lines if "ProcessGroup.hpp" not in line)


def _be_command(
    variables: dict[str, str], folder: Path, file: Path, words: Sequence[str], before: Callable[[], Any] | None
) -> None:
    import torch

    from isoscale.cli.main import run

    os.environ.update(variables)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for kind, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(file.with_suffix(f".{kind}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    torch.set_num_threads(1)
    sys.argv = ["isoscale", *words]
    code: Any = 1
    try:
        if before is not None:
            before()
        run()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()  # as at the end of any process: forked ones leave them out
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def command_on(
    world: int, folder: Path, *words: str, before: Callable[[], Any] | None = None, **variables: str
) -> list[Ended]:
    """Run the command line on so many ranks, to its end."""
    return Command(world, folder, words, before, **variables).ended()
