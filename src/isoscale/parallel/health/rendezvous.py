"""How the processes find each other: a store at the address of rank 0, and a list of who has come from where.

The store belongs to torch.distributed and lets everybody in. What is written there for ranks is therefore signed, first
with the secret that they share, and once all have come with a key that this meeting alone has: every rank adds a random
part to it, so that nothing that was ever written elsewhere fits.
"""

import fcntl
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from isoscale.errors import UserError
from isoscale.parallel import secret
from isoscale.parallel.environments.base import LOOPBACK
from isoscale.parallel.environments.find import Environment
from isoscale.parallel.health.server import listen
from isoscale.parallel.health.signed_store import SignedStore, Store, prefixed, unsigned
from isoscale.parallel.messages import Forged

Result = TypeVar("Result")
PATIENCE = "ISOSCALE_JOIN_TIMEOUT"
"""The variable that says how many seconds to wait for all ranks."""
DEFAULT_PATIENCE = 300.0
LOOK_EVERY = 0.1
ANSWER = 20.0
"""Seconds after which what listens but does not answer is not rank 0; torch itself would wait for ever."""
STAY = 2.0
"""Seconds that the host of the store stays after it gave up, so that others can read why."""


class NotMet(UserError):
    """The meeting came to nothing; `speaks` says whether it is this process that tells the user."""

    def __init__(self, message: str, speaks: bool) -> None:
        """Why, in words."""
        super().__init__(message)
        self.speaks = speaks


class RanksMissing(NotMet):
    """Some ranks did not come."""


class OtherSecret(NotMet):
    """Some ranks, or programs that are none, do not have the secret of this one."""


@dataclass(frozen=True)
class Arrival:
    """A process that has come."""

    host: str
    process: int
    address: str
    """Its own address on the way to rank 0."""
    nonce: str = field(default="", repr=False, compare=False)
    """A random word for the key of this meeting."""

    def __str__(self) -> str:
        return f"{self.host} (process {self.process})"


def patience() -> float:
    """Seconds to wait for all ranks."""
    text = os.environ.get(PATIENCE, "")
    try:
        seconds = float(text or DEFAULT_PATIENCE)
    except ValueError:
        seconds = -1
    if not seconds > 0:
        raise UserError(f"{PATIENCE} is {text!r}, but must be a number of seconds")
    return seconds


