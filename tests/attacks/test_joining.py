"""Who does not know the secret of a training cannot take part in it, nor have its ranks run code."""

import json
import os
import pickle
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from isoscale.errors import UserError
from isoscale.parallel import secret, world
from isoscale.parallel.environments.find import Environment
from isoscale.parallel.health.rendezvous import OtherSecret, Rendezvous
from isoscale.parallel.health.signed_store import SignedStore
from isoscale.parallel.messages import Forged, pack, unpack
from isoscale.parallel.secret import Key
from tests import warm
from tests.attacks.doors import doors
from tests.attacks.test_hub import Opened
from tests.parallel.processes import ends, free_port, variables
from tests.ranks import on_ranks

JOINING = Path(__file__).parents[1] / "parallel" / "joining.py"
KEY = Key(b"the secret of a test")


def store(port: int, **more: bool) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=20), **more)


def _send_a_pickle(mark: str) -> str:
    """Rank 0 sends what torch's own function for objects would, and rank 1 listens as ranks do."""
    found = world.join("cpu")
    if found.is_main:
        dist.broadcast_object_list([Opened(Path(mark))], 0, device=torch.device("cpu"))
        return ""
    try:
        return str(found.broadcast(None, "a word"))
    except Forged as error:
        return str(error)


@pytest.mark.slow
def test_a_pickle_among_the_words_of_ranks_is_not_read(tmp_path: Path):
    found = on_ranks(2, _send_a_pickle, str(tmp_path / "mark"))
    assert not (tmp_path / "mark").exists()
    assert found[1].startswith("a word was not written by a rank of this training")


def _connect_everywhere() -> tuple[int, list[int]]:
    """How many doors this rank has, and which of them let somebody in."""
    found = world.join("cpu")
    mine, opened = doors([os.getpid()]), []
    for door in mine:
        with suppress(OSError):
            socket.create_connection(door, timeout=0.2).close()
            opened.append(door)
    dist.all_reduce(torch.ones(1), group=dist.new_group())  # what a task may want
    assert found.all_gather(found.rank) == [0, 1]
    return len(mine), opened


@pytest.mark.slow
def test_when_all_ranks_are_there_no_door_lets_anybody_in():
    assert on_ranks(2, _connect_everywhere) == [(2, []), (1, [])]  # Gloo's, and that of the place where ranks met


