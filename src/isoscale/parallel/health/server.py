"""Where the news of all ranks come together: rank 0 hears who is alive, how far each has come and what went wrong.

Every rank keeps one connection to the server. The system closes it when a process ends, however it ends, so that a dead
rank is noticed at once and one that merely computes for long is never taken for dead. Where a worker of the dead rank
keeps it open, the rank beside it on the same machine knows.

Whoever connects is a stranger until he has proved that he knows the secret of the training, and the server has proved
the same to him. Strangers are few, have little time and few bytes, and whatever they send, it is they who are hung up
on. When all ranks are there, nobody else is let in.

By hand, because torch's own watchdogs tell of a collective that took too long, after minutes and on every rank alike,
and torchrun sees only processes that it has started itself: neither can say which rank is the reason, and why.
"""

import errno
import json
import os
import secrets
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar
from weakref import WeakSet

from isoscale.errors import FAILED, USER_CAN_FIX, PeerFailed, RankLost, message
from isoscale.parallel.environments.base import LOOPBACK
from isoscale.parallel.secret import Key

BEAT = 0.5
"""Seconds between two signs of life."""
TOGETHER = 0.5
"""Seconds in which ranks that end are taken to end for one reason, such as a machine that is switched off."""
UNREACHABLE = 25
"""Seconds until the system gives up a connection at whose other end there is no machine any more."""
LONGEST_LINE = 1 << 20
LONGEST_PROOF = 1 << 10
"""Bytes of what a stranger says before he is one of the ranks."""
MOST_STRANGERS = 64
"""Those who are connected and have proved nothing; for each rank there may be one more."""
TO_PROVE = 10.0
"""Seconds that a stranger has."""
TO_BE_HEARD = 30.0
"""Seconds for which a rank tries to be let in."""
GO_ON = "the last checkpoint, if there is one, is intact, and the same command goes on from it"

_SILENT = "gives no sign of life"


@dataclass(frozen=True)
class Cause:
    """Why all ranks have to end."""

    ranks: tuple[int, ...]
    """Whom it is about."""
    message: str
    exit_code: int = FAILED
    traceback: str = ""
    raised: bool = False
    """Whether a rank said so itself; otherwise it was found missing."""

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Cause":
        """From the words of a message."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})

    def error(self) -> PeerFailed:
        """What the other ranks raise."""
        kind = PeerFailed if self.raised else RankLost
        return kind(self.message, self.exit_code, "" if self.exit_code == USER_CAN_FIX else self.traceback)


class Line:
    """A connection that carries JSON, one message a line."""

    everywhere: ClassVar[WeakSet["Line"]] = WeakSet()
    """All of this process."""

    def __init__(self, connection: socket.socket) -> None:
        """Over a connection that stands."""
        self._socket = connection
        self._lock = threading.Lock()
        self._received = b""
        Line.everywhere.add(self)
        connection.settimeout(UNREACHABLE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": UNREACHABLE * 1000}
        for name, value in options.items():
            if hasattr(socket, name):  # not every system has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, **message: Any) -> bool:
        """Send a message; whether that was possible."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None when no more will come, or what comes is nothing that a rank sends."""
        if not self._fill(1 << 16):
            return None
        *lines, self._received = self._received.split(b"\n")
        return _read_all(lines) if len(self._received) <= LONGEST_LINE else None

    def receive_first(self) -> list[dict[str, Any]] | None:
        """The first message of somebody who may be anybody, or none yet; None where there will be none.

        What follows it stays for later.
        """
        if not self._fill(LONGEST_PROOF):
            return None
        line, end, rest = self._received.partition(b"\n")
        if not end:
            return [] if len(line) <= LONGEST_PROOF else None
        self._received = rest
        return _read_all([line])

    def _fill(self, size: int) -> bool:
        try:
            chunk = self._socket.recv(size)
        except OSError:
            return False
        self._received += chunk
        return bool(chunk)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def _read_all(lines: Sequence[bytes]) -> list[dict[str, Any]] | None:
    try:
        return [dict(json.loads(line)) for line in lines]
    except (ValueError, TypeError, RecursionError):  # whoever this is, it is not a rank
        return None


def _hang_up_in_child() -> None:
    """A worker forked from this process would keep its connections open after the end of this process."""
    for line in list(Line.everywhere):
        line.close()


os.register_at_fork(after_in_child=_hang_up_in_child)


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen at an address of this machine, a number; at all of them where it is empty."""
    return socket.create_server((address, port), family=family_of(address))


def family_of(address: str) -> socket.AddressFamily:
    """Of which kind an address is, a number."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def knock(place: tuple[str, int], rank: int, key: Key) -> Line:
    """The connection of a rank to the server, after each has proved to the other that it knows the secret.

    An OSError where nobody answers, and where it is not the server who does. Who is turned away, because many others
    came at the same time, tries again.
    """
    until = time.monotonic() + TO_BE_HEARD
    while True:
        line = Line(socket.create_connection(place, timeout=UNREACHABLE))
        asked = _first_message(line)
        if asked is not None and isinstance(asked.get("challenge"), str):
            challenge = secrets.token_bytes(32).hex()
            proof = key.sign(b"rank", str(rank).encode(), asked["challenge"].encode(), challenge.encode())
            line.send(rank=rank, challenge=challenge, proof=proof.hex())
            answer = _first_message(line)
            if answer is not None and answer.get("proof") == proof_of_hub(key, {"challenge": challenge}):
                return line
        line.close()
        if time.monotonic() > until:
            raise ConnectionError("something listens there that is not rank 0")
        time.sleep(BEAT / 10)


