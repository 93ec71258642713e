"""Bytes of strangers, whatever they are, cost a training of several ranks nothing."""

import json
import os
import pickle
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isoscale.parallel.health import client as watches
from isoscale.parallel.health import server as hubs
from isoscale.parallel.health.client import HealthClient
from isoscale.parallel.health.server import HealthServer, knock
from isoscale.parallel.secret import Key
from tests import warm
from tests.attacks.doors import doors
from tests.helpers import command, sha
from tests.parallel.processes import children
from tests.ranks import Command, command_on

SHORT = ("train", "images/digits", "train.epochs=1", "train.threads=1", "observe.tensorboard=0")
NUM_FILES = 256
NUM_IDLE = 225
GATE = "GATE_OF_THE_TEST"
KEY = Key(b"the secret of a test")


class Opened:
    """What a pickle can do: it makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


def attacks(mark: Path) -> Iterator[bytes]:
    """What a stranger may send; none of it is a proof."""
    yield '{"token":"é"}\n'.encode()
    yield b"[" * 60_000 + b"\n"
    yield b'{"a":' * 60_000 + b"\n"
    yield b'{"token": "half a li'
    yield b"\xff\xfe\n\xff"
    yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield pickle.dumps(Opened(mark)) + b"\n"
    yield b"null\n1\n[]\n\n\n"
    yield b'{"rank": ' + b"9" * 5000 + b"}\n"
    for rank in (0, 1, -1, 7, True, 1.0, None, "1", [], {}):
        for proof in ("", "é", "zz", "00" * 32, None, 3, "\udcff"):
            yield json.dumps({"rank": rank, "challenge": "00", "proof": proof}).encode() + b"\n"
    yield b'{"cause": {"ranks": [0], "message": "end"}}\n{"left": true}\n'


def _come_late() -> None:
    """Rank 1 waits before it joins the server, until the test lets it; both have few files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if os.environ["RANK"] == "1":
        original = HealthClient.__init__

        def wait(watch: HealthClient, *arguments: object) -> None:
            while not Path(os.environ[GATE]).exists():
                time.sleep(0.01)
            original(watch, *arguments)  # type: ignore[arg-type]

        watches.HealthClient.__init__ = wait  # type: ignore[method-assign,assignment]


