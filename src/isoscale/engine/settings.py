"""What a trainer is told: the recipe's sections, and what was decided once at the first start."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from isoscale.data.config import Data
from isoscale.data.feeds.residency import Residency
from isoscale.engine import precision
from isoscale.engine.config import MOST_THREADS, AnyOptimizer, AnySchedule, Checkpoint, Optimizer, Schedule, Train
from isoscale.engine.optim.optimizers import OptimizerPath, choose_path, optimizer_class
from isoscale.errors import UserError
from isoscale.observe.config import Observe
from isoscale.parallel.config import Parallel
from isoscale.system import devices as accelerator
from isoscale.system.devices import Kernels


@dataclass
class Settings:
    """The sections that the engine reads."""

    seed: int = 0
    optimizer: AnyOptimizer = field(default_factory=Optimizer)
    schedule: AnySchedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    data: Data = field(default_factory=Data)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    observe: Observe = field(default_factory=Observe)
    own_optimizer: partial[torch.optim.Optimizer] | None = None
    """The class that `optimizer` names by its path, with its arguments."""
    own_schedule: partial[Any] | None = None
    """What `schedule` names by its path, with its arguments."""
    own_weights: Mapping[str, partial[Any]] = field(default_factory=dict)
    """What `train.loss_weights` names by paths, with arguments, by term."""
    callbacks: tuple[Any, ...] = ()
    """Objects with Lightning's hook names, already built; those of `configure_callbacks` are added to them."""
    folder: Path | None = None
    """The directory of the run, on all ranks, for files that callbacks write."""

    @property
    def optimizer_class(self) -> Callable[..., torch.optim.Optimizer]:
        """The class of the optimizer, however it is named."""
        if self.own_optimizer is not None:
            return self.own_optimizer.func
        assert isinstance(self.optimizer, Optimizer)
        return optimizer_class(self.optimizer.name)


@dataclass
class Decisions:
    """Everything that affects bits and may be `auto`: resolved at the first start, reused at every restart."""

    device: str
    threads: int
    """Of a step; 0 until the size of its operations is known."""
    precision: str
    optimizer: OptimizerPath
    program: str
    """`auto` until the first launch has shown whether the step can be captured."""
    why: str = ""
    """Why this program, where it was not asked for."""
    residency: Residency = "auto"
    """Where the training data lives; `auto` until its size is known."""
    reduce: str = "auto"
    """How gradients are added; `auto` until the size of the model is known."""
    first_world: int = 1
    """Ranks of the first start: a loader's batch is that of one of them."""
    captures_own: bool = False
    """Whether optimizers that the task configures run in the form that can be captured; in earlier versions not."""
    kernels: Kernels = "by cuDNN"
    """Which kernels a CUDA device takes, `auto` until the first step has shown what is possible; in earlier versions
    those of cuDNN were deterministic, and others not."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "contiguous"
    """How the weights of convolutions are stored, `auto` until the first step; in earlier versions as the task does."""
    products: list[str] | None = field(default_factory=list)
    """The names of convolutions that are computed as matrix products; None until the first step."""
    cores: int = 0
    """Threads of all that comes before the first step, where those of a step follow from its size."""
    threads_why: str = ""
    """Why so many threads, where that was not asked for."""

    @classmethod
    def make(cls, settings: Settings, world: int = 1, cores: int | None = None) -> "Decisions":
        """Resolve what is `auto`; never by rank count, free memory or timing.

        `cores` are those of the rank with the fewest, which must be able to do what is decided for all.
        """
        found = accelerator.find(settings.train.device)
        asked, cores = threads_asked(settings), cores or _own_cores()
        by_size = asked is None and found.kind == "cpu" and cores > 1
        return cls(
            device=found.kind,
            threads=0 if by_size else asked or cores,
            cores=cores if by_size else 0,
            precision=precision.resolve(settings.train.precision, found).name,
            optimizer=choose_path(settings.optimizer_class, found),
            program=settings.train.program,
            residency=settings.data.residency,
            reduce=settings.parallel.reduce,
            first_world=world,
            captures_own=True,
            kernels=_KERNELS[settings.train.deterministic],
            memory_format="auto",
            products=None,
        )

    def as_dict(self) -> dict[str, Any]:
        """For run.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Decisions":
        """From run.json."""
        return cls(**{**values, "optimizer": OptimizerPath(**values["optimizer"])})


_KERNELS: dict[str, Kernels] = {"auto": "auto", "true": "strict", "false": "fastest"}
"""By what `train.deterministic` says."""


def threads_asked(settings: Settings) -> int | None:
    """What the recipe says, or OMP_NUM_THREADS; None where the number follows from the cores and the size of a step.

    Sums depend on the number of threads, and cores on how many ranks share them: where every bit has to be the same on
    any number of ranks, only the recipe can ask for more than one.
    """
    if settings.train.threads != "auto":
        return settings.train.threads
    if settings.parallel.reduce == "tree":
        return 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if not asked.isdecimal() or int(asked) == 0:
        return None
    if int(asked) > MOST_THREADS:
        raise UserError(f"OMP_NUM_THREADS is {asked}, expected at most {MOST_THREADS}; unset it to take all cores")
    return int(asked)


def _own_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else torch.get_num_threads()
