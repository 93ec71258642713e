"""The recipe: everything there is to say about a run, composed of the sections that the rooms own."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from isoscale.config import Config, OpenConfig
from isoscale.data.config import Data
from isoscale.engine.config import AnyOptimizer, AnySchedule, Checkpoint, Optimizer, Schedule, Train
from isoscale.observe.config import Observe
from isoscale.parallel.config import Parallel
from isoscale.recipe.launch import Count, Launch


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
    optimizer: AnyOptimizer = Optimizer()
    schedule: AnySchedule = Schedule()
    train: Train = Train()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    launch: Launch = Launch()
    sweep: Sweep = Sweep()
