"""Requests to stop that reach one rank, all of them or their launcher: all stop at one step, with one checkpoint."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.helpers import command, first_of, first_step, newest_step, sha, timeless
from tests.parallel.processes import Ended, children, is_alive, take_terminal, wait_until_gone
from tests.ranks import Command, command_on

pytestmark = pytest.mark.slow

RECIPE = ["train", "--run", "run", "train.epochs=4", "data.subset=300", "observe.every=2", "observe.tensorboard=0",
          "checkpoint.keep=10", "parallel.reduce=tree", "train.threads=1", "data.eval_batch_size=4"]  # fmt: skip
"""Five steps per epoch, and 45 batches in an evaluation."""
SAID = "finishing the launch and saving"
BOTH = (0, 1)


def rank() -> int:
    """Of this process."""
    return int(os.environ["RANK"])


def at_a_step(at: int, act: Callable[[], Any]) -> None:
    """Do something within a step, before what this rank has found goes to the others."""
    from isoscale.engine.step.step import Step

    whole = Step.__call__

    def acting(step: Any, shards: Any, number: int, *words: Any) -> None:
        if number + 1 == at:
            act()
        whole(step, shards, number, *words)

    Step.__call__ = acting  # type: ignore[method-assign]


def signal_oneself(number: int) -> None:
    """Once."""
    marker = Path(f"signalled-{rank()}")
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), number)


def signalled_in_a_step(number: int, who: tuple[int, ...], at: int) -> None:
    """Some ranks get a signal within a step."""
    if rank() in who:
        at_a_step(at, partial(signal_oneself, number))


def signalled_in_an_evaluation(number: int, who: int, at: int) -> None:
    """A rank gets a signal in the third batch of the evaluation after a step; how many batches follow is counted."""
    from isoscale.engine.evaluation import Evaluations
    from isoscale.science.images import Classifier

    whole, plain = Evaluations.validate, Classifier.validation_step
    now = [0, 0]

    def noting(evaluations: Any, split: Any) -> Any:
        now[:] = [evaluations.progress.step, 0]
        return whole(evaluations, split)

    def validating(task: Any, batch: Any, batch_idx: int) -> Any:
        now[1] += 1
        if now[0] == at:
            Path(f"batches-{rank()}").write_text(str(now[1]))
        if now == [at, 3] and rank() == who:
            signal_oneself(number)
        return plain(task, batch, batch_idx)

    Evaluations.validate, Classifier.validation_step = noting, validating  # type: ignore[method-assign]


def touched_in_a_step(name: str, at: int) -> None:
    """A rank that does not write the run makes a file in it, and the first one looks at once."""
    from isoscale.engine import stopping as stop

    stop._LOOK_EVERY = 0.0
    if rank() == 1:
        at_a_step(at, (Path("run") / name).touch)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    ended = command_on(2, folder, *RECIPE)
    assert [end.code for end in ended] == [0, 0], ended
    return folder / "run"


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "run.json").read_text())


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "run/checkpoints").glob("step_*"))


def assert_stopped(folder: Path, ended: list[Ended], at: int, why: str) -> None:
    assert [end.code for end in ended] == [75] * len(ended), ended
    assert record(folder)["status"] == "stopped"
    assert record(folder)["message"] == f"stopped by {why} at step {at} of 20"
    assert os.readlink(folder / "run/checkpoints/last") == f"step_{at:08d}" and steps(folder)[-1] == at
    assert ended[0].out.count(f"stopped at step {at}, in run") == 1
    assert not any(end.out or end.err for end in ended[1:]), "only the first rank speaks"


TO_SOME = [(number, who) for number in (signal.SIGTERM, signal.SIGUSR1) for who in ((0,), (1,), BOTH)]


def assert_goes_on(folder: Path, uninterrupted: Path, world: int = 2, *words: str) -> None:
    newest = newest_step(folder / "run")
    ended = command_on(world, folder, *RECIPE, *words)
    assert [end.code for end in ended] == [0] * world, ended
    assert first_step(folder / "run") == newest
    assert sha(folder / "run") == sha(uninterrupted)
    assert timeless(folder / "run") == timeless(uninterrupted)


def print_latency(folder: Path, what: str) -> None:
    began = min(path.stat().st_mtime for path in folder.glob("signalled-*"))
    print(f"{what}: all had ended {time.time() - began:.2f} s later")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "who"), first_of(TO_SOME, TO_SOME[1], TO_SOME[3]))
def test_a_signal_to_some_ranks_stops_all_at_one_step(
    number: signal.Signals, who: tuple[int, ...], uninterrupted: Path, tmp_path: Path
) -> None:
    ended = command_on(2, tmp_path, *RECIPE, before=partial(signalled_in_a_step, number, who, 7))
    print_latency(tmp_path, f"{number.name} to {who}")
    assert_stopped(tmp_path, ended, 8, number.name)  # the step in which the others hear of it
    assert ended[0].err.count(SAID) == (0 in who)
    assert_goes_on(tmp_path, uninterrupted, 1 if who == (0,) else 2)


def test_a_signal_in_the_last_step_of_an_epoch_waits_for_no_evaluation(uninterrupted: Path, tmp_path: Path) -> None:
    ended = command_on(2, tmp_path, *RECIPE, before=partial(signalled_in_a_step, signal.SIGTERM, (1,), 10))
    assert_stopped(tmp_path, ended, 10, "SIGTERM")
    assert not [line for line in timeless(tmp_path / "run") if line["step"] == 10 and line["name"].startswith("val/")]
    assert_goes_on(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("who", first_of(BOTH, 1))
def test_a_signal_in_a_long_evaluation_breaks_it_off_and_it_is_done_again(
    who: int, uninterrupted: Path, tmp_path: Path
) -> None:
    ended = command_on(2, tmp_path, *RECIPE, before=partial(signalled_in_an_evaluation, signal.SIGTERM, who, 10))
    print_latency(tmp_path, f"SIGTERM to {who} in an evaluation")
    assert_stopped(tmp_path, ended, 10, "SIGTERM")
    assert all(int((tmp_path / f"batches-{rank}").read_text()) < 20 for rank in BOTH), "of 45"
    assert_goes_on(tmp_path, uninterrupted, 1)


@pytest.mark.slow
@pytest.mark.parametrize("who", first_of(BOTH, 0))
def test_a_signal_in_the_last_evaluation_leaves_no_trace(who: int, uninterrupted: Path, tmp_path: Path) -> None:
    ended = command_on(2, tmp_path, *RECIPE, before=partial(signalled_in_an_evaluation, signal.SIGUSR1, who, 20))
    assert len({end.code for end in ended}) == 1 and ended[0].code in (0, 75), ended
    assert_goes_on(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "who", [pytest.param((0,), marks=pytest.mark.full), pytest.param((1,), marks=pytest.mark.full), BOTH]
)
def test_a_signal_in_the_last_step_leaves_no_trace(who: tuple[int, ...], uninterrupted: Path, tmp_path: Path) -> None:
    ended = command_on(2, tmp_path, *RECIPE, before=partial(signalled_in_a_step, signal.SIGTERM, who, 20))
    assert len({end.code for end in ended}) == 1 and ended[0].code in (0, 75), ended
    assert_goes_on(tmp_path, uninterrupted)


def test_a_file_stop_is_seen_by_the_first_rank_and_obeyed_by_all(uninterrupted: Path, tmp_path: Path) -> None:
    ended = command_on(2, tmp_path, *RECIPE, before=partial(touched_in_a_step, "STOP", 7))
    assert steps(tmp_path)[-1] in (7, 8), "the first rank has seen it before this step or the next"
    assert_stopped(tmp_path, ended, steps(tmp_path)[-1], "the file STOP")
    assert not (tmp_path / "run/STOP").exists()
    assert_goes_on(tmp_path, uninterrupted)


@pytest.mark.slow
def test_a_file_save_makes_one_more_checkpoint_and_training_goes_on(uninterrupted: Path, tmp_path: Path) -> None:
    ended = command_on(2, tmp_path, *RECIPE, before=partial(touched_in_a_step, "SAVE", 7))
    assert [end.code for end in ended] == [0, 0], ended
    assert steps(tmp_path) in ([5, 7, 10, 15, 20], [5, 8, 10, 15, 20]) and not (tmp_path / "run/SAVE").exists()
    assert sha(tmp_path / "run") == sha(uninterrupted) and timeless(tmp_path / "run") == timeless(uninterrupted)


@pytest.mark.slow
def test_a_time_limit_stops_all_ranks(uninterrupted: Path, tmp_path: Path) -> None:
    ended = command_on(2, tmp_path, *RECIPE, "train.stop_after=1")
    assert [end.code for end in ended] == [75, 75], ended
    assert "stopped by the deadline at " in record(tmp_path)["message"]
    assert_goes_on(tmp_path, uninterrupted, 2, "train.stop_after=86400")


LONG = [
    *RECIPE[:3],
    "observe.every=5",
    "train.epochs=15",
    "observe.tensorboard=0",
    "parallel.reduce=tree",
    "train.threads=1",
]


class Launched:
    """A command with `--devices 2`, and its ranks."""

    def __init__(self, folder: Path, *words: str, is_warm: bool = True) -> None:
        """Start it; a cold one takes seconds before its ranks meet."""
        self._process = (warm.Popen if is_warm else subprocess.Popen)(
            command(*words, "--devices", "2"), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid

    def ranks(self) -> list[int]:
        """Both ranks, once they are there."""
        wait_for(lambda: len(children(self.pid)) == 2, self._process)
        return children(self.pid)

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Wait for something while the command runs."""
        wait_for(is_there, self._process)

    def ended(self, seconds: float = 60) -> Ended:
        """How it ended by itself; nothing may be left of its ranks."""
        began, ranks = time.monotonic(), children(self.pid)
        out, err = self._process.communicate(timeout=seconds)
        taken = time.monotonic() - began
        assert not any(is_alive(process) for process in ranks)
        return Ended(self._process.returncode, out, err, taken)


