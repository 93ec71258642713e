"""Asked once, a training saves and says how to go on; asked twice, it ends on the spot."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isoscale.engine.state.checkpoint import read
from tests import warm
from tests.helpers import command, first_of

pytestmark = pytest.mark.slow

LONG = ("train", "train.epochs=5000", "observe.tensorboard=0", "--run", "a")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A training that has begun."""
    return begun(folder, command(*words))


def begun(folder: Path, words: list[str], start: Any = warm.Popen) -> subprocess.Popen[str]:
    """The training of a command line, once it has begun."""
    process = start(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("epoch"):
        assert process.poll() is None
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_request_saves_and_prints_the_command_to_go_on(tmp_path: Path, number: int):
    process = start(tmp_path, *LONG)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert err.strip().splitlines() == [err.strip()]
    assert "finishing the launch and saving" in err
    assert re.search(r"^  go on +isoscale train --run a$", out, re.MULTILINE)
    (step,) = re.findall(r"^stopped at step (\d+), in a$", out, re.MULTILINE)
    assert (tmp_path / "a/checkpoints/last").resolve().name == f"step_{int(step):08d}"
    assert json.loads((tmp_path / "a/run.json").read_text())["status"] == "stopped"


STUCK_TASK = """
import time, isoscale
from torch import nn

class Stuck(isoscale.Task):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)
        self.validated = 0

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch["input"].flatten(1).float()), batch["target"])

    def validation_step(self, batch, batch_idx):
        self.validated += 1
        while self.validated > 1:  # the first one is the rehearsal before the training
            print("validating", flush=True)
            time.sleep(0.01)
        return self.training_step(batch, batch_idx)
"""


def test_the_second_request_stops_at_once_and_the_last_checkpoint_is_good(tmp_path: Path):
    (tmp_path / "stuck.py").write_text(STUCK_TASK)
    (tmp_path / "stuck.yaml").write_text(
        "task: {class: stuck.Stuck}\ndata: {class: digits, batch_size: 512}\n"
        "train: {evaluate: 4 steps}\ncheckpoint: {every: 3 steps}\n"
    )
    process = warm.Popen(
        command("train", "stuck.yaml", "--run", "a"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, bufsize=1,
    )  # fmt: skip
    assert process.stdout is not None
    while "validating" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "the first request waits for the evaluation's batch"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert "go on from the last checkpoint: isoscale train --run a" in out
    assert read((tmp_path / "a/checkpoints/last").resolve())[1]["progress"]["step"] == 3


SLOW_TO_BUILD = """
import time
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        print("building", flush=True)
        time.sleep(60)
"""


def test_before_the_training_has_begun_one_request_is_enough_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "slow.py").write_text(SLOW_TO_BUILD)
    process = warm.Popen(
        command("train", "task.model.class=slow.Slow", "~task.model.widths", "~task.model.activation",
                "~task.model.dropout", "--run", "a"),
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1,
        # a shell lets what it starts in the background ignore Ctrl-C, and that is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert not (tmp_path / "a").exists()


def on_a_terminal(folder: Path, columns: int, words: tuple[str, ...], act: Callable[[int, str], bool]) -> str:
    """What a command writes to a terminal; `act` sees all of it so far, and may type."""
    main, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40"}
    process = warm.Popen(
        command(*words), cwd=folder, env=environment, stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    text, acted = "", False
    while select.select([main], [], [], 60)[0]:
        try:
            chunk = os.read(main, 65536)
        except OSError:
            break
        text += chunk.decode(errors="replace")
        acted = acted or act(process.pid, text)
    os.close(main)
    process.wait(timeout=60)
    return text


def test_on_a_terminal_the_bar_is_gone_after_a_stop_and_no_line_is_too_wide(tmp_path: Path):
    def stop(process: int, text: str) -> bool:
        if text.count("samples/s") < 3:
            return False
        os.kill(process, signal.SIGINT)
        return True

    text = on_a_terminal(tmp_path, 80, LONG, stop)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    widths = [len(part) for line in plain.split("\n") for part in line.split("\r")]
    assert max(widths) <= 80
    bars = [part for line in plain.split("\n") for part in line.split("\r") if " left" in part]
    assert bars and max(len(bar.rstrip("^C")) for bar in bars) <= 78, "^C must fit behind the bar"
    assert re.search(r"stopped at step \d+, in a", plain)


EARLY_TASK = """
import os, signal
from torch import nn
import isoscale

class Early(isoscale.Supervised):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), loss="cross_entropy")
        try:
            os.kill(os.getpid(), signal.{name})
        except BaseException:
            {then}
"""
WAIT = "__import__('time').sleep(600)"


@pytest.mark.parametrize(
    ("name", "then", "code"),
    [
        ("SIGTERM", "raise AttributeError('matrix') from None", 75), ("SIGTERM", "pass", 75), ("SIGTERM", WAIT, 75),
        ("SIGINT", "raise AttributeError('matrix') from None", 130), ("SIGINT", "pass", 75),
        pytest.param("SIGINT", WAIT, 130, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_request_that_comes_early_is_not_lost_in_what_it_interrupts(tmp_path: Path, name: str, then: str, code: int):
    """As when it comes while a library looks for an attribute: that raises another error, or passes over it."""
    (tmp_path / "early.py").write_text(EARLY_TASK.format(name=name, then=then))
    words = ("train", "train.epochs=5000", "task={class: early.Early}", "observe.tensorboard=0", "--run", "a")
    words += ("checkpoint.monitor=val/loss", "checkpoint.mode=min")
    done = warm.run(command(*words), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert "error" not in done.stderr
    if name == "SIGTERM":
        assert "SIGTERM: stopped before the training began" in done.stderr


@pytest.mark.parametrize(
    ("name", "code"), first_of([("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75)], ("SIGTERM", 75))
)
def test_a_request_that_comes_while_a_command_is_read_is_no_failure(tmp_path: Path, name: str, code: int):
    (tmp_path / "first").mkdir()
    (tmp_path / "first/typer.py").write_text(
        f"import os, signal, time\nos.kill(os.getpid(), signal.{name})\ntime.sleep(60)\n"
    )
    path = os.pathsep.join([str(tmp_path / "first"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command(*LONG), cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == code and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "a").exists()


REPEATED = """
import os, signal
from isoscale.runs import attempts as attempts
from isoscale.parallel.collectives import Ranks

ended, agree = attempts.ended, Ranks.any

def once_more(*arguments):
    os.kill(os.getpid(), signal.SIGUSR1)
    return ended(*arguments)

def and_before_the_others_heard(self, flag, what):
    if what == "the last checkpoint" and not self.is_main:
        os.kill(os.getpid(), signal.SIGUSR1)
    return agree(self, flag, what)

attempts.ended, Ranks.any = once_more, and_before_the_others_heard

from isoscale.__main__ import run
run()
"""


@pytest.mark.parametrize("devices", [(), ("--devices", "2")])
def test_a_request_that_comes_again_does_not_disturb_the_end(tmp_path: Path, devices: tuple[str, ...]):
    """Of a scheduler that repeats itself, or that reaches one node later than another."""
    (tmp_path / "repeated").write_text(REPEATED)
    process = begun(tmp_path, [sys.executable, "repeated", *LONG, *devices])
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert err.strip() == "SIGUSR1: finishing the launch and saving"
    record = json.loads((tmp_path / "a/run.json").read_text())
    assert record["status"] == "stopped" and [each["status"] for each in record["stretches"]] == ["stopped"]


FORKED_TASK = """
import os, signal, time
from torch import nn
import isoscale

class Forked(isoscale.Supervised):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), loss="cross_entropy")
        child = os.fork()
        if child == 0:
            try:
                time.sleep(60)
            finally:
                os._exit(0)
        time.sleep(0.5)
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        time.sleep(6)
"""


@pytest.mark.full
def test_a_signal_to_a_child_is_none_to_the_training(tmp_path: Path):
    (tmp_path / "forked.py").write_text(FORKED_TASK)
    words = ("train", "train.epochs=1", "task={class: forked.Forked}", "observe.tensorboard=0", "--run", "a")
    words += ("checkpoint.monitor=val/loss", "checkpoint.mode=min")
    done = warm.run(command(*words), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


SLOW_END_TASK = """
import time
from torch import nn
import isoscale

class SlowEnd(isoscale.Supervised):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), loss="cross_entropy")

    def __del__(self):
        time.sleep(7)
        print("ended in peace", flush=True)
"""


@pytest.mark.full
def test_a_training_that_has_stopped_may_take_long_to_end(tmp_path: Path):
    (tmp_path / "slow_end.py").write_text(SLOW_END_TASK)
    more = ("task={class: slow_end.SlowEnd}", "checkpoint.monitor=val/loss", "checkpoint.mode=min")
    process = begun(tmp_path, command(*LONG, *more), start=subprocess.Popen)  # objects are deleted at its very end
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "ended in peace" in out, (out, err)


def test_ctrl_c_when_a_command_is_over_changes_nothing(tmp_path: Path):
    code = "import atexit, os, signal, sys; atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
    code += "sys.argv = ['isoscale', '--version']; from isoscale.__main__ import run; run()"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_a_request_that_comes_where_nothing_can_be_raised_is_still_known(tmp_path: Path):
    code = "import os, signal; from isoscale.system import early_stop; early_stop.listen()\n"
    code += "class Late:\n    def __del__(self):\n        os.kill(os.getpid(), signal.SIGTERM)\n"
    code += "Late()\nprint(early_stop.asked(), flush=True); os._exit(0)"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "SIGTERM\n")
    assert found.stderr == "SIGTERM: stopped before the training began; nothing is lost\n"
