"""Ranks that were started differently are told apart before they train."""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import isoscale
from isoscale.errors import UserError
from isoscale.parallel import pinning, world
from isoscale.parallel import rank_info as facts
from isoscale.parallel.collectives import Ranks
from isoscale.parallel.health import preflight
from isoscale.parallel.health.preflight import describe_versions, describe_ways, describe_words, in_words, refused
from isoscale.parallel.health.probe import Blocked, Ways
from isoscale.parallel.rank_info import FILES, Facts
from tests.helpers import QUIET
from tests.ranks import Command, command_on, on_ranks

HOST = socket.gethostname()
SAME = {"isoscale": "1.0", "torch": "2.9", "Python": "3.12.1", FILES: "abc"}
THREE = Ranks(world_size=3, hosts=("n1", "n1", "n2"))


def told(rank: int, **versions: str) -> Facts:
    return Facts(rank, THREE.hosts[rank], 1, versions={**SAME, **versions})


def test_ranks_with_the_same_versions_pass():
    assert describe_versions([told(rank) for rank in range(3)]) == ""


def test_a_rank_with_other_versions_is_named_with_both():
    words = describe_versions([told(0), told(1), told(2, torch="2.8", Python="3.11.2", **{FILES: "def"})])
    assert "the same program as rank 0 on n1" in words and "install the same versions" in words
    assert "rank 2 on n2 has torch 2.8, Python 3.11.2, and rank 0 torch 2.9, Python 3.12.1" in words
    assert "rank 1" not in words


def test_a_rank_with_other_files_of_the_same_version_is_named():
    words = describe_versions([told(0), told(1, **{FILES: "def"}), told(2)])
    assert "rank 1 on n1 has other files of isoscale than rank 0" in words


def test_of_many_ranks_that_differ_some_are_named_and_the_others_counted():
    many = [Facts(rank, "n1", 1, versions={"torch": "2.9" if rank == 0 else "2.8"}) for rank in range(100)]
    words = describe_versions(many)
    assert "rank 8 on n1 has" in words and "rank 9 on n1" not in words and "and 91 more" in words


def test_a_change_in_any_file_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(facts, "PACKAGE", tmp_path)
    (tmp_path / "room").mkdir()
    file = tmp_path / "room" / "module.py"
    file.write_text("a = 1\n")
    before = facts.versions()[FILES]
    file.write_text("a = 2\n")
    assert facts.versions()[FILES] != before
    file.write_text("a = 1\n")
    assert facts.versions()[FILES] == before


def compared(first: Any, theirs: Any) -> str:
    return describe_words([in_words(*first), in_words(*theirs)], THREE)


@pytest.mark.parametrize(
    ("first", "theirs", "expected"),
    [
        (("images/digits", [], []), ("images/mnist", [], []), "images/mnist instead of images/digits"),
        ((None, [], []), ("images/mnist", [], []), "images/mnist instead of the default recipe"),
        (("x", ["seed=1"], []), ("x", ["seed=2"], []), "seed=2 instead of seed=1"),
        (("x", {"seed": 1}, []), ("x", {"seed": 2}, []), "seed=2 instead of seed=1"),
        (("x", ["seed=1"], []), ("x", [], []), "not seed=1"),
        (("x", [], []), ("x", [], ["--profile"]), "--profile, which rank 0 was not asked"),
        (({"a": {"b": 1, "c": 2}}, {}, []), ({"a": {"b": 3, "c": 2}}, {}, []), "a.b=3 instead of a.b=1"),
        (({"seed": 1}, {}, []), ({"seed": 2}, {}, []), "seed=2 instead of seed=1"),
    ],
)
def test_other_words_are_shown_beside_those_of_rank_0(first: Any, theirs: Any, expected: str):
    words = compared(first, theirs)
    assert f"rank 1 on n1: {expected}\n" in words and "with the same recipe and overrides" in words


class Something:
    """A value that looks different in every process."""


