"""Who a process is among several, and what all launchers' variables have in common."""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from isoscale.errors import UserError

FIRST_PORT, NUM_PORTS = 20000, 32768
"""Where the ports lie that are derived from the name of a job."""
LAST_PORT = 65535
LOOPBACK = "127.0.0.1"

Variables = Mapping[str, str]


@dataclass(frozen=True)
class Environment:
    """Who this process is and where the processes meet."""

    launcher: str = "nobody"
    """Who started the processes, in words."""
    rank: int = 0
    world: int = 1
    local_rank: int | None = None
    """Number of this process on its host; None where the launcher does not say."""
    local_world: int | None = None
    """Number of processes on this host; None where the launcher does not say."""
    address: str = ""
    port: int = 0
    store_runs: bool = False
    """Whether the launcher itself hosts the store where the processes meet."""
    attempt: str = "0"
    """How often the launcher has started the processes before: names from then must not be met again."""
    parent: int | None = None
    """The process that must not end before this one, where there is one."""
    job: str = ""
    """What tells this start from all others, as the launcher numbers them; empty where it does not."""
    hosts: tuple[str, ...] = ()
    """The host of every rank; empty where the launcher does not say."""
    inferred_from: str = ""
    """From what the address follows, in words; empty where somebody gave it."""
    note: str = ""
    """What the user should know about how this process was started."""

    def node_of(self, rank: int) -> int | None:
        """Number of the machine of a rank, where all have the same number of ranks and these are counted through."""
        if self.local_world is None or self.local_rank != self.rank % self.local_world:
            return None
        return rank // self.local_world


class Launcher(Protocol):
    """Knows the variables that one way of starting processes sets."""

    def is_here(self, variables: Variables) -> bool:
        """Whether this process was started that way."""

    def read(self, variables: Variables) -> Environment:
        """What the variables say; a UserError where they make no sense."""


class Place(NamedTuple):
    """A host that is likely that of rank 0, and why."""

    host: str
    reason: str


class Numbering:
    """A launcher that numbers its processes, but does not say where they meet."""

    name: str
    rank: str
    """The variable that holds it, as with those that follow."""
    world: str
    local_rank: str
    local_world: str
    advice = "export MASTER_ADDR in the job script: the name of the host of rank 0"

    def is_here(self, variables: Variables) -> bool:
        """Whether processes are numbered."""
        return self.rank in variables

    def read(self, variables: Variables) -> Environment:
        """The numbers, and the place to meet that follows from them."""
        rank, world = pair(variables, self.rank, self.world)
        for ours, plain in ((self.rank, "RANK"), (self.world, "WORLD_SIZE")):
            agree(variables, plain, ours)
        local_rank, local_world = self.on_host(variables)
        on_one_host = local_world == world
        job = self.job(variables, on_one_host)
        found = Environment(self.name, rank, world, local_rank, local_world, job=job, attempt=self.attempt(variables))
        if world == 1:
            return found
        address, reason = self.meeting_place(variables, world, on_one_host)
        more = {"address": address, "inferred_from": reason, "hosts": self.hosts(variables, rank, world)}
        return Environment(**{**vars(found), **more, "port": port(variables, self.port(variables, job))})

    def on_host(self, variables: Variables) -> tuple[int | None, int | None]:
        """Number of this process on its host, and how many there are."""
        if self.local_rank in variables and self.local_world in variables:
            return pair(variables, self.local_rank, self.local_world)
        return number(variables, self.local_rank, 0) if self.local_rank in variables else None, None

    def meeting_place(self, variables: Variables, world: int, on_one_host: bool) -> tuple[str, str]:
        """The address of rank 0, and from what it follows unless somebody gave it."""
        if variables.get("MASTER_ADDR"):
            return variables["MASTER_ADDR"], ""
        if on_one_host:
            return LOOPBACK, ""
        place = self.first_host(variables)
        if place is None:
            raise UserError(
                f"{self.name} started {world} ranks on several hosts, but says nothing about where rank 0 is: "
                f"{self.advice}"
            )
        return place

    def port(self, variables: Variables, job: str) -> int:
        """A port that other jobs on the host of rank 0 do not take; without a number, at least other users do not."""
        return FIRST_PORT + zlib.crc32((job or f"user {os.getuid()}").encode()) % NUM_PORTS

    def job(self, variables: Variables, on_one_host: bool) -> str:
        """What the launcher calls this start, the same on every rank."""
        return ""

    def attempt(self, variables: Variables) -> str:
        """How often the same job was started before."""
        return "0"

    def first_host(self, variables: Variables) -> Place | None:
        """The host of rank 0, as far as the variables tell."""
        return None

    def hosts(self, variables: Variables, rank: int, world: int) -> tuple[str, ...]:
        """The host of every rank, where that is known."""
        return ()


def pair(variables: Variables, rank_name: str, world_name: str) -> tuple[int, int]:
    """A number and the count that it is below."""
    for name, other in ((rank_name, world_name), (world_name, rank_name)):
        if name not in variables:
            raise UserError(f"{other} is set, but {name} is not; set both, or run: unset {other}")
    rank, world = number(variables, rank_name, 0), number(variables, world_name, 1)
    if rank >= world:
        raise UserError(f"{rank_name} is {rank}, but {world_name} is {world}: ranks are counted from 0 to {world - 1}")
    return rank, world


def agree(variables: Variables, plain: str, launchers: str) -> None:
    """Refuse a plain variable that says something else than that of the launcher."""
    if plain in variables and number(variables, plain, 0) != number(variables, launchers, 0):
        raise UserError(
            f"{plain} is {variables[plain]}, but {launchers} is {variables[launchers]}: run: unset {plain}, "
            "or set both RANK and WORLD_SIZE in each process, and they are taken"
        )


def port(variables: Variables, default: int) -> int:
    """MASTER_PORT, or the one that is taken without it."""
    if not variables.get("MASTER_PORT"):
        return default
    found = number(variables, "MASTER_PORT", 1)
    if found > LAST_PORT:
        raise UserError(f"MASTER_PORT is {found}, but ports end at {LAST_PORT}")
    return found


def number(variables: Variables, name: str, least: int) -> int:
    """A whole number in a variable."""
    text = variables[name].strip()
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise UserError(f"{name} is {variables[name]!r}, but must be a whole number of at least {least}")
    return int(text)