def wait_for(is_there: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Wait for something while a process runs."""
    until = time.monotonic() + 60
    while not is_there():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)


def logged(folder: Path) -> bool:
    """Whether a training has logged values."""
    path = folder / "run" / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


@pytest.fixture(scope="module")
def long_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    (ended,) = command_on(1, folder, *LONG)
    assert ended.code == 0, ended
    return folder / "run"


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.nightly)])
def test_a_signal_to_the_launcher_or_to_a_rank_of_it_stops_all(
    number: signal.Signals, long_one: Path, tmp_path: Path
) -> None:
    first = Launched(tmp_path, *LONG)
    first.wait_for(lambda: logged(tmp_path))
    os.kill(first.pid, number)
    ended = first.ended()
    print(f"{number.name} to the launcher: it had ended {ended.seconds:.2f} s later")
    assert ended.code == 75 and ended.err.count(SAID) == 1 and ended.out.count("stopped at step") == 1, ended
    second = Launched(tmp_path, *LONG)
    size = (tmp_path / "run/metrics.jsonl").stat().st_size
    second.wait_for(lambda: (tmp_path / "run/metrics.jsonl").stat().st_size > size)
    os.kill(second.ranks()[1], number)
    ended = second.ended()
    print(f"{number.name} to rank 1 of a launcher: it had ended {ended.seconds:.2f} s later")
    assert ended.code == 75 and "error" not in ended.err and ended.out.count("stopped at step") == 1, ended
    assert [end.code for end in command_on(2, tmp_path, *LONG)] == [0, 0]
    assert sha(tmp_path / "run") == sha(long_one) and timeless(tmp_path / "run") == timeless(long_one)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("delay", [1.5])
def test_a_signal_before_the_ranks_have_met_ends_them_and_leaves_nothing(
    number: signal.Signals, delay: float, tmp_path: Path
) -> None:
    launched = Launched(tmp_path, *RECIPE, is_warm=False)
    ranks = launched.ranks()
    time.sleep(delay)
    os.kill(launched.pid, number)
    ended = launched.ended(30)
    print(f"{number.name} {delay} s after the start: code {ended.code}, {ended.seconds:.2f} s later")
    assert ended.code in (1, 75, 130) and not any(is_alive(process) for process in ranks), ended
    again = command_on(2, tmp_path, *RECIPE)
    assert [end.code for end in again] == [0, 0], again


def sleeping_before_it_joins(seconds: float) -> None:
    """Rank 1 comes late."""
    if rank() == 1:
        Path("waits").touch()
        time.sleep(seconds)


@pytest.mark.slow
def test_a_rank_that_a_signal_ended_before_it_came_is_named(tmp_path: Path) -> None:
    late = Command(2, tmp_path, RECIPE, partial(sleeping_before_it_joins, 60), ISOSCALE_JOIN_TIMEOUT="3")
    while not (tmp_path / "waits").exists():
        time.sleep(0.02)
    late.tell(signal.SIGTERM, 1)
    ended = late.ended()
    assert [end.code for end in ended] == [2, -signal.SIGTERM]
    assert "1 of 2 ranks did not come within 3 s: rank 1" in ended[0].err
    assert not (tmp_path / "run").exists()


STUCK = """
import time
from pathlib import Path
from isoscale.science.images import Classifier

class Stuck(Classifier):
    trains = False
    def training_step(self, batch, batch_idx):
        self.trains = True
        return super().training_step(batch, batch_idx)
    def validation_step(self, batch, batch_idx):
        while self.trains:  # not in the rehearsal before the training
            Path("stuck").touch()
            time.sleep(0.01)
        return super().validation_step(batch, batch_idx)
"""


class Terminal:
    """A command in a terminal of its own, into which somebody types."""

    def __init__(self, folder: Path, *words: str) -> None:
        """Start it as the foreground of a new terminal."""
        self._main, terminal = pty.openpty()
        variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        self._process = warm.Popen(
            command(*words), cwd=folder, env=variables, stdin=terminal, stdout=terminal, stderr=terminal,
            start_new_session=True, preexec_fn=take_terminal,
        )  # fmt: skip
        os.close(terminal)
        self.pid, self.text = self._process.pid, ""

    def read_until(self, is_there: Callable[[], bool]) -> None:
        """Take what it writes, until something is there or it has ended."""
        until = time.monotonic() + 60
        while not is_there():
            assert time.monotonic() < until, self.text
            try:
                if select.select([self._main], [], [], 0.05)[0]:
                    self.text += os.read(self._main, 65536).decode(errors="replace")
            except OSError:
                return

    def interrupt(self) -> None:
        """Type Ctrl-C."""
        os.write(self._main, b"\x03")

    def closed(self) -> int:
        """Close it, as a connection that is lost does; the exit code of what ran in it."""
        os.close(self._main)
        return self._process.wait(timeout=60)

    def ended(self) -> int:
        """The exit code, after its last word."""
        self.read_until(lambda: False)
        os.close(self._main)
        return self._process.wait()


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_is_told_once_and_stops_all_ranks(long_one: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, *LONG, "--devices", "2")
    terminal.read_until(lambda: terminal.text.count("samples/s") > 2)
    ranks = children(terminal.pid)
    assert len(ranks) == 2
    began = time.monotonic()
    terminal.interrupt()
    assert terminal.ended() == 75
    print(f"Ctrl-C: it had ended {time.monotonic() - began:.2f} s later")
    assert terminal.text.count(SAID) == 1 and len(re.findall(r"stopped at step \d+, in run", terminal.text)) == 1
    assert "error" not in terminal.text and not any(is_alive(process) for process in ranks)
    assert [end.code for end in command_on(2, tmp_path, *LONG)] == [0, 0]
    assert sha(tmp_path / "run") == sha(long_one)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_ranks_at_once(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    words = ["task.class=stuck.Stuck", "checkpoint.every=3 steps", "train.evaluate=7 steps"]
    terminal = Terminal(tmp_path, *LONG, *words, "--devices", "2")
    terminal.read_until((tmp_path / "stuck").exists)
    ranks = children(terminal.pid)
    terminal.interrupt()
    began = time.monotonic()
    terminal.read_until(lambda: time.monotonic() > began + 1)
    assert is_alive(terminal.pid) and terminal.text.count(SAID) == 1, terminal.text
    terminal.interrupt()
    began = time.monotonic()
    code = terminal.ended()
    print(f"the second Ctrl-C: it had ended {time.monotonic() - began:.2f} s later")
    assert code == 130 and not any(is_alive(process) for process in ranks), terminal.text
    assert terminal.text.count("stopping now") == 1 and "Traceback" not in terminal.text, terminal.text
    assert terminal.text.count("go on from the last checkpoint: isoscale train --run run") == 1
    assert os.readlink(tmp_path / "run/checkpoints/last") == "step_00000006"


DATASET = """
import time, torch, isoscale
from torch.utils.data import Dataset

class Slow(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.01)
        x = torch.randn(3)
        return {"input": x, "target": x.sum(0, keepdim=True)}

def load():
    return isoscale.Sources(train=Slow(), val=Slow())
"""
WITH_WORKERS = """
task: {class: supervised, model: {class: torch.nn.Linear, in_features: 3, out_features: 1}, loss: mse}
data: {class: slow.load, batch_size: 8, workers: 2}
train: {epochs: 6, threads: 1}
parallel: {reduce: tree}
observe: {every: 2, tensorboard: 0}
"""


@pytest.mark.full
def test_workers_outlive_a_signal_to_the_whole_group_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(DATASET)
    (tmp_path / "slow.yaml").write_text(WITH_WORKERS)
    words = ["train", "slow.yaml", "--run"]
    (whole,) = command_on(1, tmp_path, *words, "whole", "data.workers=0")
    assert whole.code == 0, whole
    launched = Launched(tmp_path, *words, "run")
    launched.wait_for(lambda: logged(tmp_path))
    ranks = launched.ranks()
    workers = [worker for each in ranks for worker in children(each)]
    for each in ranks:
        os.killpg(each, signal.SIGUSR1)
    ended = launched.ended()
    print(f"{len(workers)} workers; all had ended {ended.seconds:.2f} s later")
    assert len(workers) >= 4 and ended.code == 75 and "worker" not in ended.err, ended
    wait_until_gone(workers, 10)
    again = command_on(2, tmp_path, *words, "run")
    assert [end.code for end in again] == [0, 0], again
    assert sha(tmp_path / "run") == sha(tmp_path / "whole") and timeless(tmp_path / "run") == timeless(
        tmp_path / "whole"
    )


def stopped_before_it_trains() -> None:
    """Ask the second rank to stop when all have met, and it does not listen for the training yet."""
    from isoscale.runs.session import Session

    check = Session._check_data

    def asked(*words: Any) -> Any:
        if os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return check(*words)

    Session._check_data = asked  # type: ignore[method-assign]


def test_a_rank_that_is_stopped_before_it_trains_leaves_none_of_them_waiting(tmp_path: Path) -> None:
    ended = Command(2, tmp_path, RECIPE, stopped_before_it_trains).ended(60)
    assert [end.code for end in ended] == [75, 75], ended
    assert "before the training began" in ended[0].err and "Traceback" not in ended[0].err + ended[1].err, ended
