"""Which scheduler is meant: every module of this folder has one."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from isoscale.errors import UserError, nearest
from isoscale.launch import schedulers as folder
from isoscale.launch.schedulers.base import Scheduler
from isoscale.parallel.environments.batch import batch_job

AUTO = "auto"
DEFAULT = "slurm"
"""Whose script is shown where no scheduler is there."""


@cache
def schedulers() -> dict[str, Scheduler]:
    """All schedulers, by name."""
    modules = [import_module(f"{folder.__name__}.{found.name}") for found in iter_modules(folder.__path__)]
    classes = [
        kind for module in modules for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Scheduler) and kind.__module__ == module.__name__
    ]  # fmt: skip
    return {kind.name: kind() for kind in classes if kind is not Scheduler}


def find(name: str = AUTO) -> Scheduler:
    """The scheduler of that name; `auto` is that of the job of this process, or the first that is on this machine."""
    known = schedulers()
    if name in known:
        return known[name]
    if name != AUTO:
        guess = nearest(name, [AUTO, *known])
        raise UserError(
            f'launch.scheduler: there is no scheduler "{name}"' + (f'; did you mean "{guess}"?' if guess else "")
            + f"\nthose that are known: {', '.join([AUTO, *sorted(known)])}"
        )  # fmt: skip
    job = batch_job()
    mine = [each for each in known.values() if job is not None and each.batch is job.system]
    here = [each for each in known.values() if each.is_here()]
    return [*mine, *here, known[DEFAULT]][0]