class Rendezvous:
    """The meeting of all processes of a training."""

    def __init__(self, environment: Environment, seconds: float) -> None:
        """Open the store, or find it, within some seconds."""
        self._environment = environment
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._key = secret.shared_key()
        self.port = environment.port
        self._hosts_store = environment.rank == 0 and not environment.store_runs
        if self._hosts_store:
            if environment.inferred_from and not is_own(environment.address):
                here = socket.gethostname()
                raise UserError(
                    f"rank 0 is on {here}, but the others look for it on {environment.address}, because of "
                    f"{environment.inferred_from}: export MASTER_ADDR={here} and pass it on to all ranks"
                )
        else:
            self._wait_for_server()
        # Ranks of another job that meet at the same port by accident find a room of their own.
        self._room = f"isoscale/{environment.job}/{environment.attempt}"
        self.board = self._board(self._connect())
        """Where ranks write for each other; signed with the key of this meeting once all have come."""

    def _board(self, store: Store) -> SignedStore:
        return SignedStore(prefixed(self._room, store), self._key)

    def _connect(self) -> Store:
        here = self._environment
        try:
            if self._hosts_store:
                return self._open(is_master=True)
            return within(min(ANSWER, self._seconds), partial(self._open, is_master=False))
        except (dist.DistError, OSError) as error:
            where = f"{here.address} port {here.port}"
            if self._hosts_store and is_taken(here.port):
                raise UserError(
                    f"rank 0 cannot listen at {where}: another program does, maybe another training, or a second "
                    f"process that was told to be rank 0\ntake another port: export MASTER_PORT={free_port()}"
                ) from None
            is_other = isinstance(error, TimeoutError)
            reason = f"something listens there that is not rank 0: {error}" if is_other else str(error).splitlines()[0]
            raise UserError(
                f"rank {here.rank} cannot {'listen at' if self._hosts_store else 'use'} {where} "
                f"(MASTER_ADDR, MASTER_PORT): {reason}\n"
                "take the host of rank 0 and a port that is free there"
            ) from None

    def another_board(self) -> SignedStore:
        """The same board over another connection: a thread that waits in the first one keeps it."""
        return self._board(self._open(is_master=False))

    def _open(self, is_master: bool) -> Store:
        here = self._environment
        at = own_door(here) if is_master else ""
        # Torch by itself would listen at all addresses.
        given: dict[str, Any] = {"master_listen_fd": listen(at, here.port).detach()} if at else {}
        return dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK if here.address == "localhost" else here.address, here.port, is_master=is_master,
            wait_for_workers=False, timeout=timedelta(seconds=self._seconds), **given,
        )  # fmt: skip

    def _wait_for_server(self) -> None:
        """Wait until somebody listens, with an eye on Ctrl-C and without the many words of torch."""
        here, reason = self._environment, ""
        while time.monotonic() < self._deadline:
            try:
                socket.create_connection((here.address, here.port), timeout=5).close()
                return
            except OSError as error:
                reason = str(error)
            time.sleep(LOOK_EVERY)
        who = "the launcher" if here.store_runs else "rank 0"
        raise UserError(
            f"rank {here.rank} on {socket.gethostname()} waited {self._seconds:g} s for {who}, which does not answer "
            f"at {here.address} port {here.port} (MASTER_ADDR, MASTER_PORT): {reason}\n"
            f"look at why {who} did not start, or wait longer: {PATIENCE}={2 * self._seconds:g}"
        )

    def meet(self) -> list[Arrival]:
        """Wait for all ranks; who they are."""
        here, board = self._environment, self.board
        mine = asdict(Arrival(socket.gethostname(), os.getpid(), own_address(here.address), secrets.token_hex(16)))
        try:
            said = board.propose("world", here.world)
        except Forged:
            board.set(_arrival(here.rank), mine)
            raise self._others() from None
        if said != here.world:
            raise UserError(f"rank {here.rank} was told WORLD_SIZE={here.world}, another one {said}: they must agree")
        if board.count(f"times/{here.rank}") > 1:
            raise UserError(f"two processes say that they are rank {here.rank}: give each its own RANK, from 0 on")
        board.set(_arrival(here.rank), mine)
        if board.count("count") == here.world:
            board.set("result", [])
        try:
            arrivals = self._all_arrivals()
        except Forged:
            raise self._others() from None
        self._key = self._key.derive(self._room.encode(), *(arrival.nonce.encode() for arrival in arrivals))
        self.board = SignedStore(board.store, self._key)
        return arrivals

    def _all_arrivals(self) -> list[Arrival]:
        here, board = self._environment, self.board
        while not board.has("result"):
            if time.monotonic() > self._deadline:
                missing = [rank for rank in range(here.world) if not board.has(_arrival(rank))]
                board.propose("result", missing)
            time.sleep(LOOK_EVERY)
        missing = board.get("result")
        there = [rank for rank in range(here.world) if rank not in missing]
        found = {
            rank: Arrival(**each) for rank, each in zip(there, board.get_all(list(map(_arrival, there))), strict=True)
        }
        if missing:
            if self._hosts_store:
                time.sleep(STAY)
            raise RanksMissing(self._describe(missing, found), here.rank == min(found))
        return list(found.values())

    def _others(self) -> OtherSecret:
        """Tell all that some have another secret; who, as far as they came, in words."""
        here, board = self._environment, self.board
        board.store.compare_set("result", "", "[]")  # without a signature: whoever waits looks at who has come
        came = [rank for rank in range(here.world) if board.has(_arrival(rank))]
        same, others = [here.rank], []
        for rank in came:
            try:
                board.get(_arrival(rank))
                same.append(rank)
            except Forged:
                # What a rank with another secret says of itself need not be true.
                said = unsigned(self.board.store.get(_arrival(rank)))
                host = said.get("host") if isinstance(said, dict) else None
                is_name = isinstance(host, str) and len(host) < 100 and host.isprintable()
                others.append(f"rank {rank} on {host}" if is_name else f"rank {rank}")
        if self._hosts_store:
            time.sleep(STAY)
        who = ", ".join(others) if others else "another program that writes where ranks meet"
        return OtherSecret(
            f"rank {here.rank} on {socket.gethostname()} and {who} do not have the same secret, and only those who "
            f"know that of a training can take part in it\n"
            f"it was taken from {secret.origin()}, which is the same where hosts share it; else {secret.EXPORT}, and "
            f"pass it on to all ranks (mpirun -x {secret.VARIABLE})",
            here.rank == min(same),
        )

    def _describe(self, missing: Sequence[int], found: dict[int, Arrival]) -> str:
        here = self._environment
        hosts = {here.node_of(rank): arrival.host for rank, arrival in found.items()}
        hosts.pop(None, None)
        known = {rank: here.hosts[rank] if here.hosts else hosts.get(here.node_of(rank)) for rank in missing}
        names = ", ".join(f"rank {rank} on {host}" if host else f"rank {rank}" for rank, host in known.items())
        came = ", ".join(f"rank {rank} from {arrival}" for rank, arrival in found.items())
        return (
            f"{len(missing)} of {here.world} ranks did not come within {self._seconds:g} s: {names}\n"
            f"there were: {came}\n"
            f"look at why the others did not start, or wait longer: {PATIENCE}={2 * self._seconds:g}"
        )