@pytest.mark.slow
def test_ranks_with_two_secrets_say_so_on_both_sides_without_waiting():
    port = free_port()
    running = [
        warm.Popen(
            [sys.executable, str(JOINING)], env=variables(rank, 3, port, ISOSCALE_SECRET=f"{word} secret of a test"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, word in enumerate(("one", "one", "other"))
    ]  # fmt: skip
    first, second, third = ends(running)
    assert [end.code for end in (first, second, third)] == [2, 2, 2]
    for end, me, other in ((first, 0, 2), (third, 2, 0)):
        assert f"rank {me} on " in end.err and f" and rank {other} on " in end.err, end.err
        assert "do not have the same secret" in end.err and "export ISOSCALE_SECRET" in end.err
    assert second.err == "", "of those with one secret, one speaks"


@pytest.mark.slow
@pytest.mark.parametrize("words", [b"[]", b"\xff\xfe", b"", pickle.dumps(Opened(Path("mark"))), b"0" * 64 + b"[0]"])
@pytest.mark.parametrize("name", ["world", "rank/1", "result"])
def test_what_a_stranger_writes_where_ranks_meet_is_not_believed(name: str, words: bytes, tmp_path: Path):
    """He can bring the meeting to its end, and no more; who meets there reads why."""
    port = free_port()
    server = store(port, is_master=True)
    dist.PrefixStore("isoscale//0", server).set(name, words)
    rank = Environment("a test", 0, 2, address="127.0.0.1", port=port, store_runs=True)
    if name == "rank/1":
        dist.PrefixStore("isoscale//0", server).add("count", 1)
    if name == "world" and not words:
        return  # that is nothing
    with pytest.raises(OtherSecret, match="do not have the same secret"):
        Rendezvous(rank, 20).meet()


@pytest.mark.slow
def test_the_place_where_ranks_meet_does_not_tell_the_secret():
    """All that is ever written there, read by somebody who reaches the port."""
    port, seen = free_port(), b""
    server = store(port, is_master=True)
    places = [Environment("a test", rank, 2, address="127.0.0.1", port=port, store_runs=True) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        meetings = list(pool.map(lambda place: Rendezvous(place, 20), places))
        list(pool.map(lambda meeting: meeting.meet(), meetings))
    meetings[0].board.set("hub", 1)
    reader = dist.PrefixStore("isoscale//0", store(port))
    for name in ("world", "rank/0", "rank/1", "result", "hub"):
        seen += reader.get(name)
    for key in (secret.shared_key(), meetings[0].board.key):
        assert key._secret not in seen and key._secret.hex().encode() not in seen
    assert meetings[1].board.get("hub") == 1 and server is not None


def test_words_of_another_meeting_fit_nowhere():
    """Not even those of the same ranks with the same secret: every rank adds a random part to the key."""
    board = SignedStore(dist.HashStore(), KEY)
    board.set("verdict", "")
    for other in (KEY.derive(b"room", b"1", b"2"), KEY.derive(b"room", b"12", b""), Key(b"")):
        with pytest.raises(Forged):
            SignedStore(board.store, other).get("verdict")
    board.store.set("hub", board.store.get("verdict"))
    with pytest.raises(Forged, match="'hub', where ranks meet, was not written by a rank"):
        board.get("hub")
    assert board.get("verdict") == ""


@pytest.mark.slow
def test_one_who_pretends_to_be_rank_0_learns_nothing_and_is_named():
    port = free_port()
    fake = dist.PrefixStore("isoscale//0", store(port, is_master=True))
    fake.set("world", json.dumps(2))
    command = [sys.executable, str(JOINING)]
    found = warm.run(command, env=variables(1, 2, port), capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and "do not have the same secret" in found.stderr


@pytest.mark.parametrize("place", range(0, 60, 7))
def test_a_message_with_another_byte_is_refused(place: int):
    packed = pack({"a": [1, "b"], "c": torch.arange(3)}, "a word", KEY)
    assert unpack(packed, "a word", KEY)["c"].tolist() == [0, 1, 2]
    for words, key, what in ((packed, Key(b""), "a word"), (packed, KEY, "another"), (packed[:place], KEY, "a word")):
        with pytest.raises(Forged):
            unpack(words, what, key)
    packed[place] ^= 1
    with pytest.raises(Forged):
        unpack(packed, "a word", KEY)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of a user who has none yet and no launcher of ours."""
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    return tmp_path / "settings" / "isoscale" / "secret"


def test_the_file_of_the_secret_is_for_the_user_alone_and_made_once(own: Path):
    before = os.umask(0)
    gate = threading.Barrier(8)
    try:
        with ThreadPoolExecutor(8) as pool:
            keys = list(pool.map(lambda _: (gate.wait(), secret.shared_key())[1], range(8)))
    finally:
        os.umask(before)
    assert len({key.sign(b"word") for key in keys}) == 1
    assert stat.S_IMODE(own.stat().st_mode) == 0o600 and stat.S_IMODE(own.parent.stat().st_mode) == 0o700
    assert [path.name for path in own.parent.iterdir()] == ["secret"], "nothing is left beside it"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o666])
def test_a_secret_that_others_may_use_is_refused(own: Path, mode: int):
    secret.shared_key()
    own.chmod(mode)
    with pytest.raises(UserError, match=rf"can be used by others \(mode {mode:o}\).*\n.*rm {own}"):
        secret.shared_key()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_a_secret_of_another_user_is_refused(own: Path):
    secret.shared_key()
    os.chown(own, 65534, -1)
    with pytest.raises(UserError, match="belongs to user 65534"):
        secret.shared_key()


@pytest.mark.parametrize("content", ["", "short"])
def test_a_file_without_a_secret_is_refused(own: Path, content: str):
    secret.shared_key()
    own.write_text(content)
    with pytest.raises(UserError, match=r"should hold a secret .* remove it"):
        secret.shared_key()


def test_where_no_file_can_be_made_the_variable_is_named(own: Path):
    own.parent.parent.write_text("a file in the way")
    with pytest.raises(UserError, match="cannot be used: Not a directory\nexport ISOSCALE_SECRET with the same value"):
        secret.shared_key()


def test_a_variable_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch):
    for short in ("", "secret"):
        monkeypatch.setenv(secret.VARIABLE, short)
        with pytest.raises(UserError, match=f"ISOSCALE_SECRET has {len(short)} characters"):
            secret.shared_key()
