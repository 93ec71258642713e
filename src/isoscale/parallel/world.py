"""Joining the other processes of a training, and leaving them.

Whether there are any is decided by the environment alone. A process joins once and stays until it ends.
"""

import atexit
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isoscale.errors import Stopped, StoppedEarly, UserError
from isoscale.parallel import pinning
from isoscale.parallel.collectives import ALONE, Ranks
from isoscale.parallel.environments.base import LOOPBACK
from isoscale.parallel.environments.find import Environment, find
from isoscale.parallel.health.client import HealthClient, open_sockets, shut, shut_doors
from isoscale.parallel.health.preflight import Separated, cut_off, exchange_facts, first_sum, refused
from isoscale.parallel.health.rendezvous import Arrival, NotMet, Rendezvous, interface, own_door, patience, within
from isoscale.parallel.health.server import HealthServer
from isoscale.parallel.health.signed_store import SignedStore, Store, prefixed
from isoscale.parallel.rank_info import Facts, of_this_rank
from isoscale.system import devices
from isoscale.system.printing import finish

NO_LIMIT = timedelta(days=30)
"""For a single collective: it is the watch that ends a wait, and it can name who is missing."""
CONNECT = 60.0
"""Seconds for all connections to stand and a first sum to arrive, with a little more for every rank; all have come."""
BEFORE_LOOKING = 2.0
"""Seconds that a rank which is stopped has to be named as such, before the network is looked at."""
SEEING_OFF = 5.0
"""Seconds that rank 0 stays at the end for the others to hear that it is the end."""
LAZY = "TORCH_GLOO_LAZY_INIT"
"""The variable by which Gloo connects ranks when they first speak to each other."""


@dataclass
class _Membership:
    """What this process holds while it is one of several."""

    ranks: Ranks
    client: HealthClient
    server: HealthServer | None
    """On rank 0."""
    store: Store
    """Kept because rank 0 hosts it for the others."""
    process: int


_membership: _Membership | None = None
_is_silent = False


def join(device_kind: str, seconds: float | None = None) -> Ranks:
    """Join the other processes, waiting some seconds for them; the same ranks at every call."""
    global _membership
    if _membership is None:
        environment = find()
        if environment.world == 1:
            return ALONE
        seconds = patience() if seconds is None else seconds
        meeting, arrivals = _meet(environment, seconds)
        hosts = tuple(arrival.host for arrival in arrivals)
        server, client = _start_watch(environment, meeting.board, hosts)
        local_rank = environment.local_rank
        if local_rank is None:
            local_rank = hosts[: environment.rank].count(hosts[environment.rank])
        backend = _choose_backend(meeting.board, environment, device_kind, local_rank, hosts)
        ranks = Ranks(environment.rank, environment.world, local_rank, hosts, backend, client.tick, meeting.board.key)
        _membership = _Membership(ranks, client, server, meeting.board.store, os.getpid())
        atexit.register(leave)
        with guarded():
            _connect(_membership, meeting, arrivals, device_kind, min(seconds, CONNECT + environment.world / 8))
    return _membership.ranks


def _meet(environment: Environment, seconds: float) -> tuple[Rendezvous, list[Arrival]]:
    global _is_silent
    try:
        meeting = Rendezvous(environment, seconds)
        return meeting, meeting.meet()
    except NotMet as error:
        _is_silent = not error.speaks
        raise


def _connect(
    member: _Membership, meeting: Rendezvous, arrivals: list[Arrival], device_kind: str, seconds: float
) -> None:  # fmt: skip
    """Open what carries tensors, and prove that it does; or say why not."""
    ranks, client = member.ranks, member.client
    mine = of_this_rank(ranks.rank, ranks.hosts[ranks.rank], device_kind)
    member.ranks = ranks = replace(ranks, facts=exchange_facts(meeting.board, mine, ranks))
    # Every rank of a host watches over the process of the next one, and the last over that of the first.
    others = [each for each in ranks.facts if each.host == mine.host and each.rank != mine.rank]
    if others:
        following = min(others, key=lambda each: (each.rank < mine.rank, each.rank))
        client.look_after(following.rank, following.process, following.born)

    def look() -> None:
        if client.cause is not None:
            raise client.cause.error()

    before = open_sockets()
    _limit(seconds)  # one that is stopped is named by the server
    why = _try_to_open(meeting, ranks, arrivals, mine, seconds, look)
    if why is not None:
        raise why  # here, where it comes from no broken connection
    _limit(math.inf)
    opened = open_sockets().keys() - before.keys()
    client.wake = lambda: shut(opened)
    if ranks.backend == "gloo" and LAZY not in os.environ:  # others connect when they need it
        shut_doors(opened, meeting.port)


def _try_to_open(
    meeting: Rendezvous, ranks: Ranks, arrivals: list[Arrival], mine: Facts, seconds: float, look: Callable[[], None]
) -> UserError | None:
    """Open the process group and use it; why that is not possible."""
    try:
        within(seconds + BEFORE_LOOKING, lambda: _open_group(meeting.board.store, ranks, arrivals, mine), look)
    except TimeoutError:
        separated = Separated(ranks, arrivals, meeting.another_board().within("separated"))
        return UserError(separated.explain(ranks, seconds, look))
    except RuntimeError as error:  # of torch, as all of its own are
        look()
        return refused(ranks, error)
    return None