def _arrival(rank: int) -> str:
    """Where on the board a rank says who it is."""
    return f"rank/{rank}"


def within(seconds: float, function: Callable[[], Result], look: Callable[[], None] = lambda: None) -> Result:
    """What a function returns or raises; a TimeoutError if it takes too long, and then it is left to itself.

    It runs beside this thread, which hears signals meanwhile and now and then has a `look` at whether to go on.
    """
    answer: Future[Result] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    until = time.monotonic() + seconds
    while not wait([answer], LOOK_EVERY).done:
        look()
        if time.monotonic() > until:
            raise TimeoutError(f"no answer for {seconds:g} s")
    return answer.result()


def own_door(environment: Environment) -> str:
    """The address at which rank 0 listens: the one at which the others look for it, a number.

    Nothing, and so all addresses, where that is not known: the name of a machine may mean another one to the others
    than to itself, and the machine may have several.
    """
    if environment.address == "localhost":
        return LOOPBACK
    own = _own_numbers(environment.address)
    if len(own) != 1:
        return ""
    is_sure = environment.address == own[0] or environment.local_world == environment.world
    return own[0] if is_sure or not is_loopback(own[0]) else ""


def is_loopback(number: str) -> bool:
    """Whether an address leads to the machine itself."""
    return number.startswith("127.") or number == "::1"


def _own_numbers(host: str) -> list[str]:
    """The addresses of this machine among those that a name means here."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(place[0]) for family, _, _, _, place in found if _can_bind(family, place)))


def own_address(towards: str) -> str:
    """The address of this machine on the way to another one; nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def is_own(host: str) -> bool:
    """Whether a name or an address is that of this machine."""
    return bool(_own_numbers(host))


def is_taken(port: int) -> bool:
    """Whether another program listens at a port of this machine."""
    return not _can_bind(socket.AF_INET, ("", port))


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _can_bind(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError:
            return False
        return True


def interface(arrivals: Sequence[Arrival], rank: int) -> str | None:
    """The network interface over which a rank reaches the others; None where that cannot be known.

    Where the name of a machine means the machine itself (127.0.0.1), as on many systems, the ranks on it take the way
    to a rank elsewhere.
    """
    mine = arrivals[rank]
    elsewhere = [arrival.address for arrival in arrivals if arrival.host != mine.host]
    address = own_address(elsewhere[0]) if elsewhere and mine.address.startswith("127.") else mine.address
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def address_of(name: str) -> str | None:
    """The address of a network interface, if it has one."""
    request = 0x8915  # SIOCGIFADDR, on Linux
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
