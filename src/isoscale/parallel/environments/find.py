"""Which of several processes this one is, as whoever started it says in variables of the environment."""

import os

from isoscale.errors import UserError
from isoscale.parallel.environments.base import Environment, Launcher, Variables, number, pair, port
from isoscale.parallel.environments.mpi import Horovod, Hydra, OpenMpi
from isoscale.parallel.environments.schedulers import Lsf, Pals, Slurm, started_without

PARENT = "ISOSCALE_LAUNCHER"
"""Set by `isoscale train --devices`: the process that started the ranks, without which they end."""
__all__ = ["PARENT", "Environment", "Local", "find"]


class Plain:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by hand or by a script."""

    name = "the variables RANK and WORLD_SIZE"

    def is_here(self, variables: Variables) -> bool:
        """Whether both variables are set without which there are no ranks."""
        return "RANK" in variables and "WORLD_SIZE" in variables

    def read(self, variables: Variables) -> Environment:
        """The variables, checked."""
        rank, world = pair(variables, "RANK", "WORLD_SIZE")
        local = "LOCAL_RANK" in variables and "LOCAL_WORLD_SIZE" in variables
        local_rank, local_world = pair(variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE") if local else (None, None)
        if local_rank is None and "LOCAL_RANK" in variables:
            local_rank = number(variables, "LOCAL_RANK", 0)
        address, found_port = _meeting_place(variables) if world > 1 else ("", 0)
        return Environment(self.name, rank, world, local_rank, local_world, address, found_port)


class HalfPlain(Plain):
    """One of the two variables alone, where no launcher says the other: reading them refuses."""

    def is_here(self, variables: Variables) -> bool:
        """Whether one is set."""
        return "RANK" in variables or "WORLD_SIZE" in variables


class Local(Plain):
    """The processes that `isoscale train --devices` starts on this machine."""

    name = "isoscale --devices"

    def is_here(self, variables: Variables) -> bool:
        """Whether the launcher left its process number."""
        return PARENT in variables and super().is_here(variables)

    def read(self, variables: Variables) -> Environment:
        """The plain variables, and whose end is also theirs."""
        return Environment(**{**vars(super().read(variables)), "parent": number(variables, PARENT, 1)})


class Torchrun(Plain):
    """torchrun, which sets the plain variables and often hosts the store itself."""

    name = "torchrun"

    def is_here(self, variables: Variables) -> bool:
        """Whether torchrun left the name of its run."""
        return "TORCHELASTIC_RUN_ID" in variables

    def read(self, variables: Variables) -> Environment:
        """The plain variables, and those about the store."""
        store_runs = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
        plain = vars(super().read(variables))
        return Environment(**{**plain, "store_runs": store_runs, "attempt": attempt})


def _meeting_place(variables: Variables) -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {variables['WORLD_SIZE']}, but {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not set: set them to the host of rank 0 and a free port on it"
        )
    return variables["MASTER_ADDR"], port(variables, 0)


class Single:
    """One process that nobody numbered."""

    def is_here(self, variables: Variables) -> bool:
        """Always: this is what remains."""
        return True

    def read(self, variables: Variables) -> Environment:
        """A world of one."""
        return Environment(note=started_without(variables))


LAUNCHERS: tuple[Launcher, ...] = (
    Torchrun(), Local(), Plain(), OpenMpi(), Hydra(), Horovod(), Slurm(), Pals(), Lsf(), HalfPlain(), Single(),
)  # fmt: skip
"""In the order in which they are asked: the first that is here is believed.

What a person sets wins; then comes what was started innermost: everything inside a step of Slurm sees the step's
variables, those that mpirun or horovodrun starts there as well.
"""


def find(variables: Variables = os.environ) -> Environment:
    """Who this process is."""
    return next(launcher for launcher in LAUNCHERS if launcher.is_here(variables)).read(variables)
