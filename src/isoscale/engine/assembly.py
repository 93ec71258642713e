"""The parts of a training, as `build` puts them together and the loop drives them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from isoscale.data.batches import Batch
from isoscale.data.rng import StepRandom
from isoscale.engine.boundaries import Planner
from isoscale.engine.lightning.configured import Configured
from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.engine.metrics.accumulators import Recorder
from isoscale.engine.optim.ema import EMA
from isoscale.engine.optim.loss_weights import WeightCurve
from isoscale.engine.optim.schedules import LearningRate
from isoscale.engine.precision import Precision
from isoscale.engine.splits import Split
from isoscale.engine.state.module_state import ExtraState
from isoscale.engine.state.progress import Progress
from isoscale.engine.state.registry import Registry
from isoscale.engine.step.context import StepContext
from isoscale.engine.step.kernels import KernelChoice
from isoscale.engine.step.programs import Program
from isoscale.engine.step.step import Forward, Step
from isoscale.parallel.reduction import Reducer
from isoscale.system.devices import Accelerator


@dataclass
class Assembly:
    """The parts of a training that the loop drives."""

    task: Any
    accelerator: Accelerator
    precision: Precision
    random: StepRandom
    registry: Registry
    rate: LearningRate
    weights: Mapping[str, WeightCurve]
    """Of named loss terms."""
    train: Split
    train_context: StepContext
    ema: EMA | None
    optimizers: list[Any]
    configured: Configured | None
    transforms: Sequence[Callable[[Batch], Batch]]
    extra: ExtraState
    reseed: Callable[[int, int], None]
    """Seeds torch's generators for (step, part)."""
    undo: ExitStack
    """What is to be undone when training is over."""
    kernels: KernelChoice
    view: TrainerView
    """The trainer that the task and callbacks see."""
    program: Program = field(init=False)
    step: Step | None = None
    """None where the task updates its weights itself."""

    def forward(self, stage: str, loss_weights: Mapping[str, float]) -> Forward:
        """The forward pass of an evaluation stage, with accumulators of its own."""
        recorder = Recorder(self.accelerator.device)
        context = StepContext(stage, self.task, recorder, self.train.loaded)
        return Forward(self.task, context, self.transforms, self.precision, loss_weights)


@dataclass
class Built:
    """A training that is ready to begin."""

    parts: Assembly
    train: Split
    val: Split | None
    has_test: bool
    plan: Planner
    progress: Progress
    num_shards: int
    new_reducer: Callable[..., Reducer]
    """A reducer for values of another dtype."""
    undo: ExitStack
    """Stops reading ahead, and leaves the task as it was."""
    preparing: Sequence[Any] = ()
    """Transforms that are done once, to all data."""