def hub_of(process: int, meeting_port: int) -> tuple[str, int]:
    """Where a rank listens besides the place where ranks meet."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = {door for door in doors([process]) if door[1] != meeting_port}
        if found:
            ((_, port),) = found
            return "127.0.0.1", port
        time.sleep(0.01)
    raise AssertionError("rank 0 never listened")


@pytest.mark.slow
def test_a_training_goes_on_whatever_strangers_send_and_however_many_they_are(tmp_path: Path):
    gate, mark = tmp_path / "gate", tmp_path / "mark"
    (quiet, _) = command_on(2, tmp_path, *SHORT, "--run", "quiet")
    assert quiet.code == 0, quiet.err
    attacked = Command(2, tmp_path, [*SHORT, "--run", "attacked"], _come_late, **{GATE: str(gate)})
    with ExitStack() as stack:
        door = hub_of(attacked.pids[0], attacked.port)
        for words, place in product(attacks(mark), (door, ("127.0.0.1", attacked.port))):
            stranger = socket.create_connection(place, timeout=20)
            with suppress(ConnectionError):
                stranger.sendall(words)
            if place == door:
                stack.enter_context(stranger)
            else:
                stranger.close()  # torch counts nobody, and this rank has few files
        idle = [stack.enter_context(socket.create_connection(door, timeout=20)) for _ in range(NUM_IDLE)]
        flood(door)
        gate.touch()
        ended = attacked.ended()
        assert len(idle) == NUM_IDLE
    assert [(end.code, end.err) for end in ended] == [(0, ended[0].err), (0, "")], ended
    assert sha(tmp_path / "attacked") == sha(tmp_path / "quiet")
    assert not mark.exists(), "a pickle was read"


def flood(door: tuple[str, int]) -> None:
    """Send without end, until whoever listens has had enough."""
    with socket.create_connection(door, timeout=20) as stranger, pytest.raises(ConnectionError):
        for _ in range(1 << 12):
            stranger.sendall(bytes(1 << 18))


@pytest.mark.slow
def test_local_ranks_listen_to_their_own_machine_only(tmp_path: Path):
    words = command(*SHORT, "--run", "run", "--devices", "2")
    with warm.Popen(words, cwd=tmp_path, stdout=-1, stderr=-1, text=True) as launcher:
        found: set[tuple[str, int]] = set()
        while launcher.poll() is None:
            found |= doors(children(launcher.pid))
            time.sleep(0.005)
        err = launcher.communicate()[1]
    assert launcher.returncode == 0, err
    assert len(found) >= 3, "the meeting place, the server and Gloo were to be seen"
    assert {address for address, _ in found} == {"127.0.0.1"}


@pytest.fixture
def server() -> Iterator[HealthServer]:
    found = HealthServer(("n1", "n1"), KEY)
    yield found
    for rank in {0, 1} - found._members.keys():  # when all are there it stops to listen
        knock(("127.0.0.1", found.port), rank, KEY)


def _fails(server: HealthServer, words: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stranger, suppress(ConnectionError):
        stranger.sendall(words)
        with suppress(OSError):  # ENOTCONN, which is no ConnectionError: turned away before
            stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    assert server._cause is None and not server._members


def test_no_bytes_of_a_stranger_reach_the_ranks(server: HealthServer):
    settings(max_examples=50)(given(st.binary(max_size=2000))(lambda words: _fails(server, words)))()


def test_no_message_of_a_stranger_reaches_the_ranks(server: HealthServer):
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    )
    messages = st.dictionaries(st.sampled_from(("rank", "challenge", "proof", "cause", "ticks", "left")), values)
    settings(max_examples=50)(
        given(messages)(lambda said: _fails(server, json.dumps(said).encode() + b"\n" + json.dumps(said).encode()))
    )()


def test_a_proof_that_was_overheard_is_worth_nothing(server: HealthServer):
    """Neither for another connection, nor for another rank, nor from a rank of another training."""
    overheard: list[bytes] = []

    def listen(sent: socket.socket) -> dict[str, str]:
        return dict(json.loads(sent.recv(1 << 10)))

    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stranger:
        challenge = listen(stranger)["challenge"]
        proof = KEY.sign(b"rank", b"1", challenge.encode(), b"00").hex()
        overheard.append(json.dumps({"rank": 1, "challenge": "00", "proof": proof}).encode() + b"\n")
        overheard.append(json.dumps({"rank": 0, "challenge": "00", "proof": proof}).encode() + b"\n")
        stranger.sendall(overheard[1])
        assert stranger.recv(1) == b""
    _fails(server, overheard[0])


def test_a_stranger_who_pretends_to_be_the_hub_is_not_believed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hubs, "TO_BE_HEARD", 0.0)
    other = HealthServer(("n1", "n1"), Key(b"of another training"))
    with pytest.raises(ConnectionError, match="something listens there that is not rank 0"):
        knock(("127.0.0.1", other.port), 0, KEY)


def test_strangers_who_stay_are_turned_away_for_who_comes_later(server: HealthServer):
    with ExitStack() as stack:
        place = ("127.0.0.1", server.port)
        idle = [stack.enter_context(socket.create_connection(place, timeout=20)) for _ in range(2 * NUM_IDLE)]
        stack.callback(knock(place, 0, KEY).close)
        assert len(server._strangers) <= hubs.MOST_STRANGERS + 2 < len(idle)


def test_who_says_nothing_is_turned_away_in_time(monkeypatch: pytest.MonkeyPatch, server: HealthServer):
    monkeypatch.setattr(hubs, "TO_PROVE", 0.0)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stranger:
        assert b"challenge" in stranger.recv(1 << 10)
        assert stranger.recv(1) == b""
