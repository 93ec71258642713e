"""One training at a time in a directory: who is refused, who takes over, and what is left behind."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from threading import Thread

import pytest

from isoscale.errors import RunGone, RunLost, UserError
from isoscale.runs import lock
from isoscale.runs.directory import RunDirectory
from isoscale.runs.lock import NAME, RunLock, is_held

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, in tenths of a second."""
    monkeypatch.setattr(lock, "BEAT", 0.05)
    monkeypatch.setattr(lock, "WATCH", 0.5)
    monkeypatch.setattr(lock, "_GLANCE", 0.02)


def edit(folder: Path, **values: object) -> None:
    """Change entries as an owner does: in one call, and never shorter."""
    text = json.dumps({**json.loads((folder / NAME).read_text()), **values})
    with (folder / NAME).open("r+b", buffering=0) as file:
        file.write(text.encode().ljust(1000))


def left_by(folder: Path, **values: object) -> None:
    """The file of a process that is gone, with some entries changed."""
    process = FORK.Process(target=die_inside, args=(folder,))
    process.start()
    process.join()
    edit(folder, **values)


def die_inside(folder: Path) -> None:
    RunLock(folder).__enter__()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_second_one_is_refused_and_told_who_was_first(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"):
        assert is_held(tmp_path / "run")
        with pytest.raises(UserError, match=rf"in use: process {os.getpid()} on .* since 20.*`kill {os.getpid()}`"):
            RunLock(tmp_path / "run").__enter__()
        assert is_held(tmp_path / "run"), "who was refused must not let go of what is not theirs"


def test_the_job_is_named_with_the_command_that_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with RunLock(tmp_path), pytest.raises(UserError, match=r"\(Slurm job 4711\) .*`scancel 4711`"):
        RunLock(tmp_path).__enter__()


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with RunLock(tmp_path / "runs" / "a"):
        pass
    assert not list(tmp_path.iterdir())
    with RunLock(tmp_path / "runs" / "a"):
        (tmp_path / "runs" / "a" / "recipe.yaml").touch()
    assert [path.name for path in (tmp_path / "runs" / "a").iterdir()] == ["recipe.yaml"]
    assert not is_held(tmp_path / "runs" / "a")


def test_after_a_kill_the_next_start_goes_on_at_once_and_says_so(tmp_path: Path) -> None:
    left_by(tmp_path)
    assert not is_held(tmp_path)
    notes: list[str] = []
    begin = time.monotonic()
    with RunLock(tmp_path, notes.append):
        assert time.monotonic() - begin < 1
        assert is_held(tmp_path)
    assert len(notes) == 1 and "has ended without a word" in notes[0]


def die_and_leave_a_child(folder: Path) -> None:
    RunLock(folder).__enter__()
    if os.fork() == 0:
        time.sleep(30)  # as a loader's worker does that has not noticed yet
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_that_outlive_the_training_do_not_hold_its_lock(tmp_path: Path, quick: None) -> None:
    process = FORK.Process(target=die_and_leave_a_child, args=(tmp_path,))
    process.start()
    process.join()
    with RunLock(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} "):
        RunLock(tmp_path).__enter__()


def moving(folder: Path, stop: list[bool]) -> None:
    beats = 0
    while not stop:
        beats += 1
        edit(folder, beats=beats)
        time.sleep(0.1)


@pytest.mark.parametrize("has_locks", [True, False])
def test_another_host_is_refused_while_its_counter_moves_and_taken_over_when_it_stands(
    has_locks: bool, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_locks:
        monkeypatch.setattr(lock, "_lock", lambda handle: None)
    left_by(tmp_path, host="node17", machine="another")
    assert is_held(tmp_path), "nobody who only looks can know"
    stop: list[bool] = []
    writer = Thread(target=moving, args=(tmp_path, stop))
    writer.start()
    try:
        with pytest.raises(UserError, match=r"on node17 trains there since .* remove .*lock"):
            RunLock(tmp_path).__enter__()
    finally:
        stop.append(True)
        writer.join()
    notes: list[str] = []
    with RunLock(tmp_path, notes.append):
        assert "on node17" in notes[0]
        with pytest.raises(UserError, match=f"process {os.getpid()} "):
            RunLock(tmp_path).__enter__()


def hold(folder: Path, ready: "multiprocessing.Event") -> None:
    RunLock(folder).__enter__()
    ready.set()
    time.sleep(60)


@pytest.mark.parametrize(
    "machine", ["{boot} pid:[1]", "another pid:[1]"], ids=["another PID namespace", "another host"]
)
def test_who_stands_still_and_has_the_kernels_lock_is_not_dead(machine: str, tmp_path: Path, quick: None) -> None:
    ready = FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path, ready))
    process.start()
    try:
        assert ready.wait(20)
        os.kill(process.pid, signal.SIGSTOP)
        boot = json.loads((tmp_path / NAME).read_text())["machine"].split()[0]
        edit(tmp_path, host="node17", machine=machine.format(boot=boot))
        with pytest.raises(UserError, match=rf"in use: process {process.pid} on node17"):
            RunLock(tmp_path).__enter__()
        os.utime(tmp_path / NAME, (time.time() - 1000,) * 2)
        assert is_held(tmp_path) == (machine.split()[0] != "another"), "no kernel but its own can say"
    finally:
        process.kill()
        process.join()


