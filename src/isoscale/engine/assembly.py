"""Puts together what a training needs: task, data, optimizer, step and program, from settings and decisions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from isoscale.data import keyed
from isoscale.data.batches import Batch
from isoscale.data.keyed import StepRandom
from isoscale.data.mixture import MixturePlan
from isoscale.engine import accelerator as accelerators
from isoscale.engine import lightning
from isoscale.engine.accelerator import Accelerator
from isoscale.engine.config import LossWeight, Optimizer, Schedule
from isoscale.engine.ema import Average
from isoscale.engine.extra_state import ExtraState
from isoscale.engine.late_compiler import put_off_compiler
from isoscale.engine.metrics import MetricStates
from isoscale.engine.optimizers import OptimizerState, make_optimizers, path_for
from isoscale.engine.overrides import overrides
from isoscale.engine.precision import Precision
from isoscale.engine.program_choice import ProgramMaker, reseeder
from isoscale.engine.programs import Program
from isoscale.engine.recorder import Recorder
from isoscale.engine.roles import Role
from isoscale.engine.schedules import LearningRate
from isoscale.engine.settings import Decisions, Settings
from isoscale.engine.stage import Stage
from isoscale.engine.state import ModuleState, Registry
from isoscale.engine.step import Forward, Step
from isoscale.errors import UserError
from isoscale.parallel.reduction import Reducer

Say = Callable[[str], None]


@dataclass
class Assembly:
    """The parts of a training that the loop drives."""

    task: Any
    accelerator: Accelerator
    precision: Precision
    random: StepRandom
    registry: Registry
    rate: LearningRate
    train: Role
    train_stage: Stage
    average: Average | None
    optimizers: list[Any]
    configured: lightning.Configured | None
    transforms: Sequence[Callable[[Batch], Batch]]
    extra: ExtraState
    reseed: Callable[[int, int], None]
    """Seeds torch's generators for (step, part)."""
    closing: list[Callable[[], None]] = field(default_factory=list)
    """What is to be undone when training is over."""
    program: Program = field(init=False)
    step: Step | None = None
    """None where the task updates its weights itself."""

    def forward(self, stage: str, loss_weights: Mapping[str, float]) -> Forward:
        """The forward pass of an evaluation stage, with accumulators of its own."""
        recorder = Recorder(self.accelerator.device)
        return Forward(self.task, Stage(stage, self.task, recorder), self.transforms, self.precision, loss_weights)


def check_task(task: Any) -> None:
    """Refuse what is not a task, saying how to make one of it."""
    if not isinstance(task, nn.Module):
        raise UserError(f"a task must be an nn.Module, not {type(task).__name__}")
    if not callable(getattr(task, "training_step", None)):
        raise UserError(
            f"{type(task).__name__} has no training_step; wrap a plain network: isoscale.Supervised(model, loss='mse')"
        )


def buffer_names(task: nn.Module) -> set[str]:
    """The names of buffers, also of those that are None so far."""
    return {f"{path}.{key}".lstrip(".") for path, module in task.named_modules() for key in module._buffers}


def check_buffers(before: set[str], now: set[str]) -> None:
    """Refuse buffers that are registered in training: the constructor of a restart would not know them."""
    if now - before:
        raise UserError(
            f"the buffer {sorted(now - before)[0]} was registered in training, so that checkpoints would not fit the "
            "task any more; register it before training begins, as None if it has no value yet"
        )


def check_parameters(before: dict[str, nn.Parameter], now: dict[str, nn.Parameter]) -> None:
    """Refuse other parameters than those that training began with, of which optimizer and checkpoints know nothing."""
    added, removed = sorted(set(now) - set(before)), sorted(set(before) - set(now))
    if added or removed:
        what = "; ".join(
            f"{word} {', '.join(names[:4])}" for word, names in (("new:", added), ("gone:", removed)) if names
        )
        raise UserError(
            f"the parameters of the task changed in training ({what}), so that its checkpoints would not fit it any "
            "more; make all parameters (layers, masks of pruning, parametrisations) before training begins, in "
            "__init__, setup or configure_model. They may be frozen and unfrozen at any time (requires_grad_)"
        )
    for name in (name for name, parameter in now.items() if parameter is not before[name]):
        raise UserError(
            f"{name} was replaced by another parameter in training, and the optimizer would train the old one; change "
            "its values in place: with torch.no_grad(): parameter.copy_(…)"
        )


_DOUBLE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    torch.complex64: torch.complex128,
}


