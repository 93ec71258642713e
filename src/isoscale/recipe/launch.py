"""The `launch` section of a recipe: what a job asks for. Each field is an option of the commands that submit jobs."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from isoscale.config import Config

TIME = re.compile(r"(?:(?P<days>\d+)-(?P<a>\d+)(?::(?P<b>\d+)(?::(?P<c>\d+))?)?|(?P<clock>\d+(?::\d+){0,2}))")


def time_seconds(time: int | str) -> int:
    """The seconds of a time limit as Slurm reads it: minutes, mm:ss, hh:mm:ss, d-hh, d-hh:mm or d-hh:mm:ss."""
    found = TIME.fullmatch(str(time).strip())
    if found is None:
        raise ValueError(
            f'"{time}" is not a time; write minutes ("90"), hours:minutes:seconds ("01:30:00") or days-hours ("1-12")'
        )
    if found["days"] is not None:
        hours, minutes, seconds = (int(found[name] or 0) for name in "abc")
        return int(found["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds
    parts = [int(part) for part in found["clock"].split(":")]
    hours, minutes, seconds = [[0, *parts, 0], [0, *parts], parts][len(parts) - 1]
    return hours * 3600 + minutes * 60 + seconds


def _time(time: int | str) -> int | str:
    if time_seconds(time) == 0:
        raise ValueError(f'"{time}" leaves no time at all')
    return time


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} must be one line of text")
    return text


def _container(text: str) -> str:
    if not re.fullmatch(r"(apptainer|shifter|podman):[^\s-]\S*", text):
        raise ValueError(f'"{text}" is not a container; write apptainer:IMAGE, shifter:IMAGE or podman:IMAGE')
    return text


def _module(text: str) -> str:
    if text.startswith("-"):
        raise ValueError(f'"{text}" is not the name of a module')
    return text


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f'"{name}" is not the name of an environment variable')
    return name


def _directive(text: str) -> str:
    if not text.startswith("-"):
        raise ValueError(f'"{text}" is not an option of a job; write it as in a job script, such as --exclusive')
    return text


Count = Annotated[int, Field(ge=1)]
Line = Annotated[str, AfterValidator(_one_line)]


class Launch(Config):
    """What a job asks for with `isoscale submit`; a cluster profile and options of the command come on top."""

    scheduler: Line = "auto"
    """The scheduler of the cluster, such as `slurm`; `auto` is the one whose commands are found."""
    nodes: Count | None = None
    """Number of nodes; by default 1."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """GPUs on each node, with one process each; by default 0."""
    tasks_per_node: Count | None = None
    """Processes on each node; by default one per GPU, or 1."""
    cpus_per_task: Count | None = None
    """Cores of each process."""
    time: Annotated[int | Line, AfterValidator(_time)] | None = None
    """Time limit of one start, as Slurm reads it: minutes, `01:30:00` or `1-12`. A longer training goes on by
    itself."""
    notice: Count | None = None
    """Seconds before the time limit at which training is told to save and to end; by default 120, or a quarter of a
    short time limit."""
    max_requeues: Annotated[int, Field(ge=0)] | None = None
    """How often a job that has not finished may start again; by default 100."""
    partition: Line | None = None
    """The partition, or several with commas."""
    account: Line | None = None
    """The project that pays."""
    qos: Line | None = None
    """Quality of service."""
    constraint: Line | None = None
    """Features that nodes must have."""
    reservation: Line | None = None
    """Name of a reservation."""
    mem: Annotated[int, Field(ge=0)] | Line | None = None
    """Memory of a node: megabytes, or such as `64G`; 0 is all of it."""
    gres: Line | None = None
    """GPUs in the words of a cluster that wants them so, such as `gpu:a100:4`; the scheduler is told this
    instead of gpus_per_node."""
    mail_user: Line | None = None
    """Who gets mail about the job."""
    mail_type: Line | None = None
    """About what: BEGIN, END, FAIL, REQUEUE, ALL."""
    modules: list[Annotated[Line, AfterValidator(_module)]] = []
    """Environment modules to load."""
    activate: Line | None = None
    """The line that activates the environment of isoscale, such as `conda activate science`."""
    container: Annotated[Line, AfterValidator(_container)] | None = None
    """The image that isoscale runs in: `apptainer:IMAGE`, `shifter:IMAGE` or `podman:IMAGE`."""
    directives: list[Annotated[Line, AfterValidator(_directive)]] = []
    """Further options of the scheduler, such as `--exclusive` of sbatch."""
    env: dict[Annotated[str, AfterValidator(_variable)], Line | int | float] = {}
    """Environment variables of the training."""