def _first_message(line: Line) -> dict[str, Any] | None:
    messages: list[dict[str, Any]] | None = []
    while messages == []:
        messages = line.receive_first()
    return messages[0] if messages else None


def proved(key: Key, challenge: bytes, said: dict[str, Any]) -> int | None:
    """The rank that somebody says to be, if he proves that he knows the secret."""
    rank, theirs, proof = (said.get(name) for name in ("rank", "challenge", "proof"))
    if not (type(rank) is int and rank >= 0 and isinstance(theirs, str) and isinstance(proof, str)):
        return None
    try:
        parts = (str(rank).encode(), challenge.hex().encode(), theirs.encode())
        return rank if key.has_signed(bytes.fromhex(proof), b"rank", *parts) else None
    except ValueError:  # no number in hexadecimal digits, or text that is none
        return None


def proof_of_hub(key: Key, said: dict[str, Any]) -> str:
    """What the server answers to a rank that has asked for a proof."""
    return key.sign(b"hub", str(said["challenge"]).encode()).hex()


class AwakeClock:
    """Seconds that this process was running: a job that is suspended and continued has missed nothing."""

    def __init__(self) -> None:
        """Starts at zero; must be read every few beats."""
        self._seconds = 0.0
        self._read = time.monotonic()

    def __call__(self) -> float:
        """The seconds so far."""
        now = time.monotonic()
        self._seconds += min(now - self._read, 4 * BEAT)
        self._read = now
        return self._seconds


@dataclass
class _Member:
    """What is known of a rank."""

    rank: int
    line: Line
    ticks: int = 0
    what: str = "the start"
    """What it waits for, or did last."""
    place: str = ""
    """Where its main thread is, if it has been there for a while."""
    advanced: float = 0.0
    heard: float = 0.0
    left: bool = False
    """Whether it has said that it is done."""
    gone: bool = False
    hung_up: bool = False


@dataclass
class _Stranger:
    """Somebody who has proved nothing yet."""

    line: Line
    challenge: bytes
    until: float