@pytest.mark.parametrize(
    ("first", "theirs"),
    [
        (("x", ["a=1", "b=2"], []), ("x", ["b=2", "a=1"], [])),
        (("x", ["observe.level=error"], []), ("x", [], [])),
        (({"a": {"b": 1, "c": [2]}}, {}, []), ({"a": {"c": [2], "b": 1}}, {}, [])),
        (({"a": Something()}, {}, []), ({"a": Something()}, {}, [])),
        ((Path("x"), {}, []), ("x", None, [])),
    ],
)
def test_what_means_the_same_passes(first: Any, theirs: Any):
    assert compared(first, theirs) == ""


def test_files_are_compared_by_what_is_in_them(tmp_path: Path):
    one, same, other = (tmp_path / name for name in ("one.yaml", "same.yaml", "other.yaml"))
    one.write_text("seed: 1")
    same.write_text("seed: 1")
    other.write_text("seed: 2")
    assert compared((one, [], []), (same, [], [])) == ""
    assert f"{other} instead of {one}\n" in compared((one, [], []), (other, [], []))
    here = in_words(one, [], [])
    assert f"another {one}" in describe_words([here, {**here, "content": "else"}], THREE)
    assert describe_words([here, {**here, "content": None}], THREE) == "", "it may be on the disk of rank 0 only"


def test_ways_that_are_not_open_are_named_with_what_to_do():
    blocked = (Blocked("n1", "n2", "10.0.0.2", 4567, "timed out"),)
    words = describe_ways(Ways(2, 1, blocked, {"n1": "ib0", "n2": "ib0"}, ()), THREE, 60)
    assert words.startswith("all 3 ranks came, but within 60 s they could not connect to each other over Gloo (ib0):")
    assert "n1 does not reach n2 at 10.0.0.2, port 4567: timed out" in words
    assert "GLOO_SOCKET_IFNAME" in words and "firewall" in words and "isoscale doctor" in words
    assert "NCCL_SOCKET_IFNAME" in describe_ways(Ways(2, 1, blocked, {}, ()), Ranks(world_size=3, backend="nccl"), 60)
    open_ways = describe_ways(Ways(2, 0, (), {}, ()), Ranks(world_size=3, backend="nccl"), 60)
    assert "reach each other, but their first sum over NCCL did not end within 60 s" in open_ways


def test_an_error_of_the_backend_is_told_without_lines_of_its_source():
    error = RuntimeError("[enforce fail at /x/gloo/socket.cc:142] connect: Network is unreachable\nmore")
    assert "over Gloo: connect: Network is unreachable\n" in str(refused(THREE, error)).replace(" (lo)", "")


def asked(words: dict[int, list[Any]]) -> str:
    """What a rank reads that trains with words of its own."""
    recipe, keys = words[int(os.environ["RANK"])]
    with pytest.raises(Exception) as caught:
        isoscale.train(recipe, **{**QUIET, **keys})
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.slow
def test_ranks_that_are_asked_different_things_are_refused():
    words = {0: [{"extends": "images/digits"}, {}], 1: [{"extends": "images/digits"}, {"optimizer.lr": 0.5}]}
    found = on_ranks(2, asked, words)
    assert all(f"rank 1 on {HOST}: optimizer.lr=0.5, which rank 0 was not asked" in text for text in found)
    assert found[0].startswith(UserError.__name__)


def _other_version() -> None:
    if os.environ["RANK"] == "1":
        facts.__version__ = "0.0.0"


@pytest.mark.slow
def test_a_rank_of_another_version_is_refused_once_in_words(tmp_path: Path):
    found = command_on(2, tmp_path, "train", "images/digits", before=_other_version)
    assert [end.code for end in found] == [2, 2]
    assert f"rank 1 on {HOST} has isoscale 0.0.0, and rank 0 isoscale {isoscale.__version__}" in found[0].err
    assert found[1].err == "" and "Traceback" not in found[0].err and list(tmp_path.glob("runs/*")) == []


