"""What a rank says for the log reaches rank 0 by the connection that it keeps anyway, and never holds anything up."""

import json
import socket
import time
from collections.abc import Callable
from functools import partial

from isoscale.parallel.health import server as hubs
from isoscale.parallel.health.client import HealthClient
from isoscale.parallel.health.server import HealthServer, Line
from isoscale.parallel.secret import Key

HOSTS = ("n1", "n2")


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.01)


def test_words_arrive_in_their_order_with_the_rank_and_before_a_failure():
    server, heard = HealthServer(HOSTS, Key(b"secret")), []
    first, second = (HealthClient(rank, HOSTS, ("127.0.0.1", server.port), server.key) for rank in (0, 1))
    server.listener = lambda rank, words: heard.append((rank, words, first.cause))
    for number in range(100):
        assert second.say([number])
    second.failed(ValueError("boom"))
    until(lambda: first.cause)
    assert heard == [(1, [number], None) for number in range(100)]
    first._done.set(), second._done.set()


def test_who_is_not_listened_to_loses_nothing_else():
    server = HealthServer(HOSTS, Key(b"secret"))
    watches = [HealthClient(rank, HOSTS, ("127.0.0.1", server.port), server.key) for rank in (0, 1)]
    assert watches[1].say(["to nobody"])
    watches[1].failed(ValueError("boom"))
    until(lambda: watches[0].cause)
    for watch in watches:
        watch._done.set()


def test_where_rank_0_does_not_read_a_rank_does_not_wait_for_it(monkeypatch):
    monkeypatch.setattr(hubs, "UNREACHABLE", 1)  # a rank that waits gives up then
    monkeypatch.setattr(HealthClient, "_run", lambda watch: None)  # nothing else uses the connection
    tried: list[bool] = []
    send = Line.send
    monkeypatch.setattr(Line, "send", lambda line, **words: tried.append("said" in words) or send(line, **words))
    server = HealthServer(HOSTS, Key(b"secret"))
    watch = HealthClient(1, HOSTS, ("127.0.0.1", server.port), server.key)
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch._line = Line(socket.create_connection(server.getsockname()))
        num_said = 0
        while watch.say(["x" * 16_000]):
            num_said += 1
            assert num_said < 10_000
        watch._line.close()
        received = b"".join(iter(partial(server.accept()[0].recv, 1 << 20), b""))
    assert tried.count(True) == num_said, "what would not go away at once is not tried"
    assert len([json.loads(line) for line in received.splitlines()]) == num_said