def place(task: nn.Module, accelerator: Accelerator, precision: Precision, tree: bool, say: Say) -> None:
    """Move a task to the device, in its precision, with dropout that is keyed by sample."""
    unkeyed = keyed.key_dropout(task)
    if unkeyed and tree:
        raise UserError(f"parallel.reduce: tree needs keyed randomness, which these do not have: {', '.join(unkeyed)}")
    if unkeyed:
        say(f"randomness of {', '.join(unkeyed)} comes from torch's generator, reseeded every step")
    task.to(accelerator.device)
    if precision.dtype == torch.float64:
        task._apply(lambda tensor: tensor.to(_DOUBLE.get(tensor.dtype, tensor.dtype)))


def assemble(
    task: Any, train: Role, settings: Settings, decided: Decisions, num_steps: int, transforms: Sequence[Any],
    view: lightning.TrainerView, say: Say, reducer: Reducer,
) -> Assembly:  # fmt: skip
    """Build everything; `say` takes lines that the user should know."""
    try:
        return _assemble(task, train, settings, decided, num_steps, transforms, view, say, reducer)
    except BaseException:
        lightning.detach(task)
        raise


def _assemble(
    task: Any, train: Role, settings: Settings, decided: Decisions, num_steps: int, transforms: Sequence[Any],
    view: lightning.TrainerView, say: Say, reducer: Reducer,
) -> Assembly:  # fmt: skip
    found = accelerators.find(decided.device)
    precision = Precision(decided.precision, found.kind)
    random = StepRandom(settings.seed)
    random.steps_per_epoch = train.plan.steps_per_epoch
    registry = Registry()
    rate = LearningRate.make(settings.schedule, settings.optimizer.lr, _asked_batch(train, settings), num_steps)
    stage = Stage("train", task, Recorder(found.device))
    stage.enter()
    lightning.attach(task, view, train.loaded)
    if lightning.adds_modules(task):
        place(task, found, precision, settings.parallel.reduce == "tree", say)
    lazy = [name for name, parameter in task.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UserError(
            f"{lazy[0]} has no shape yet (a lazy module): call the network once on a batch, in __init__ or in setup"
        )
    configured = _configured(task, view)
    if configured and (settings.optimizer != Optimizer() or settings.schedule != Schedule()):
        say("the task configures its own optimizer: the recipe's optimizer and schedule are not used")
    if configured:
        _check_followed(settings)
    optimizers = configured.optimizers if configured else _optimizers(task, settings, decided)
    view.optimizers = optimizers
    average = Average(task, settings.train.ema) if settings.train.ema is not None else None
    metrics = MetricStates(task, stage.metrics, reducer.ranks)
    keeps_gradients = not getattr(task, "automatic_optimization", True) or overrides(task, "on_before_zero_grad")
    extra = ExtraState(task, [*optimizers, *view.schedulers], reducer.ranks, keeps_gradients, say)
    for name, part in (("model", ModuleState(task)), ("extra", extra), ("configured", configured),
                       ("optimizer", OptimizerState(optimizers, task)), ("recorder", stage.recorder),
                       ("metrics", metrics), ("schedule", rate), ("average", average)):  # fmt: skip
        if part is not None:
            registry.register(name, part)
    forward = Forward(task, stage, transforms, precision)
    assembly = Assembly(
        task, found, precision, random, registry, rate, train, stage, average, optimizers, configured, transforms,
        extra, reseeder(settings.seed, found),
    )  # fmt: skip
    assembly.program = ProgramMaker(
        assembly, forward, optimizers, settings, decided, num_steps, view, say, reducer
    ).make()
    return assembly


def _asked_batch(train: Role, settings: Settings) -> int:
    """The batch that a scaling rule compares: as asked for, also where systems have fewer samples than that."""
    asked = settings.data.batch_size
    if isinstance(asked, str) or not isinstance(train.plan, MixturePlan):
        return train.plan.batch_size
    return max(asked) if isinstance(asked, list) else asked


def _check_followed(settings: Settings) -> None:
    """Refuse weights that would follow a learning rate which nobody trains with."""
    for name, weight in settings.train.loss_weights.items():
        if isinstance(weight, LossWeight) and weight.follows == "rate":
            raise UserError(
                f"train.loss_weights.{name} follows the learning rate of the recipe, but the task configures its own "
                f"optimizer; use train.loss_weights.{name}.follows=steps"
            )


def _configured(task: Any, view: lightning.TrainerView) -> lightning.Configured | None:
    put_off_compiler()
    configure = getattr(task, "configure_optimizers", None)
    returned = configure() if configure is not None else None
    if returned is None:
        return None
    configured = lightning.Configured(returned, task, view.num_training_batches)
    view.schedulers = [entry["scheduler"] for entry in configured.schedulers]
    return configured


def _optimizers(task: nn.Module, settings: Settings, decided: Decisions) -> list[Any]:
    decided.optimizer = path_for(decided.optimizer, task.parameters())
    return make_optimizers(settings.optimizer, task.named_parameters(), decided.optimizer)
