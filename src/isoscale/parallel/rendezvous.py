"""How the processes find each other: a store at the address of rank 0, and a list of who has come from where."""

import fcntl
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from isoscale.errors import UserError
from isoscale.parallel.environment import Environment

Result = TypeVar("Result")
Store = Any
"""A store of torch.distributed, whose type torch does not declare."""
PATIENCE = "ISOSCALE_JOIN_TIMEOUT"
"""The variable that says how many seconds to wait for all ranks."""
DEFAULT_PATIENCE = 300.0
LOOK_EVERY = 0.1
ANSWER = 20.0
"""Seconds after which what listens but does not answer is not rank 0; torch itself would wait for ever."""
STAY = 2.0
"""Seconds that the host of the store stays after it gave up, so that others can read why."""


def prefixed(prefix: str, store: Store) -> Store:
    """A store within a store, where names are its own."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


class RanksMissing(UserError):
    """Some ranks did not come; `speaks` says whether it is this process that tells the user."""

    def __init__(self, message: str, speaks: bool) -> None:
        """What is missing, in words."""
        super().__init__(message)
        self.speaks = speaks


@dataclass(frozen=True)
class Comer:
    """A process that has come."""

    host: str
    process: int
    address: str
    """Its own address on the way to rank 0."""

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
        self._hosts_store = environment.rank == 0 and not environment.store_runs
        if self._hosts_store:
            self._be_there()
        else:
            self._wait_for_server()
        # Ranks of another job that meet at the same port by accident find a room of their own.
        self._room = f"isoscale/{environment.job}/{environment.attempt}"
        self.store = prefixed(self._room, self._connect())

    def _be_there(self) -> None:
        """Make sure that the others look for rank 0 where it is, if nobody said where that is."""
        here = self._environment
        if here.inferred_from and not is_own(here.address):
            raise UserError(
                f"rank 0 is on {socket.gethostname()}, but the others look for it on {here.address}, because of "
                f"{here.inferred_from}: export MASTER_ADDR={socket.gethostname()} and pass it on to all ranks"
            )

    def _connect(self) -> Store:
        here = self._environment
        try:
            if self._hosts_store:
                return self._open(is_master=True)
            return within(min(ANSWER, self._seconds), partial(self._open, is_master=False))
        except (dist.DistError, TimeoutError) as error:
            where = f"{here.address} port {here.port}"
            if self._hosts_store and is_taken(here.port):
                raise UserError(
                    f"rank 0 cannot listen at {where}: another program does, maybe another training, or a second "
                    f"process that was told to be rank 0\ntake another port: export MASTER_PORT={free_port()}"
                ) from None
            raise UserError(
                f"rank {here.rank} cannot {'listen at' if self._hosts_store else 'use'} {where} "
                f"(MASTER_ADDR, MASTER_PORT): {_reason(error)}\n"
                "take the host of rank 0 and a port that is free there"
            ) from None

    def another_store(self) -> Store:
        """The same store over another connection: a thread that waits in the first one keeps it."""
        return prefixed(self._room, self._open(is_master=False))

    def _open(self, is_master: bool) -> Store:
        here = self._environment
        return dist.TCPStore(  # type: ignore[attr-defined]
            here.address, here.port, is_master=is_master, wait_for_workers=False,
            timeout=timedelta(seconds=self._seconds),
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

    def meet(self) -> list[Comer]:
        """Wait for all ranks; who they are."""
        here, store = self._environment, self.store
        said = store.compare_set("world", "", str(here.world)).decode()
        if said != str(here.world):
            raise UserError(f"rank {here.rank} was told WORLD_SIZE={here.world}, another one {said}: they must agree")
        if store.add(f"times/{here.rank}", 1) > 1:
            raise UserError(f"two processes say that they are rank {here.rank}: give each its own RANK, from 0 on")
        store.set(f"rank/{here.rank}", json.dumps(asdict(_myself(here))))
        if store.add("count", 1) == here.world:
            store.set("result", "[]")
        return self._all_comers()

    def _all_comers(self) -> list[Comer]:
        here, store = self._environment, self.store
        while not store.check(["result"]):
            if time.monotonic() > self._deadline:
                missing = [rank for rank in range(here.world) if not store.check([f"rank/{rank}"])]
                store.compare_set("result", "", json.dumps(missing))
            time.sleep(LOOK_EVERY)
        missing = json.loads(store.get("result"))
        found = {rank: self._comer(rank) for rank in range(here.world) if rank not in missing}
        if missing:
            if self._hosts_store:
                time.sleep(STAY)
            raise RanksMissing(self._describe(missing, found), here.rank == min(found))
        return list(found.values())

    def _comer(self, rank: int) -> Comer:
        return Comer(**json.loads(self.store.get(f"rank/{rank}")))

    def _describe(self, missing: Sequence[int], found: dict[int, Comer]) -> str:
        here = self._environment
        hosts = {here.node_of(rank): comer.host for rank, comer in found.items()}
        hosts.pop(None, None)
        known = {rank: here.hosts[rank] if here.hosts else hosts.get(here.node_of(rank)) for rank in missing}
        names = ", ".join(f"rank {rank} on {host}" if host else f"rank {rank}" for rank, host in known.items())
        came = ", ".join(f"rank {rank} from {comer}" for rank, comer in found.items())
        return (
            f"{len(missing)} of {here.world} ranks did not come within {self._seconds:g} s: {names}\n"
            f"there were: {came}\n"
            f"look at why the others did not start, or wait longer: {PATIENCE}={2 * self._seconds:g}"
        )


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"something listens there that is not rank 0: {error}"
    return str(error).splitlines()[0]


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


def _myself(environment: Environment) -> Comer:
    return Comer(socket.gethostname(), os.getpid(), own_address(environment.address))


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
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


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


def interface(comers: Sequence[Comer], rank: int) -> str | None:
    """The network interface over which a rank reaches the others; None where that cannot be known.

    Where the name of a machine means the machine itself (127.0.0.1), as on many systems, the ranks on it take the way
    to a rank elsewhere.
    """
    mine = comers[rank]
    elsewhere = [comer.address for comer in comers if comer.host != mine.host]
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