def _start_watch(
    environment: Environment, board: SignedStore, hosts: tuple[str, ...]
) -> tuple[HealthServer | None, HealthClient]:
    global _is_silent
    key = board.key.derive(b"hub")
    server = HealthServer(hosts, key, own_door(environment)) if environment.rank == 0 else None
    if server is not None:
        board.set("hub", server.port)
    port = board.get("hub")
    address = environment.address if server is None else server.address or LOOPBACK
    try:
        return server, HealthClient(environment.rank, hosts, (address, port), key, environment.parent)
    except OSError as error:
        words = (
            f"rank {environment.rank} on {hosts[environment.rank]} does not reach rank 0 on {hosts[0]} at {address}, "
            f"port {port}, though it does at port {environment.port}, where ranks meet: {error.strerror or error}"
        )
        told = cut_off(board, environment.rank, words)
        _is_silent = told is not None
        raise UserError(told or words) from None


def _choose_backend(
    board: SignedStore, environment: Environment, device_kind: str, local_rank: int, hosts: tuple[str, ...]
) -> str:
    """Take this rank's device; what carries tensors between devices, which a device shared by ranks cannot."""
    backend = devices.KINDS[device_kind].backend
    if backend is None:
        return "gloo"
    name = devices.take(device_kind, local_rank).identity
    board.set(f"device/{environment.rank}", f"{hosts[environment.rank]} {name}")
    names = board.get_all([f"device/{rank}" for rank in range(environment.world)])
    return backend if len(set(names)) == len(names) else "gloo"


def _open_group(store: Store, ranks: Ranks, arrivals: list[Arrival], mine: Facts) -> None:
    device = devices.of(torch.device(mine.device))
    device.make_current()  # of this thread
    found = interface(arrivals, ranks.rank)
    if found is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
    # A failure of NCCL would end the process with SIGABRT before anybody could say which rank was the reason.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    backend = "cpu:gloo" if device.backend is None else f"cpu:gloo,{device.kind}:{ranks.backend}"
    dist.init_process_group(
        backend, store=prefixed("group", store), rank=ranks.rank, world_size=ranks.world_size,
        timeout=NO_LIMIT,
    )  # fmt: skip
    first_sum(ranks, device.device)


@contextmanager
def guarded(on_abort: Callable[[str], None] | None = None, timeout: float | None = None) -> Iterator[None]:
    """Within, an error on one rank becomes an error on all: the others raise PeerFailed or RankLost.

    `on_abort` is told why before a process whose main thread is stuck is ended; `timeout` is the recipe's. May be used
    inside itself, and by a rank that is alone.
    """
    if _membership is None:
        yield
        return
    client = _membership.client
    before, client.on_abort = client.on_abort, on_abort or client.on_abort
    _limit(timeout)
    try:
        yield
    except BaseException as error:
        if isinstance(error, Stopped | GeneratorExit) and not isinstance(error, StoppedEarly):
            raise  # all ranks have agreed to it
        raised = client.failed(error)
        client.linger()
        if raised is error:
            raise
        raise raised from None
    finally:
        client.on_abort = before


def _limit(timeout: float | None) -> None:
    if timeout is None or _membership is None:
        return
    _membership.client.limit = timeout
    if _membership.server is not None:
        _membership.server.limit = timeout


def voice(listener: Callable[[int, list[Any]], None] | None = None) -> Callable[[list[Any]], bool]:
    """How this rank tells rank 0 something for the log; there, `listener` is told what any rank says from now on."""
    if _membership is None:
        return lambda words: False
    if _membership.server is not None:
        _membership.server.listener = listener
    return _membership.client.say


def share_cores(ranks: Ranks, wanted: bool, threads: int | None) -> Ranks:
    """Keep every rank on cores of its own, where it is wanted and possible; the ranks with the cores that they have.

    `threads` is how many each of them computes with, where that does not follow from its cores.
    """
    mine = ranks.facts_of(ranks.rank)
    by_device = any(each.device != "cpu" for each in ranks.facts)
    here = [each for each in ranks.facts if each.host == mine.host]
    share = pinning.own_share(ranks.rank, here, threads, by_device) if wanted else None
    pinning.pin(share or mine.cores)
    found = ranks.all_gather(pinning.own_cores(), "the cores of every rank")
    return replace(ranks, facts=tuple(replace(each, cores=found[each.rank]) for each in ranks.facts))


def speaks() -> bool:
    """Whether this process tells the user what went wrong; of several ranks one does."""
    return not _is_silent and (_membership is None or _membership.client.speaks)


def leave() -> None:
    """Wait for the other ranks to be done, and end what connects them."""
    global _membership
    member = _membership
    if member is None or member.process != os.getpid():  # a process forked from a rank is no rank
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        member.client.failed(error)
    if member.ranks.facts:
        pinning.pin(member.ranks.facts_of(member.ranks.rank).cores)
    member.client.leave()
    if member.server is not None and member.client.cause is None:
        member.server.see_off(SEEING_OFF)
    if dist.is_initialized() and member.client.cause is None:
        dist.destroy_process_group()
    _membership = None


def end(code: int) -> None:
    """End a rank with an exit code; a failed one without waiting for what its device may never finish.

    What is due at the end of a process is done, but the interpreter is not taken apart: a thread that is inside torch
    just then, of torch's own or waiting for a peer, would abort the process after all was well. Nothing is done where
    there are no other ranks.
    """
    if _membership is None:
        return
    if _membership.client.cause is None:
        threading._shutdown()  # type: ignore[attr-defined]  # what Python does first: pools know no other sign to end
        atexit._run_exitfuncs()
    finish()
    os._exit(code)
