"""Requests to stop that are repeated until the process is gone, as schedulers and launchers do: 75 all the same.

A job is started again by that exit code, and goes on as though nothing had been.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.faults.test_signals_on_ranks import LONG, Launched, Terminal, logged, wait_for
from tests.helpers import command, first_of, sha, timeless
from tests.parallel.processes import children, is_alive
from tests.ranks import command_on

pytestmark = pytest.mark.slow

OF_JOBS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SAID = "finishing the launch and saving"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    (ended,) = command_on(1, folder, *LONG)
    assert ended.code == 0, ended
    return folder / "run"


def assert_goes_on(folder: Path, uninterrupted: Path, world: int = 1) -> None:
    assert json.loads((folder / "run/run.json").read_text())["status"] == "stopped"
    ended = command_on(world, folder, *LONG)
    assert [end.code for end in ended] == [0] * world, ended
    assert sha(folder / "run") == sha(uninterrupted) and timeless(folder / "run") == timeless(uninterrupted)


def repeat(number: int, process: "subprocess.Popen[str]", others: Callable[[], list[int]] = list) -> tuple[str, str]:
    """Send a signal to a process and others every few milliseconds, until it has ended."""
    while process.poll() is None:
        for one in [process.pid, *others()]:
            try:
                os.kill(one, number)
            except ProcessLookupError:
                continue
        time.sleep(0.005)
    return process.communicate()


def started(folder: Path, words: list[str], start: Any = subprocess.Popen, **more: Any) -> "subprocess.Popen[str]":
    """A training that has logged values: cold, as its very end is a part of it."""
    process = start(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
    wait_for(lambda: logged(folder), process)
    return process


@pytest.mark.parametrize("number", first_of(OF_JOBS, signal.SIGTERM))
def test_a_signal_that_is_repeated_until_the_process_is_gone_ends_with_75(
    number: signal.Signals, uninterrupted: Path, tmp_path: Path
) -> None:
    process = started(tmp_path, command(*LONG))
    out, err = repeat(number, process)
    assert process.returncode == 75, (out, err)
    assert err.strip() == f"{number.name}: {SAID}" and out.count("stopped at step") == 1, (out, err)
    assert_goes_on(tmp_path, uninterrupted)


@pytest.mark.parametrize("number", first_of(OF_JOBS, signal.SIGHUP))
def test_a_launcher_and_its_ranks_that_are_all_told_again_and_again_end_with_75(
    number: signal.Signals, uninterrupted: Path, tmp_path: Path
) -> None:
    process = started(tmp_path, command(*LONG, "--devices", "2"))
    ranks = children(process.pid)
    out, err = repeat(number, process, lambda: ranks)
    assert process.returncode == 75 and len(ranks) == 2, (out, err)
    assert err.strip() == f"{number.name}: {SAID}" and out.count("stopped at step") == 1, (out, err)
    assert not any(is_alive(rank) for rank in ranks)
    assert_goes_on(tmp_path, uninterrupted, 2)


SCRIPT = """
import isoscale
run = isoscale.train("images/digits", run="run", **{overrides})
print("trained to the end")
"""


@pytest.mark.full
def test_a_script_that_trains_ends_with_75_too(uninterrupted: Path, tmp_path: Path) -> None:
    words = [word.split("=") for word in LONG[3:]]
    overrides = {key: int(value) if value.isdigit() else value for key, value in words}
    (tmp_path / "script.py").write_text(SCRIPT.format(overrides=overrides))
    process = started(tmp_path, [sys.executable, "script.py"])
    out, err = repeat(signal.SIGTERM, process)
    assert process.returncode == 75 and "Traceback" not in err, (out, err)
    assert_goes_on(tmp_path, uninterrupted)


AT_A_MOMENT = """
import os, signal, sys, time

def twice(os=os, number=signal.{name}, sleep=time.sleep):
    for _ in range(2):
        os.kill(os.getpid(), number)
        sleep(0.01)

class AtTheEnd:
    def __del__(self, twice=twice):
        twice()

def before(owner, name):
    plain = getattr(owner, name)
    to_tell = [twice]  # each process once: a rank that is told alone says nothing unless it is the first
    def told(*arguments, **more):
        if to_tell:
            to_tell.pop()()
        return plain(*arguments, **more)
    setattr(owner, name, told)

