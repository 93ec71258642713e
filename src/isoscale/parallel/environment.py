"""Which of several processes this one is, as whoever started it says in variables of the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from isoscale.errors import UserError

PARENT = "ISOSCALE_LAUNCHER"
"""Set by `isoscale train --devices`: the process that started the ranks, without which they end."""


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

    def node_of(self, rank: int) -> int | None:
        """Number of the machine of a rank, where all have the same number of ranks and these are counted through."""
        if self.local_world is None or self.local_rank != self.rank % self.local_world:
            return None
        return rank // self.local_world


class Launcher(Protocol):
    """Knows the variables that one way of starting processes sets."""

    def is_here(self, variables: Mapping[str, str]) -> bool:
        """Whether this process was started that way."""

    def read(self, variables: Mapping[str, str]) -> Environment:
        """What the variables say; a UserError where they make no sense."""


class Plain:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by hand or by a script."""

    name = "the variables RANK and WORLD_SIZE"

    def is_here(self, variables: Mapping[str, str]) -> bool:
        """Whether one of the two variables without which there are no ranks is set."""
        return "RANK" in variables or "WORLD_SIZE" in variables

    def read(self, variables: Mapping[str, str]) -> Environment:
        """The variables, checked."""
        rank, world = _pair(variables, "RANK", "WORLD_SIZE")
        local = "LOCAL_RANK" in variables and "LOCAL_WORLD_SIZE" in variables
        local_rank, local_world = _pair(variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE") if local else (None, None)
        if local_rank is None and "LOCAL_RANK" in variables:
            local_rank = _number(variables, "LOCAL_RANK", 0)
        address, port = _meeting_place(variables) if world > 1 else ("", 0)
        return Environment(self.name, rank, world, local_rank, local_world, address, port)


class Local(Plain):
    """The processes that `isoscale train --devices` starts on this machine."""

    name = "isoscale train --devices"

    def is_here(self, variables: Mapping[str, str]) -> bool:
        """Whether the launcher left its process number."""
        return PARENT in variables and super().is_here(variables)

    def read(self, variables: Mapping[str, str]) -> Environment:
        """The plain variables, and whose end is also theirs."""
        return Environment(**{**vars(super().read(variables)), "parent": _number(variables, PARENT, 1)})


class Torchrun(Plain):
    """torchrun, which sets the plain variables and often hosts the store itself."""

    name = "torchrun"

    def is_here(self, variables: Mapping[str, str]) -> bool:
        """Whether torchrun left the name of its run."""
        return "TORCHELASTIC_RUN_ID" in variables

    def read(self, variables: Mapping[str, str]) -> Environment:
        """The plain variables, and those about the store."""
        store_runs = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
        plain = vars(super().read(variables))
        return Environment(**{**plain, "store_runs": store_runs, "attempt": attempt})


class Single:
    """One process that nobody numbered."""

    def is_here(self, variables: Mapping[str, str]) -> bool:
        """Always: this is what remains."""
        return True

    def read(self, variables: Mapping[str, str]) -> Environment:
        """A world of one."""
        return Environment()


LAUNCHERS: tuple[Launcher, ...] = (Torchrun(), Local(), Plain(), Single())
"""In the order in which they are asked: the first that is here is believed."""


def find(variables: Mapping[str, str] = os.environ) -> Environment:
    """Who this process is."""
    return next(launcher for launcher in LAUNCHERS if launcher.is_here(variables)).read(variables)


def _pair(variables: Mapping[str, str], rank_name: str, world_name: str) -> tuple[int, int]:
    """A number and the count that it is below."""
    for name, other in ((rank_name, world_name), (world_name, rank_name)):
        if name not in variables:
            raise UserError(f"{other} is set, but {name} is not; set both, or run: unset {other}")
    rank, world = _number(variables, rank_name, 0), _number(variables, world_name, 1)
    if rank >= world:
        raise UserError(f"{rank_name} is {rank}, but {world_name} is {world}: ranks are counted from 0 to {world - 1}")
    return rank, world


def _meeting_place(variables: Mapping[str, str]) -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {variables['WORLD_SIZE']}, but {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not set: set them to the host of rank 0 and a free port on it"
        )
    port = _number(variables, "MASTER_PORT", 1)
    if port > 65535:
        raise UserError(f"MASTER_PORT is {port}, but ports end at 65535")
    return variables["MASTER_ADDR"], port


def _number(variables: Mapping[str, str], name: str, least: int) -> int:
    text = variables[name].strip()
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise UserError(f"{name} is {variables[name]!r}, but must be a whole number of at least {least}")
    return int(text)
