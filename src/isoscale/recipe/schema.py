"""The recipe: everything there is to say about a run, composed of the sections that the rooms own."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from isoscale.config import Config, OpenConfig
from isoscale.data.config import Data
from isoscale.engine.config import Checkpoint, Optimizer, Schedule, Train
from isoscale.observe.config import Observe
from isoscale.parallel.config import Parallel


class InitFrom(Config):
    """Weights to start from."""

    run: str
    """A run directory, a checkpoint directory, or a `.safetensors` or `.pt` file of weights."""
    exclude: list[str] = []
    """Patterns of weight names to leave as initialised, such as `model.head.*`."""


class Task(OpenConfig):
    """The science of one batch: model, loss and metrics."""

    class_: Annotated[str, Field(alias="class")] = "supervised"
    """Class path or short name of the task; its arguments stand beside it."""
    model: Any = None
    """The network: class path or short name, with its arguments."""
    init_from: str | InitFrom | None = None
    """Start from the weights of another run: its directory, or {run, exclude}."""


SLURM_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<a>\d+)(?::(?P<b>\d+)(?::(?P<c>\d+))?)?|(?P<clock>\d+(?::\d+){0,2}))")


def slurm_seconds(time: int | str) -> int:
    """The seconds of a time as Slurm reads it: minutes, mm:ss, hh:mm:ss, d-hh, d-hh:mm or d-hh:mm:ss."""
    found = SLURM_TIME.fullmatch(str(time).strip())
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


def _slurm_time(time: int | str) -> int | str:
    if slurm_seconds(time) == 0:
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
        raise ValueError(f'"{text}" is not an option of sbatch; write it as after #SBATCH, such as --exclusive')
    return text


Count = Annotated[int, Field(ge=1)]
Line = Annotated[str, AfterValidator(_one_line)]


class Launch(Config):
    """What a job asks Slurm for with `isoscale submit`; a cluster profile and options of the command come on top."""

    nodes: Count | None = None
    """Number of nodes; by default 1."""
    gpus_per_node: Annotated[int, Field(ge=0)] | None = None
    """GPUs on each node, with one process each; by default 0."""
    tasks_per_node: Count | None = None
    """Processes on each node; by default one per GPU, or 1."""
    cpus_per_task: Count | None = None
    """Cores of each process."""
    time: Annotated[int | Line, AfterValidator(_slurm_time)] | None = None
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
    """GPUs in the words of a cluster that wants them so, such as `gpu:a100:4`; Slurm is told this instead of
    gpus_per_node."""
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
    """Further options of sbatch, such as `--exclusive`."""
    env: dict[Annotated[str, AfterValidator(_variable)], Line | int | float] = {}
    """Environment variables of the training."""


class Range(Config):
    """Numbers between two ends, for a random sweep; whole ones where both ends are whole."""

    min: int | float
    max: int | float
    log: bool = False
    """Draw evenly on a logarithmic scale."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min >= self.max:
            raise ValueError(f"min must be below max, found {self.min:g} and {self.max:g}")
        if self.log and self.min <= 0:
            raise ValueError(f"log: true needs a min above 0, found {self.min:g}")
        return self


class Sweep(OpenConfig):
    """What `isoscale sweep` tries; a single training takes the recipe's own values.

    All other keys here are keys of the recipe with the values to try, such as `optimizer.lr: [1e-3, 3e-4]`; in a random
    sweep also ranges, such as `{min: 1e-4, max: 1e-2, log: true}`.
    """

    how: Literal["product", "zip", "random"] = "product"
    """Every combination; the first values together, then the second ones …; or random draws that depend on the seed."""
    budget: Count | None = None
    """Number of points of a random sweep."""


class Recipe(Config):
    """Everything there is to say about a run."""

    extends: str | list[str] | None = None
    """A preset or a file to start from, or a list of them, later ones winning."""
    name: str | None = None
    """Name of the run directory; by default the recipe's own name."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The seed of everything random: initial weights, order of samples, augmentation, dropout."""
    task: Task = Task()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    train: Train = Train()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    launch: Launch = Launch()
    sweep: Sweep = Sweep()