def _wrong_sum() -> None:
    """A backend that loses a number."""
    real = preflight.dist.all_reduce
    preflight.dist.all_reduce = lambda tensor: (real(tensor), tensor.sub_(1))


@pytest.mark.slow
def test_a_first_sum_that_is_wrong_is_refused(tmp_path: Path):
    found = command_on(2, tmp_path, "train", "images/digits", before=_wrong_sum)
    assert [end.code for end in found] == [2, 2]
    assert "the first sum of all ranks over Gloo is 2 on rank" in found[0].err and "but must be 3" in found[0].err


def _stop_when_connecting() -> None:
    if os.environ["RANK"] == "1":
        world._open_group = lambda *arguments: os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
def test_a_rank_that_came_and_then_stands_still_is_named(tmp_path: Path):
    running = Command(2, tmp_path, ["train", "images/digits"], _stop_when_connecting, ISOSCALE_JOIN_TIMEOUT="4")
    running.processes[0].wait(60)
    os.kill(running.pids[1], signal.SIGKILL)
    first = running.ended()[0]
    assert first.code == 1 and f"rank 1 on {HOST} gives no sign of life" in first.err


def _sleep_when_connecting() -> None:
    if os.environ["RANK"] == "1":
        world._open_group = lambda *arguments: time.sleep(100)


@pytest.mark.slow
def test_a_first_sum_that_does_not_end_is_told_in_words(tmp_path: Path):
    found = Command(2, tmp_path, ["train", "images/digits"], _sleep_when_connecting, ISOSCALE_JOIN_TIMEOUT="3").ended()
    assert [end.code for end in found] == [2, 2]
    expected = (
        "all 2 ranks came, and their hosts reach each other, but their first sum over Gloo did not end within 3 s"
    )
    assert expected in found[0].err and "Traceback" not in found[0].err and "error" not in found[1].err


def own_cores(path: str, keys: dict[str, Any]) -> tuple[int, ...]:
    """The cores of a rank during a training, which it forgets when it leaves."""
    before, during = pinning.own_cores(), []
    real = world.share_cores
    world.share_cores = lambda *words: (real(*words), during.append(pinning.own_cores()))[0]
    isoscale.train("images/digits", run=path, **{**QUIET, "train.epochs": 1, **keys})
    world.leave()
    assert pinning.own_cores() == before
    return during[0]


two_cores = pytest.mark.skipif(len(pinning.own_cores()) < 2, reason="needs two cores on Linux")


@pytest.mark.slow
@two_cores
def test_ranks_are_pinned_to_cores_of_their_own_and_set_free_when_they_leave(tmp_path: Path):
    first, second = on_ranks(2, own_cores, str(tmp_path / "run"), {"train.threads": 1})
    assert first and second and not set(first) & set(second)
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert [entry["cores"] for entry in record["map"]] == [pinning.in_words(first), pinning.in_words(second)]
    assert [(entry["rank"], entry["host"], entry["device"], entry["threads"]) for entry in record["map"]] == [
        (0, HOST, "cpu", 1), (1, HOST, "cpu", 1),
    ]  # fmt: skip


@pytest.mark.slow
@two_cores
@pytest.mark.parametrize("keys", [{"parallel.pin": "off", "train.threads": 1}, {"train.threads": 1000}])
def test_ranks_stay_free_where_that_is_asked_or_threads_need_it(keys: dict[str, Any], tmp_path: Path):
    allowed = pinning.own_cores()
    assert on_ranks(2, own_cores, str(tmp_path / "run"), {**keys, "train.steps": 1}) == [allowed, allowed]


@pytest.mark.slow
@two_cores
def test_threads_follow_from_the_cores_of_a_rank_and_stay(tmp_path: Path):
    shares = on_ranks(2, own_cores, str(tmp_path / "run"), {"train.steps": 1}, OMP_NUM_THREADS="")
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["decided"]["threads"] == min(map(len, shares))
