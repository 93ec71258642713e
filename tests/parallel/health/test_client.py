"""What ranks learn of each other, over real connections, with all ranks in one process."""

import gc
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from isoscale.errors import PeerFailed, RankLost, UserError
from isoscale.parallel.health import client as clients
from isoscale.parallel.health import server as hubs
from isoscale.parallel.health.client import HealthClient
from isoscale.parallel.health.server import AwakeClock, Cause, HealthServer
from isoscale.parallel.secret import Key
from isoscale.system.process import birth, end_of

pytestmark = pytest.mark.slow

HOSTS = ("n1", "n1", "n2")
BROKEN = RuntimeError("[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.01)


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Cause]]:
    """Who would have ended its process, and why; here all ranks are this process."""
    ended: list[tuple[int, Cause]] = []

    def abort(client: HealthClient, cause: Cause) -> None:
        ended.append((client.rank, cause))
        client._done.set()

    monkeypatch.setattr(HealthClient, "_abort", abort)
    monkeypatch.setattr(clients, "LINGER", 0.1)
    return ended


@pytest.fixture
def ranks(
    aborted: list[tuple[int, Cause]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[HealthServer, list[HealthClient]]]:
    monkeypatch.setattr(hubs, "BEAT", 0.05)
    monkeypatch.setattr(clients, "BEAT", 0.05)
    server = HealthServer(HOSTS, Key(b"secret"))
    found = [HealthClient(rank, HOSTS, ("127.0.0.1", server.port), server.key) for rank in range(3)]
    until(lambda: len(server._members) == 3)
    yield server, found
    for client in found:
        client._done.set()


def die(client: HealthClient) -> None:
    """What the system does for a process that ends."""
    client._line._socket.shutdown(socket.SHUT_RDWR)


def test_a_failure_reaches_all_with_words_exit_code_and_traceback(ranks):
    _, (first, second, third) = ranks
    try:
        raise ValueError("boom")
    except ValueError as error:
        assert second.failed(error) is error
    until(lambda: first.cause and third.cause)
    raised = first.failed(BROKEN)
    assert type(raised) is PeerFailed and raised.exit_code == 1
    assert str(raised).startswith("rank 1 on n1 failed: ValueError: boom\n  in test_a_failure_reaches_all")
    assert "Traceback" in raised.traceback and raised.traceback.rstrip().endswith("ValueError: boom")
    assert [client.speaks for client in (first, second, third)] == [True, False, False]


def test_the_next_word_to_others_raises(ranks):
    _, (first, _, third) = ranks
    third.tick("a sum")
    first.failed(ValueError("boom"))
    until(lambda: third.cause)
    with pytest.raises(PeerFailed, match="rank 0 on n1 failed"):
        third.tick("a sum")


def test_what_the_user_can_fix_comes_without_a_traceback(ranks):
    _, (first, second, _) = ranks
    second.failed(UserError("no such file"))
    until(lambda: first.cause)
    raised = first.failed(BROKEN)
    assert isinstance(raised, PeerFailed) and (raised.exit_code, raised.traceback) == (2, "")


def test_the_first_failure_is_the_one_that_is_told(ranks):
    _, (first, second, third) = ranks
    third.failed(ValueError("one"))
    mine = ValueError("two")
    assert second.failed(mine) is mine
    until(lambda: first.cause)
    assert "one" in first.cause.message and second.cause == first.cause


def test_an_error_that_was_handled_passes_through(ranks):
    _, (first, second, _) = ranks
    error = second.failed(ValueError("one"))
    cause = second.cause
    assert second.failed(error) is error and second.cause is cause
    until(lambda: first.cause)
    lost = first.failed(BROKEN)
    assert first.failed(lost) is lost


def test_an_error_because_of_a_broken_connection_is_taken_for_one(ranks):
    _, (first, second, _) = ranks
    second.failed(ValueError("boom"))
    try:
        try:
            raise BROKEN
        except RuntimeError as error:
            raise ValueError("could not sum") from error
    except ValueError as error:
        assert isinstance(first.failed(error), PeerFailed)


def test_a_process_that_ends_is_noticed_and_named(ranks):
    _, (first, _, third) = ranks
    die(third)
    until(lambda: first.cause)
    raised = first.failed(BROKEN)
    assert type(raised) is RankLost and raised.exit_code == 1
    assert "rank 2 on n2 is gone" in str(raised) and "the same command goes on from it" in str(raised)


def test_processes_that_end_together_are_named_together(ranks):
    _, (first, second, third) = ranks
    die(third)
    time.sleep(0.25)
    die(second)
    until(lambda: first.cause)
    assert first.cause.message.startswith("rank 1 on n1, rank 2 on n2 are gone")


def test_a_rank_that_keeps_others_waiting_is_named_with_its_place(ranks):
    server, (first, second, third) = ranks
    for client in (first, second, third):
        client.tick("step 1")
    for client in (first, second):
        client.tick("the gradients of step 2")
    server.limit = 1.5
    until(lambda: first.cause)
    assert first.cause.ranks == (2,)
    assert first.cause.message.startswith("rank 2 on n2 hangs: others have waited ")
    assert "for the gradients of step 2\n  rank 2 on n2 is in until, " in first.cause.message
    assert "parallel.timeout" in first.cause.message


def test_a_long_pause_of_all_is_not_a_hang_of_one(ranks):
    server, watching = ranks
    server.limit = 0.2
    for client in watching:
        client.tick("an evaluation")
    time.sleep(1)
    assert not any(client.cause for client in watching)
    die(watching[2])
    until(lambda: watching[0].cause)


def test_who_advances_is_never_taken_to_hang(ranks):
    server, watching = ranks
    server.limit = 1.0
    watching[0].tick("ahead of all")
    for _ in range(20):
        time.sleep(0.1)
        for client in watching:
            client.tick("a step")
    assert not any(client.cause for client in watching)


def test_a_stuck_main_thread_is_ended_from_beside(ranks, aborted, monkeypatch):
    _, (_, second, third) = ranks
    monkeypatch.setattr(clients, "REACT", 0.3)
    second.failed(ValueError("boom"))
    third.cause or until(lambda: third.cause)
    third.failed(BROKEN)
    until(lambda: aborted)
    assert [rank for rank, _ in aborted] == [0], "the others were on their way out"


def test_without_rank_0_the_first_on_each_host_speaks(ranks):
    server, (_, second, third) = ranks
    for member in server._members.values():
        member.line._socket.shutdown(socket.SHUT_RDWR)
    until(lambda: second.cause and third.cause)
    assert "rank 0 on n1 no longer answers" in second.cause.message
    assert second.speaks and third.speaks


def test_a_silent_rank_0_is_noticed_by_the_others(ranks, monkeypatch):
    server, (_, second, third) = ranks
    monkeypatch.setattr(server, "_tell", lambda **message: None)
    time.sleep(0.2)
    second.limit = 0.3
    until(lambda: second.cause)
    assert "rank 0 on n1 has given no sign of life" in second.cause.message and third.cause is None


def test_all_leave_together(ranks):
    from threading import Thread

    _, watching = ranks
    leaving = [Thread(target=client.leave) for client in watching]
    for thread in leaving[:2]:
        thread.start()
    time.sleep(0.5)
    assert all(thread.is_alive() for thread in leaving[:2]), "they wait for the third"
    leaving[2].start()
    for thread in leaving:
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert not any(client.cause for client in watching)


def test_when_all_ranks_are_there_nobody_else_is_let_in(ranks):
    server, _ = ranks
    until(lambda: server._server.fileno() == -1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_time_in_which_the_process_was_suspended_does_not_count(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(hubs.time, "monotonic", lambda: now[0])
    clock = AwakeClock()
    now[0] += 1
    assert clock() == 1
    now[0] += 3600
    assert clock() <= 1 + 4 * hubs.BEAT


@pytest.mark.parametrize("process", [1, 0])
def test_the_end_of_a_process_is_noticed_by_the_rank_beside_it(ranks, process: int):
    """Its connection stays open here, as it does where a worker of the process lives on."""
    _, watched = ranks
    other = subprocess.Popen(["sleep", "1000"])
    watched[1 - process].look_after(process, other.pid, birth(other.pid))
    time.sleep(0.2)
    assert watched[2].cause is None
    other.kill()
    until(lambda: watched[1 - process].cause)
    assert watched[1 - process].cause.ranks == (process,)
    other.wait()


def test_another_process_with_the_number_of_a_rank_is_not_taken_for_it():
    with subprocess.Popen(["sleep", "1000"]) as other:
        assert end_of(other.pid, birth(other.pid) + "0") is None
        assert end_of(other.pid, birth(os.getpid())) is None
        assert end_of(other.pid, "") is None
        found = end_of(other.pid, birth(other.pid))
        other.kill()
    assert found is not None
    os.close(found)
    assert birth(other.pid) == "" and end_of(other.pid, "long ago") is None


def test_a_rank_that_can_no_longer_be_watched_ends_all(ranks, aborted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clients, "REACT", 0.2)
    _, (first, second, third) = ranks

    def fail() -> None:
        raise ValueError("cannot see")

    monkeypatch.setattr(second, "_place", fail)
    until(lambda: first.cause and second.cause and third.cause)
    assert first.cause.message.startswith("rank 1 on n1 lost sight of the others: ValueError: cannot see")
    assert third.cause.exit_code == 1 and "in fail" in third.cause.traceback
    until(lambda: 1 in [rank for rank, _ in aborted])  # its main thread, stuck for all that is known, does not keep it


def test_a_hub_that_fails_ends_all(ranks, monkeypatch: pytest.MonkeyPatch):
    server, watched = ranks

    def fail(rank: int, words: list[object]) -> None:
        raise ValueError("cannot hear")

    server.listener = fail
    assert watched[2].say(["something"])
    until(lambda: all(client.cause for client in watched))
    assert watched[1].cause.message.startswith("rank 0 on n1 no longer hears the others: ValueError: cannot hear")


def test_ranks_watch_each_other_with_any_number_of_files_open(aborted, monkeypatch: pytest.MonkeyPatch):
    until(lambda: not any(thread.name == "isoscale client" for thread in threading.enumerate()))  # of other tests
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        server = HealthServer(HOSTS[:2], Key(b"secret"))
        watched = [HealthClient(rank, HOSTS[:2], ("127.0.0.1", server.port), server.key) for rank in range(2)]
        assert watched[1]._line.fileno() > 1024 and watched[1].say(["something"])
        watched[1].failed(ValueError("boom"))
        until(lambda: watched[0].cause)
        assert "boom" in watched[0].cause.message
        for client in watched:
            client._done.set()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
