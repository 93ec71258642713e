"""Several ranks in a test: warm processes, with the variables of a launcher set.

A function of a module is called on every rank, and its results come back; or each rank is a command.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import isoscale
from tests import warm
from tests.helpers import QUIET
from tests.parallel.processes import Ended, free_port

PATIENCE = 120.0
"""Seconds after which ranks that have not come back are ended."""


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any, **environment: str) -> list[Any]:
    """What `function(*arguments)` returns on each of so many ranks; an error of one is raised here."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder, f"rank{rank}") for rank in range(world)]
        running = [
            _calling(
                _answer, function, arguments, answer, errors=answer.with_suffix(".err"),
                env={**launcher_variables(rank, world, port), **environment},
            )
            for rank, answer in enumerate(answers)
        ]  # fmt: skip
        until = time.monotonic() + PATIENCE
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        is_late = [process.poll() is None for process in running]
        for process in running:
            process.kill()
            process.wait()
        found = [
            pickle.loads(answer.read_bytes()) if answer.exists()
            else (True, "a rank has not come back" if late else f"a rank ended without a word:\n{_text(answer, 'err')}")
            for answer, late in zip(answers, is_late, strict=True)
        ]  # fmt: skip
    errors = [words for is_error, words in found if is_error]
    if errors:
        raise AssertionError("\n".join(errors))
    return [value for _, value in found]


def _calling(function: Callable[..., None], *arguments: Any, errors: Path, env: dict[str, str], **more: Any) -> Any:
    """A process that calls a function."""
    called = pickle.dumps((function, arguments))
    code = f"import pickle; function, arguments = pickle.loads({called!r}); function(*arguments)"
    with errors.open("ab") as stderr:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        return warm.Popen([sys.executable, "-c", code], env=variables, stderr=stderr, **more)


def _answer(function: Callable[..., Any], arguments: Sequence[Any], answer: Path) -> None:
    try:
        found = (False, function(*arguments))
    except BaseException:
        found = (True, traceback.format_exc())
    part = answer.with_suffix(".part")
    part.write_bytes(pickle.dumps(found))
    part.rename(answer)


def launcher_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank; nothing where it is alone."""
    if world == 1:
        return {}
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


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
        self.port = port = free_port()
        self._began = time.monotonic()
        self._files = [folder / f".rank{rank}-{port}" for rank in range(world)]
        self.processes = []
        for rank, file in enumerate(self._files):
            with file.with_suffix(".out").open("ab") as stdout:
                process = _calling(
                    _command, before, tuple(words), cwd=folder, stdout=stdout, errors=file.with_suffix(".err"),
                    env={**launcher_variables(rank, world, port), **variables},
                )  # fmt: skip
            self.processes.append(process)

    @property
    def pids(self) -> list[int]:
        """The process of every rank."""
        return [process.pid for process in self.processes]

    @property
    def running(self) -> bool:
        """Whether a rank has not ended."""
        return any(process.poll() is None for process in self.processes)

    def tell(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].send_signal(number)

    def ended(self, seconds: float = PATIENCE) -> list[Ended]:
        """How all ranks ended by themselves; fails where one has not."""
        until, found, late = time.monotonic() + seconds, [], []
        for rank, (process, file) in enumerate(zip(self.processes, self._files, strict=True)):
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
                process.kill()
                process.wait()
            seconds_taken = time.monotonic() - self._began
            found.append(Ended(process.returncode, _text(file, "out"), _text(file, "err"), seconds_taken))
        assert not late, f"ranks {late} did not end by themselves: {[(end.code, end.out, end.err) for end in found]}"
        return found


def _text(file: Path, kind: str) -> str:
    path = file.with_suffix(f".{kind}")
    return path.read_text(errors="replace") if path.exists() else ""


def _command(before: Callable[[], Any] | None, words: Sequence[str]) -> None:
    from isoscale.cli.main import run

    sys.argv = ["isoscale", *words]
    if before is not None:
        before()
    run()


def command_on(
    world: int, folder: Path, *words: str, before: Callable[[], Any] | None = None, **variables: str
) -> list[Ended]:
    """Run the command line on so many ranks, to its end."""
    return Command(world, folder, words, before, **variables).ended()
