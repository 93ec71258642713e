"""A meeting of all ranks to look at what is between them: whatever does not answer is named, and every wait ends."""

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from isoscale.errors import UserError
from isoscale.parallel.environments.find import Environment
from isoscale.parallel.health.rendezvous import LOOK_EVERY, PATIENCE, STAY, Rendezvous, is_own, patience

DEFAULT_PATIENCE = 20.0
"""Seconds to wait for all ranks, unless the variable says otherwise: less than a training waits."""
ANSWER = 120.0
"""Seconds to wait for a word of another rank, which may have to look at a slow machine first."""
PROBE = 3.0
_END = "end"


class RankSilent(UserError):
    """A rank that had come no longer answers; `speaks` says whether it is this process that tells the user."""

    def __init__(self, message: str, speaks: bool) -> None:
        """Who is silent, in words."""
        super().__init__(message)
        self.speaks = speaks


class HealthCheck:
    """All ranks, and what they tell each other without a process group."""

    def __init__(self, environment: Environment) -> None:
        """Wait for all ranks, for a while."""
        if environment.rank == 0 and not environment.store_runs:
            _be_found(environment)
        meeting = Rendezvous(environment, patience() if PATIENCE in os.environ else DEFAULT_PATIENCE)
        self.arrivals = meeting.meet()
        self.rank, self.world = environment.rank, environment.world
        self.hosts = tuple(arrival.host for arrival in self.arrivals)
        self.board = meeting.board.within("checkup")
        self.local_rank = self.hosts[: self.rank].count(self.hosts[self.rank])
        if environment.local_rank is not None:
            self.local_rank = environment.local_rank

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this rank speaks for its host."""
        return self.hosts.index(self.hosts[self.rank]) == self.rank

    def tell(self, what: str, value: Any) -> None:
        """Say something that `hear` or `word` wait for."""
        self.board.set(f"{what}/{self.rank}", value)

    def hear(self, what: str, seconds: float = ANSWER) -> list[Any]:
        """What every rank tells."""
        return self._read(what, range(self.world), seconds)

    def word(self, what: str, seconds: float = ANSWER) -> Any:
        """What rank 0 tells."""
        return self._read(what, [0], seconds)[0]

    def share(self, what: str, value: Any, seconds: float = ANSWER) -> list[Any]:
        """What every rank tells, on every rank; rank 0 passes it on, so that not all have to ask for all."""
        self.tell(what, value)
        if self.is_first:
            self.tell(f"all {what}", self.hear(what, seconds))
        return list(self.word(f"all {what}", seconds + ANSWER))

    def _read(self, what: str, ranks: Sequence[int], seconds: float) -> list[Any]:
        keys = [f"{what}/{rank}" for rank in ranks]
        until = time.monotonic() + seconds
        try:
            while not self.board.has(*keys):
                if time.monotonic() > until or self.board.has(f"{_END}/0"):
                    missing = [rank for rank in ranks if not self.board.has(f"{what}/{rank}")]
                    raise self._silent(missing, f"did not answer for {seconds:g} s")
                time.sleep(LOOK_EVERY)
            return self.board.get_all(keys)
        except RuntimeError:  # the store is gone, and with it rank 0
            raise self._silent([0], "has ended before the others") from None

    def _silent(self, ranks: Sequence[int], state: str) -> RankSilent:
        names = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in ranks)
        told = self.is_first or not self._was_ended()
        return RankSilent(f"{names} {state}: look at what it says itself, or why it was ended", told)

    def _was_ended(self) -> bool:
        """Whether rank 0 has called the meeting off, and so has said why."""
        try:
            return self.board.has(f"{_END}/0")
        except RuntimeError:
            return False

    def call_off(self) -> None:
        """On rank 0: let nobody wait any longer."""
        if self.is_first:
            self.tell(_END, True)
            time.sleep(STAY)

    def close(self) -> None:
        """End the meeting: rank 0, which hosts the store, goes last."""
        self.tell("done", True)
        if self.is_first:
            self.hear("done")


def resolved(address: str) -> list[str]:
    """The numbers that a name stands for on this host; none where it is not known."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(place[0]) for _, _, _, _, place in found]


def _be_found(environment: Environment) -> None:
    """Make sure that the others look for rank 0 where it is: torch would wait, and then speak of sockets."""
    if not resolved(environment.address):
        raise UserError("\n".join(why_alone(environment) or ()))
    if not is_own(environment.address) and not _answers_itself(environment.address):
        here = socket.gethostname()
        raise UserError(
            f"rank 0 is on {here}, but the others look for it on {environment.address} (MASTER_ADDR)\n"
            f"export MASTER_ADDR={here} and pass it on to all ranks"
        )


def _answers_itself(address: str) -> bool:
    """Whether a connection to an address ends on this host, as with one that a gateway translates."""
    with socket.create_server(("", 0)) as server:
        try:
            socket.create_connection((address, server.getsockname()[1]), timeout=PROBE).close()
        except OSError:
            return False
    return True


def with_number(address: str, number: str) -> str:
    """A name and the number that it stands for."""
    return address if number == address else f"{address} ({number})"


def why_alone(environment: Environment) -> tuple[str, str] | None:
    """Why this process does not get to where the ranks meet, and what to do; None where it does."""
    me = f"rank {environment.rank} on {socket.gethostname()}"
    numbers = resolved(environment.address)
    if not numbers:
        return (
            f"{me} does not know {environment.address}, the host of rank 0",
            "repair its name in DNS or /etc/hosts, or export MASTER_ADDR, the number of that host",
        )
    where = f"rank 0 at {with_number(environment.address, numbers[0])} port {environment.port}"
    try:
        socket.create_connection((environment.address, environment.port), timeout=PROBE).close()
    except OSError as error:
        return f"{me} cannot reach {where}: {error.strerror or error}", _advice(error, numbers[0])
    return None


def _advice(error: OSError, number: str) -> str:
    if isinstance(error, ConnectionRefusedError):
        here = "; that is this machine itself: if rank 0 is on another, export MASTER_ADDR, its number"
        return f"nobody listens: look at why rank 0 did not start{here if number.startswith('127.') else ''}"
    return "a firewall? hosts of one job must reach each other on all ports; or export MASTER_PORT, one that is open"
