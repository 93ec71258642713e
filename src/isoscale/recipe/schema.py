"""The recipe: everything there is to say about a run, composed of the sections that the rooms own."""

from typing import Annotated, Any

from pydantic import Field

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