def test_who_was_taken_over_is_told_by_whom_and_who_took_over_goes_on(tmp_path: Path, quick: None) -> None:
    with RunLock(tmp_path) as first:
        first.check()
        edit(tmp_path, host="node17", machine="another")
        first._ending.set()  # its host is paused
        first._thread.join()
        os.close(first._handle)  # and the server has forgotten its lock
        first._handle = os.open(tmp_path / NAME, os.O_RDWR)
        with RunLock(tmp_path) as second:
            second.check()
            with pytest.raises(RunLost, match=rf"was taken over .*: process {os.getpid()} on .* has it since 20"):
                first.check()
            with pytest.raises(RunLost):
                first.check_owner()
            second.check()
        assert not (tmp_path / NAME).exists()


def test_a_lock_that_somebody_removed_is_made_again_unless_another_process_was_quicker(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        (tmp_path / NAME).unlink()
        held.check()
        with pytest.raises(UserError, match=f"in use: process {os.getpid()} "):
            RunLock(tmp_path).__enter__()
        (tmp_path / NAME).unlink()
        with RunLock(tmp_path), pytest.raises(RunLost):
            held.check()


def test_a_directory_that_is_moved_is_found_and_what_is_in_its_place_left_alone(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with RunLock(folder) as held:
        folder.rename(elsewhere)
        with pytest.raises(RunGone, match=f"{folder} was moved to {elsewhere} while"):
            held.check()
        held.check_owner()
        folder.mkdir()
        with pytest.raises(RunGone, match=f"moved to {elsewhere}"):
            held.check()
        held.follow(elsewhere)
        held.check()
    assert folder.is_dir() and not elsewhere.exists(), "empty directories go, but only one's own"


@pytest.mark.parametrize("replaced", [True, False])
def test_a_directory_that_is_deleted_is_noticed_and_none_in_its_place_removed(replaced: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RunLock(folder) as held:
        (folder / NAME).unlink()
        folder.rmdir()
        if replaced:
            folder.mkdir()
        with pytest.raises(RunGone, match="deleted .*another put in its place" if replaced else "was deleted"):
            held.check()
        held.check_owner()
    assert folder.exists() == replaced


def test_a_run_of_another_host_that_is_silent_for_long_looks_killed(tmp_path: Path) -> None:
    left_by(tmp_path, host="node17", machine="another")
    os.utime(tmp_path / NAME, (time.time() - 1000,) * 2)
    assert not is_held(tmp_path)


def test_a_job_that_was_started_again_takes_over_its_own_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    left_by(tmp_path, host="node17", machine="another")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    begin = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - begin < 1


def test_another_step_of_the_same_job_is_watched_like_anyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    left_by(tmp_path, host="node17", machine="another")
    begin = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - begin >= lock.WATCH


def test_the_counter_moves_and_a_disk_that_cannot_be_written_ends_nothing(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beats() -> int:
        return json.loads((tmp_path / NAME).read_text())["beats"]

    with RunLock(tmp_path) as held:
        time.sleep(0.3)
        assert beats() > 1
        monkeypatch.setattr(os, "pwrite", lambda *arguments: (_ for _ in ()).throw(OSError(28, "no space")))
        time.sleep(0.2)
        assert held._thread.is_alive()
    assert not (tmp_path / NAME).exists()


def test_who_was_taken_over_writes_no_more(tmp_path: Path, quick: None) -> None:
    with RunLock(tmp_path):
        edit(tmp_path, token="somebody else", host="node18")
        time.sleep(0.2)
        assert json.loads((tmp_path / NAME).read_text())["host"] == "node18"
    assert (tmp_path / NAME).exists(), "not ours to remove"


def test_two_who_start_within_one_second_get_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *arguments: "now")
    first, second = RunDirectory.fresh("digits"), RunDirectory.fresh("digits")
    assert (first.path.name, second.path.name) == ("digits-now", "digits-now-2")
    with RunLock(first.path), RunLock(second.path):
        pass
    assert not list(tmp_path.iterdir()), "nothing was trained there"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 1}'])
def test_a_file_that_says_nothing_is_taken_over(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    with RunLock(tmp_path):
        assert is_held(tmp_path)


def try_to_train(folder: Path, answers: "multiprocessing.Queue[bool]", begin: "multiprocessing.Barrier") -> None:
    begin.wait()
    try:
        with RunLock(folder):
            time.sleep(1.0)
            answers.put(True)
    except UserError:
        answers.put(False)


@pytest.mark.parametrize("killed_before", [True, False])
def test_of_many_who_start_together_one_trains(killed_before: bool, tmp_path: Path) -> None:
    if killed_before:
        left_by(tmp_path)
    answers, begin = FORK.Queue(), FORK.Barrier(6)
    processes = [FORK.Process(target=try_to_train, args=(tmp_path, answers, begin)) for _ in range(6)]
    for process in processes:
        process.start()
    assert sorted(answers.get(timeout=20) for _ in processes) == [False] * 5 + [True]
    for process in processes:
        process.join()
