"""The network between ranks, measured: who reaches whom, how long a word takes, and how much goes through."""

import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from isoscale.parallel.health.checkup import HealthCheck
from isoscale.parallel.health.rendezvous import address_of, interface, is_own, own_address
from isoscale.parallel.health.server import family_of
from isoscale.parallel.health.signed_store import prefixed
from isoscale.system import devices

CONNECT = 5.0
"""Seconds for a connection to stand."""
MOST_AT_ONCE = 256
MOST_NAMED = 8
"""Pairs of hosts that one host names; the others are counted."""
GROUP = 20.0
"""Seconds for all connections of a process group to stand, and for one message to arrive."""
MEASURE = 60.0
NUM_SMALL = 200
NUM_LARGE = 3
LARGE = 64 * 10**6
MEDIUM = LARGE // 16
SLOW = 0.5
"""Seconds for the medium message after which the large one is left out."""
INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Blocked:
    """A way that is not open."""

    origin: str
    target: str
    address: str
    port: int
    reason: str


@dataclass(frozen=True)
class Ways:
    """The ways between hosts, in both directions."""

    num_hosts: int
    num_blocked: int
    blocked: tuple[Blocked, ...]
    """Some of them."""
    interfaces: dict[str, str]
    """The interface of every host."""
    without: tuple[str, ...]
    """The hosts that do not have the interface that was chosen for them."""


@dataclass(frozen=True)
class Speed:
    """What an all-reduce costs."""

    small: float
    """Seconds for one number, the median of many."""
    large: float
    """Seconds for a large tensor."""
    num_bytes: int
    """Of the large tensor."""

    @property
    def bandwidth(self) -> float:
        """Bytes of the tensor a second, whatever the algorithm sends for them."""
        return self.num_bytes / self.large


def ways(checkup: HealthCheck) -> Ways:
    """Open a connection from every host to every other one, at ports that were just taken."""
    name = interface_here(checkup)
    with _listening(checkup.hosts[checkup.rank], name or "", _address(checkup, name)) as mine:
        told = checkup.share("doors", asdict(mine) if checkup.is_first_here else None)
        doors = [_Door(**each) for each in told if each]
        blocked = _try_all(mine, doors) if checkup.is_first_here else []
        found = checkup.share("ways", {"count": len(blocked), "some": [asdict(way) for way in blocked[:MOST_NAMED]]})
    some = tuple(Blocked(**way) for one in found for way in one["some"])
    interfaces = {door.host: door.interface for door in doors}
    without = tuple(door.host for door in doors if not door.has_interface)
    return Ways(len(doors), sum(one["count"] for one in found), some, interfaces, without)


def interface_here(checkup: HealthCheck) -> str | None:
    """The interface that Gloo takes on this host: the user's choice, or the one towards the others."""
    return os.environ.get(INTERFACE) or interface(checkup.arrivals, checkup.rank)


def _address(checkup: HealthCheck, name: str | None) -> str:
    """Where the other hosts find this one."""
    mine = checkup.arrivals[checkup.rank]
    elsewhere = [arrival.address for arrival in checkup.arrivals if arrival.host != mine.host]
    found = address_of(name) if name else None
    return found or (own_address(elsewhere[0]) if elsewhere else mine.address)


@dataclass(frozen=True)
class _Door:
    """A fresh port that says a word of its own to whoever comes, so that no other machine is taken for this one."""

    host: str
    interface: str
    has_interface: bool
    address: str
    port: int
    token: str


@contextmanager
def _listening(host: str, interface: str, address: str) -> Iterator[_Door]:
    at = address if is_own(address) else ""  # where a gateway stands before this host, others know it by another one
    with socket.create_server((at, 0), family=family_of(at), backlog=1024) as server:
        port, token = int(server.getsockname()[1]), secrets.token_hex(8)
        wanted = set(filter(None, interface.split(",")))
        has_interface = wanted <= {name for _, name in socket.if_nameindex()}
        door = _Door(host, interface, has_interface, address, port, token)
        threading.Thread(target=_answer, args=(server, door.token.encode()), daemon=True).start()
        try:
            yield door
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread


def _answer(server: socket.socket, token: bytes) -> None:
    while True:
        try:
            visitor = server.accept()[0]
        except OSError:
            return
        with suppress(OSError), visitor:
            visitor.sendall(token)


def _try_all(mine: _Door, doors: list[_Door]) -> list[Blocked]:
    others = [door for door in doors if door.host != mine.host]
    with ThreadPoolExecutor(min(len(others), MOST_AT_ONCE) or 1) as pool:
        reasons = list(pool.map(_try, others))
    return [
        Blocked(mine.host, door.host, door.address, door.port, reason)
        for door, reason in zip(others, reasons, strict=True)
        if reason
    ]


def _try(door: _Door) -> str:
    """Why a door cannot be reached; nothing where it can."""
    try:
        with socket.create_connection((door.address, door.port), timeout=CONNECT) as connection:
            said = connection.recv(len(door.token))
    except OSError as error:
        return error.strerror or str(error)
    return "" if said == door.token.encode() else "another machine answers there"


def speeds(checkup: HealthCheck, backend: str | None, device: torch.device) -> dict[str, Speed]:
    """What an all-reduce costs over Gloo, and over the backend of the device where there is one."""
    name = interface_here(checkup)
    if name is not None:
        os.environ.setdefault(INTERFACE, name)
    devices.of(device).make_current()
    # A failure of NCCL would end the process before it could say so.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    dist.init_process_group(
        "cpu:gloo" + (f",{device.type}:{backend}" if backend else ""), store=prefixed("group", checkup.board.store),
        rank=checkup.rank, world_size=checkup.world, timeout=timedelta(seconds=GROUP),
    )  # fmt: skip
    found = {"gloo": _speed(torch.device("cpu"))}
    if backend:
        found[backend] = _speed(device)
    dist.destroy_process_group()
    return found


def _speed(device: torch.device) -> Speed:
    number = torch.zeros(1, device=device)
    _times(number, NUM_SMALL // 10)  # the first ones connect
    small = statistics.median(_times(number, NUM_SMALL))
    medium = torch.zeros(MEDIUM // 4, device=device)
    slowest = torch.tensor([min(_times(medium, 2))], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all decide the same
    if float(slowest) > SLOW:
        return Speed(small, float(slowest), MEDIUM)
    large = torch.zeros(LARGE // 4, device=device)
    _times(large, 1)
    return Speed(small, statistics.median(_times(large, NUM_LARGE)), LARGE)


def _times(tensor: torch.Tensor, count: int) -> list[float]:
    """Seconds of each of some all-reduces, whose result is there."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        devices.of(tensor.device).synchronize()
        found.append(time.perf_counter() - start)
    return found
