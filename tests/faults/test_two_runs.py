"""Two starts into one directory: the second is refused while the first trains, and goes on once it is gone.

One that was paused and taken over meanwhile must not write when it wakes up.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isoscale import Run
from isoscale.runs.lock import NAME
from tests import warm
from tests.helpers import QUIET, cli, command, newest_step, timeless

pytestmark = pytest.mark.slow

LONG = ["train", "--run", "run", "train.epochs=5000", "checkpoint.every=20 steps", "observe.every=10",
        *(f"{key}={value}" for key, value in QUIET.items())]  # fmt: skip


@pytest.fixture
def first(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A training that has begun and saved."""
    process = warm.Popen(command(*LONG), cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run/checkpoints/last").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


def test_a_second_start_is_refused_and_the_first_goes_on(first: subprocess.Popen[bytes], tmp_path: Path) -> None:
    second = cli(*LONG, cwd=tmp_path)
    assert second.returncode == 2 and "Traceback" not in second.stderr
    assert f"run is in use: process {first.pid} on " in second.stderr and "--run DIR" in second.stderr
    assert first.poll() is None
    assert Run(tmp_path / "run").status == "running"
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 75
    assert not (tmp_path / "run" / NAME).exists()


def test_after_a_kill_it_is_shown_as_killed_and_the_next_start_goes_on_at_once(
    first: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    first.kill()
    first.wait()
    shown = cli("runs", "show", "run", cwd=tmp_path).stdout
    assert "killed" in shown and "go on from its last checkpoint: isoscale train --run run" in shown
    listed = cli("runs", "list", ".", "--json", cwd=tmp_path)
    assert [run["status"] for run in json.loads(listed.stdout)] == ["killed"]
    log = tmp_path / "run/log.txt"
    size = log.stat().st_size
    again = warm.Popen(command(*LONG), cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while "has ended without a word" not in log.read_text()[size:]:
        assert again.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    while Run(tmp_path / "run").status != "running":
        assert again.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    again.kill()
    again.wait()


def test_a_run_on_another_host_is_refused_while_it_lives(first: subprocess.Popen[bytes], tmp_path: Path) -> None:
    path = tmp_path / "run" / NAME
    first.kill()
    first.wait()
    there = {**json.loads(path.read_text()), "host": "node17", "machine": "another"}
    second = warm.Popen(command(*LONG), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while second.poll() is None:
        there["beats"] += 1
        with path.open("r+b", buffering=0) as file:
            file.write(json.dumps(there).encode().ljust(os.fstat(file.fileno()).st_size))
        time.sleep(0.3)
    assert second.returncode == 2
    assert second.stderr and f"process {first.pid} on node17 trains there" in second.stderr.read()


def wait_for(step: int, run: Path, *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while newest_step(run) < step:
        assert all(process.poll() is None for process in processes) and time.monotonic() < deadline
        time.sleep(0.05)


def pause(process: subprocess.Popen[str]) -> None:
    """Stop a process; it may go on for a moment, on another core."""
    process.send_signal(signal.SIGSTOP)
    states = [""]
    while set(states) != {"T"}:
        files = Path(f"/proc/{process.pid}/task").glob("*/stat")
        states = [file.read_text().rpartition(")")[2].split()[0] for file in files]


def contents(run: Path) -> dict[Path, bytes]:
    """All that counts in a run; what begins with a point is half written, and its writer may remove it."""
    files = (path for path in run.rglob("*") if not any(part.startswith(".") for part in path.relative_to(run).parts))
    return {path: path.read_bytes() for path in files if path.is_file()}


def test_one_that_wakes_up_after_another_took_over_writes_nothing_and_says_who_has_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    asleep = warm.Popen(command(*LONG), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(20, run, asleep)
    pause(asleep)
    saved = newest_step(run)
    (run / NAME).unlink()  # somebody knows that nothing trains there
    awake = warm.Popen(command(*LONG), cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(saved + 60, run, awake)
    pause(awake)
    before = contents(run)
    pointed = os.readlink(run / "checkpoints/last")
    asleep.send_signal(signal.SIGCONT)
    _, said = asleep.communicate(timeout=60)
    assert asleep.returncode == 2
    assert f"taken over while this training stood still: process {awake.pid} on " in said
    assert os.readlink(run / "checkpoints/last") == pointed
    assert contents(run) == before
    awake.send_signal(signal.SIGCONT)
    wait_for(saved + 120, run, awake)
    awake.send_signal(signal.SIGTERM)
    assert awake.wait(60) == 75
    rows = [(row["step"], row["name"], row["epoch"]) for row in timeless(run)]
    assert len(set(rows)) == len(rows), "no value twice"


@pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0, reason="needs `unshare` of util-linux, and root"
)
def test_one_that_is_paused_in_another_pid_namespace_is_not_declared_dead(tmp_path: Path) -> None:
    outer = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command(*LONG)], cwd=tmp_path, process_group=0
    )
    try:
        wait_for(20, tmp_path / "run", outer)
        inner = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
        os.kill(inner, signal.SIGSTOP)
        second = cli(*LONG, cwd=tmp_path)
        assert second.returncode == 2 and "run is in use: process 1 on " in second.stderr
        os.kill(inner, signal.SIGCONT)
        os.kill(inner, signal.SIGTERM)
        assert outer.wait(60) == 75
    finally:
        outer.kill()
        outer.wait()