{moment}
from isoscale.__main__ import run
run()
"""
MOMENTS = {
    "before the first step": "from isoscale.engine.trainer import Trainer; before(Trainer, '_loop')",
    "while it saves": "from isoscale.engine.trainer import Trainer; before(Trainer, '_stop_here')",
    "while the checkpoint is written": "from isoscale.engine.state.writer import Saver; before(Saver, 'wait')",
    "while the end is written down": "from isoscale.runs.session import Session; before(Session, '_end')",
    "while it releases the run": "from isoscale.runs.lock import RunLock; before(RunLock, '__exit__')",
    "after the training": "from isoscale.cli import main; before(main, '_exit')",
    "in what is due at exit": "import atexit; atexit.register(twice)",
    "while the interpreter is taken apart": "kept = AtTheEnd()",
}


@pytest.mark.full
@pytest.mark.parametrize("moment", list(MOMENTS))
@pytest.mark.parametrize("devices", [(), ("--devices", "2")])
def test_a_signal_that_comes_again_at_a_moment_of_the_end_leaves_the_exit_code(
    moment: str, devices: tuple[str, ...], uninterrupted: Path, tmp_path: Path
) -> None:
    (tmp_path / "told_at").write_text(AT_A_MOMENT.format(name="SIGTERM", moment=MOMENTS[moment]))
    words = [sys.executable, "told_at", *LONG, *devices]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if moment not in ("before the first step", "while the checkpoint is written"):
        wait_for(lambda: logged(tmp_path), process)
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, (out, err)
    assert err.strip() == f"SIGTERM: {SAID}", err
    assert_goes_on(tmp_path, uninterrupted, 2 if devices else 1)


@pytest.mark.full
def test_a_training_that_is_done_is_done_whatever_comes_then(tmp_path: Path) -> None:
    (tmp_path / "told_at").write_text(AT_A_MOMENT.format(name="SIGTERM", moment=MOMENTS["after the training"]))
    words = [sys.executable, "told_at", *LONG, "train.epochs=1"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr


TWICE_EARLY = """
import os, signal, time
from torch import nn
import isoscale

class Early(isoscale.Supervised):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), loss="cross_entropy")
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            print("gone on to the end of a finally", flush=True)
"""


def test_a_signal_that_comes_again_before_the_training_began_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(TWICE_EARLY)
    words = (*LONG, "task={class: early.Early}", "checkpoint.monitor=val/loss", "checkpoint.mode=min")
    process = warm.Popen(command(*words), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = repeat(signal.SIGUSR1, process) if wait_for_line(process) else ("", "")
    assert process.returncode == 75, (out, err)
    assert "Traceback" not in err and err.count("stopped before the training began") == 1, err


def wait_for_line(process: "subprocess.Popen[str]") -> bool:
    assert process.stdout is not None
    return bool(process.stdout.readline())


@pytest.mark.parametrize("devices", [("--devices", "2"), pytest.param((), marks=pytest.mark.full)])
def test_a_terminal_that_is_closed_lets_the_training_save(
    devices: tuple[str, ...], uninterrupted: Path, tmp_path: Path
) -> None:
    terminal = Terminal(tmp_path, *LONG, *devices)
    terminal.read_until(lambda: terminal.text.count("samples/s") > 2)
    ranks = children(terminal.pid)
    assert terminal.closed() == 75
    assert not any(is_alive(rank) for rank in ranks)
    assert_goes_on(tmp_path, uninterrupted, 2 if devices else 1)


@pytest.mark.full
def test_what_nohup_has_started_goes_on_when_the_terminal_is_closed(tmp_path: Path) -> None:
    process = started(
        tmp_path, command(*LONG, "train.epochs=5"), warm.Popen,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and not err, (out, err)


@pytest.mark.full
def test_ctrl_c_that_is_delivered_twice_is_one(uninterrupted: Path, tmp_path: Path) -> None:
    launched = Launched(tmp_path, *LONG)
    launched.wait_for(lambda: logged(tmp_path))
    for process in (launched.pid, *launched.ranks()):
        os.kill(process, signal.SIGINT)
    ended = launched.ended()
    assert ended.code == 75 and ended.err.count(SAID) == 1 and "stopping now" not in ended.err, ended
    assert_goes_on(tmp_path, uninterrupted, 2)
