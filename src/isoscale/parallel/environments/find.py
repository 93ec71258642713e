"""Which of several processes this one is, as whoever started it says in variables of the environment."""

import os

from isoscale.parallel.environments.base import Environment, Launcher, Variables
from isoscale.parallel.environments.mpi import Horovod, Hydra, OpenMpi
from isoscale.parallel.environments.plain import PARENT, HalfPlain, Local, Plain, Torchrun
from isoscale.parallel.environments.schedulers import Lsf, Pals, Slurm, started_without

__all__ = ["PARENT", "Environment", "Local", "find"]


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
