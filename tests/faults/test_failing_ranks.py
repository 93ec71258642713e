"""When one rank fails, is killed, hangs or is stopped, all end, soon, and the user reads once what happened."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.helpers import first_of
from tests.parallel.processes import Ended, children, ends, is_alive, ranks, wait_until_gone

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("rank.py")
HOST = socket.gethostname()
ENOUGH = 60
"""Seconds after which something is wrong, also on a machine with much else to do."""


def after_the_fault(found: list[Ended]) -> float:
    """Seconds from the moment when a rank did something bad to now."""
    moments = [float(text) for end in found for text in re.findall(r"^bad (\S+)$", end.out, re.MULTILINE)]
    assert len(moments) == 1
    return time.time() - moments[0]


def faulty(what: str, who: int, *words: str, world: int = 2) -> list[Ended]:
    with ranks(RANK, what, str(who), *words, world=world) as running:
        found = ends(running)
    seconds = after_the_fault(found)
    print(f"{what} on rank {who} of {world}: all ended {seconds:.2f} s later")
    assert seconds < ENOUGH
    return found


@pytest.mark.parametrize("who", [1, 2])
def test_the_traceback_of_the_rank_that_raised_is_shown_once_by_rank_0(who: int):
    found = faulty("raise", who, world=3)
    assert [end.code for end in found] == [1, 1, 1]
    told = found[0].err
    assert told.startswith(f"error: rank {who} on {HOST} failed: ValueError: boom\n  in misbehave, ")
    assert told.count("Traceback") == 1 and told.endswith("ValueError: boom\n")
    assert [end.err for end in found[1:]] == ["", ""]


def test_rank_0_tells_of_its_own_error():
    found = faulty("raise", 0)
    assert [end.code for end in found] == [1, 1]
    assert found[0].err.startswith("error: ValueError: boom\n") and found[1].err == ""


def test_a_killed_rank_is_named():
    found = faulty("kill", 1)
    assert [end.code for end in found] == [1, -signal.SIGKILL]
    assert found[0].err.startswith(f"error: rank 1 on {HOST} is gone: ")
    assert "the same command goes on from it" in found[0].err


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("what", ["fork and kill", "fork unseen and kill"])
def test_a_killed_rank_is_noticed_although_its_workers_live_on(what: str, who: int):
    """Also where they keep its connections open: those that a library has forked do, and those that hang at birth."""
    with ranks(RANK, what, str(who)) as running:
        told = running[who].stdout
        assert told is not None
        worker = next(int(line.split()[1]) for line in told if line.startswith("left"))
        try:
            (other,) = ends([running[1 - who]])
            assert is_alive(worker)
        finally:
            os.kill(worker, signal.SIGKILL)
    assert other.code == 1 and f"rank {who} on {HOST} {'is gone' if who else 'no longer answers'}" in other.err


def test_the_others_say_that_rank_0_was_killed():
    found = faulty("kill", 0, world=3)
    assert [end.code for end in found] == [-signal.SIGKILL, 1, 1]
    assert found[1].err.startswith(f"error: rank 0 on {HOST} no longer answers")
    assert found[2].err == "", "one of a host is enough"


@pytest.mark.full
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_never_comes_is_named_with_its_place(who: int):
    found = faulty("sleep", who, "5")
    assert [end.code for end in found] == [1, 1]
    assert re.match(rf"\s*error: rank {who} on {HOST} hangs: others have waited \d+ s for step 8\n", found[0].err)
    assert f"rank {who} on {HOST} is in misbehave, {RANK}:" in found[0].err
    assert found[1].err == ""
    assert "abort: " in found[who].out, "it had to be ended from beside, and could say so first"


@pytest.mark.parametrize("who", first_of([0, 1], 0))
def test_a_stopped_rank_is_named(who: int):
    with ranks(RANK, "stop", str(who), "5") as running:
        (other,) = ends([running[1 - who]])
        assert running[who].poll() is None, "nobody but its launcher can end it"
    assert other.code == 1
    assert f"rank {who} on {HOST}" in other.err and "no sign of life" in other.err


def test_all_end_well_when_nobody_fails():
    with ranks(RANK, "nothing", "-1") as running:
        found = ends(running)
    assert [(end.code, end.err, end.out.splitlines()[-1]) for end in found] == [(0, "", "done")] * 2


LAUNCH = """
import sys
from isoscale.launch import local
local.command_of = lambda words: [sys.executable, *words]
sys.exit(local.launch(2, sys.argv[1:]))
"""


def launched(*words: str) -> subprocess.Popen[str]:
    return warm.Popen(
        [sys.executable, "-c", LAUNCH, str(RANK), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ranks_do_not_outlive_their_launcher():
    launcher = launched("sleep", "1")
    assert launcher.stdout is not None and launcher.stdout.readline().startswith("process")
    ours = children(launcher.pid)
    assert len(ours) == 2
    time.sleep(2)  # until both wait: writing to a launcher that is gone would end them too
    launcher.kill()
    print(f"gone {wait_until_gone(ours, 20):.2f} s after their launcher")
    launcher.communicate()


@pytest.mark.full
@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_launcher_ends_a_rank_that_is_stopped(who: int):
    launcher = launched("stop", str(who), "5")
    err = launcher.communicate(timeout=ENOUGH)[1]
    assert launcher.returncode == 1
    assert f"rank {who} on {HOST}" in err and "no sign of life" in err


@pytest.mark.parametrize("who", [0, 1])
def test_the_launcher_names_the_signal_that_ended_a_rank(who: int):
    launcher = launched("kill", str(who))
    err = launcher.communicate(timeout=ENOUGH)[1]
    assert launcher.returncode == 1
    assert f"error: rank {who} was ended by SIGKILL" in err and "the same command goes on" in err