@dataclass
class HealthServer:
    """Listens to all ranks and tells all of them when they have to end, and why."""

    hosts: Sequence[str]
    """The host of every rank."""
    key: Key
    """That of this training, which a rank has too."""
    address: str = LOOPBACK
    """Where it listens; nothing for all addresses of this machine."""
    limit: float | None = None
    """Seconds without any progress after which a rank that others wait for is taken to hang."""
    listener: Callable[[int, list[Any]], None] | None = None
    """Told what a rank says for the log; must return at once."""

    def __post_init__(self) -> None:
        """Start to listen."""
        self._server = listen(self.address)
        self._server.setblocking(False)
        os.register_at_fork(after_in_child=self._server.close)
        self.port = int(self._server.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._strangers: list[_Stranger] = []
        self._members: dict[int, _Member] = {}
        self._clock = AwakeClock()
        self._first_gone: float | None = None
        self._cause: Cause | None = None
        threading.Thread(target=self._run, name="isoscale hub", daemon=True).start()

    def _run(self) -> None:
        try:
            self._listen()
        except Exception as error:  # ranks that nobody watches could wait for each other for ever
            words = f"{self._names([0])} no longer hears the others: {message(error)}\n  {GO_ON}"
            self._decide(Cause((0,), words, FAILED, traceback.format_exc(), raised=True))

    def _listen(self) -> None:
        next_round = time.monotonic()
        while True:
            for key, _ in self._selector.select(BEAT / 2):
                if isinstance(key.data, _Member):
                    self._read(key.data)
                elif isinstance(key.data, _Stranger):
                    self._examine(key.data)
                else:
                    self._accept()
            if time.monotonic() >= next_round:
                next_round = time.monotonic() + BEAT / 2
                self._turn_away([each for each in self._strangers if each.until < next_round])
                self._judge(self._clock())
                self._tell(pulse=True)

    def _accept(self) -> None:
        """Let somebody in to prove who he is; if there are too many of them, instead of who has been there longest."""
        self._turn_away(self._strangers[: max(0, 1 + len(self._strangers) - MOST_STRANGERS - len(self.hosts))])
        try:
            line = Line(self._server.accept()[0])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # this process must be able to open files
                self._turn_away(self._strangers[: len(self._strangers) // 2 + 1])
                time.sleep(BEAT / 100)
            return  # who connects may be gone again
        stranger = _Stranger(line, secrets.token_bytes(32), time.monotonic() + TO_PROVE)
        self._strangers.append(stranger)
        self._selector.register(line, selectors.EVENT_READ, stranger)
        line.send(challenge=stranger.challenge.hex())

    def _turn_away(self, strangers: Sequence[_Stranger]) -> None:
        for each in strangers:
            self._strangers.remove(each)
            self._selector.unregister(each.line)
            each.line.close()

    def _examine(self, stranger: _Stranger) -> None:
        """Take a stranger for the rank that he proves to be, or hang up."""
        if stranger not in self._strangers:
            return  # turned away a moment ago
        messages = stranger.line.receive_first()
        if messages == []:
            return  # half a line
        rank = proved(self.key, stranger.challenge, messages[0]) if messages else None
        if not messages or rank is None or rank >= len(self.hosts) or rank in self._members:
            self._turn_away([stranger])
            return
        self._strangers.remove(stranger)
        member = _Member(rank, stranger.line, advanced=self._clock(), heard=self._clock())
        self._selector.modify(member.line, selectors.EVENT_READ, member)
        member.line.send(proof=proof_of_hub(self.key, messages[0]))
        self._members[rank] = member
        if len(self._members) == len(self.hosts):
            # All ranks are there, and none comes twice.
            self._selector.unregister(self._server)
            self._server.close()
            self._turn_away(list(self._strangers))

    def _read(self, member: _Member) -> None:
        messages = member.line.receive()
        if messages is None:
            self._selector.unregister(member.line)
            member.line.close()
            member.hung_up = True
            self._miss(member)
        for news in messages or ():
            self._take(member, news)

    def _take(self, member: _Member, news: dict[str, Any]) -> None:
        member.heard = self._clock()
        if "ticks" in news:
            if news["ticks"] != member.ticks:
                member.advanced = member.heard
            member.ticks, member.what, member.place = news["ticks"], news["what"], news["place"]
        elif "cause" in news:
            self._decide(Cause.read(news["cause"]))
        elif "gone" in news:
            self._miss(self._members.get(news["gone"]))
        elif "said" in news:
            if self.listener is not None:
                self.listener(member.rank, news["said"])
        elif "left" in news:
            member.left, member.advanced = True, member.heard
            if len(self._members) == len(self.hosts) and all(other.left for other in self._members.values()):
                self._tell(end=True)

    def _miss(self, member: _Member | None) -> None:
        """The process of a rank has ended, as its connection or a rank beside it says."""
        if member is not None and not member.left:
            member.gone = True
            self._first_gone = self._first_gone or self._clock()

    def see_off(self, seconds: float) -> None:
        """Stay until all other ranks have hung up: what they were told last would be lost with this process."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(not each.hung_up for each in self._members.values() if each.rank):
            time.sleep(0.01)

    def _judge(self, now: float) -> None:
        """Find out whether a rank is missing; one that said why it failed is never missing."""
        members = sorted(self._members.values(), key=lambda member: member.rank)
        if self._cause is not None or not members:
            return
        if self._first_gone is not None:
            if now - self._first_gone > TOGETHER:
                ranks = [member.rank for member in members if member.gone]
                one = len(ranks) == 1
                gone = f"{self._names(ranks)} {'is' if one else 'are'} gone: the process{'' if one else 'es'}"
                why = "killed from outside (for using too much memory, perhaps) or by a crash"
                self._decide(Cause(tuple(ranks), f"{gone} ended without a word, {why}\n  {GO_ON}"))
        elif self.limit and now - max(member.advanced for member in members) > self.limit:
            late, state = _late(members, now - self.limit)
            if late:
                self._decide(self._stalled(late, state, members, now))

    def _stalled(self, late: list[_Member], state: str, members: list[_Member], now: float) -> Cause:
        waiting = max((member for member in members if member not in late), key=lambda member: member.ticks)
        ranks = [member.rank for member in late]
        alive = state != _SILENT
        lines = [
            f"{self._names(ranks)} {state}: others have waited {now - waiting.advanced:.0f} s for {waiting.what}",
            *(f"{self._names([member.rank])} is in {member.place}" for member in late if member.place and alive),
            f"{GO_ON}; where such a wait is meant to be, allow it with parallel.timeout",
        ]
        return Cause(tuple(ranks), "\n  ".join(lines))

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in ranks)

    def _decide(self, cause: Cause) -> None:
        """The first cause is the one that all are told."""
        if self._cause is None:
            self._cause = cause
            self._tell(cause=asdict(cause))

    def _tell(self, **message: Any) -> None:
        """The first rank comes last: when it has heard the end, the server may end with it."""
        for member in sorted(self._members.values(), key=lambda each: -each.rank):
            if not member.gone:
                member.line.send(**message)


def _late(members: list[_Member], since: float) -> tuple[list[_Member], str]:
    """Who keeps the others waiting, and in what way; nobody where all are equally far, however long it takes."""
    silent = [member for member in members if member.heard < since]
    left = [member for member in members if member.left]
    fewest = min(member.ticks for member in members)
    behind = [member for member in members if member.ticks == fewest]
    for late, state in ((silent, _SILENT), (left, "has ended before the others"), (behind, "hangs")):
        if 0 < len(late) < len(members):
            return late, state
    return [], ""
