"""Puts together what a training needs: task, data, optimizer, step and program, from settings and decisions."""

import random as python_random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from isoscale.data import keyed
from isoscale.data.batches import Batch
from isoscale.data.hashing import derive_key
from isoscale.data.keyed import StepRandom
from isoscale.data.sources import is_vectorised
from isoscale.engine import accelerator as accelerators
from isoscale.engine import hooks, lightning, manual
from isoscale.engine.accelerator import Accelerator
from isoscale.engine.batch_hooks import AroundBatch, compiled
from isoscale.engine.ema import Average
from isoscale.engine.graph import GraphedProgram
from isoscale.engine.metrics import MetricStates
from isoscale.engine.optimizers import OptimizerState, make_optimizers
from isoscale.engine.precision import Precision
from isoscale.engine.programs import EagerProgram, Inputs, ManualProgram
from isoscale.engine.recorder import Recorder
from isoscale.engine.roles import Role
from isoscale.engine.schedules import LearningRate
from isoscale.engine.settings import Decisions, Settings
from isoscale.engine.stage import Stage
from isoscale.engine.state import ModuleState, Registry
from isoscale.engine.step import Forward, Step
from isoscale.errors import UserError
from isoscale.parallel.reduction import make_reducer

Say = Callable[[str], None]
AUTO_STEPS_PER_LAUNCH = 50


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
    program: Any
    average: Average | None
    step: Step | None
    configured: lightning.Configured | None
    transforms: Sequence[Callable[[Batch], Batch]]

    def forward(self, stage: str) -> Forward:
        """The forward pass of an evaluation stage, with accumulators of its own."""
        recorder = Recorder(self.accelerator.device)
        return Forward(self.task, Stage(stage, self.task, recorder), self.transforms, self.precision)


def check_task(task: Any) -> None:
    """Refuse what is not a task, saying how to make one of it."""
    if not isinstance(task, nn.Module):
        raise UserError(f"a task must be an nn.Module, not {type(task).__name__}")
    if not callable(getattr(task, "training_step", None)):
        raise UserError(
            f"{type(task).__name__} has no training_step; wrap a plain network: isoscale.Supervised(model, loss='mse')"
        )


def place(task: nn.Module, accelerator: Accelerator, precision: Precision, tree: bool, say: Say) -> None:
    """Move a task to the device, in its precision, with dropout that is keyed by sample."""
    unkeyed = keyed.key_dropout(task)
    if unkeyed and tree:
        raise UserError(f"parallel.reduce: tree needs keyed randomness, which these do not have: {', '.join(unkeyed)}")
    if unkeyed:
        say(f"randomness of {', '.join(unkeyed)} comes from torch's generator, reseeded every step")
    task.to(accelerator.device)
    if precision.dtype == torch.float64:
        task.double()


def assemble(
    task: Any, train: Role, settings: Settings, decided: Decisions, num_steps: int, transforms: Sequence[Any],
    view: lightning.TrainerView, say: Say,
) -> Assembly:  # fmt: skip
    """Build everything; `say` takes lines that the user should know."""
    try:
        return _assemble(task, train, settings, decided, num_steps, transforms, view, say)
    except BaseException:
        lightning.detach(task)
        raise


def _assemble(
    task: Any, train: Role, settings: Settings, decided: Decisions, num_steps: int, transforms: Sequence[Any],
    view: lightning.TrainerView, say: Say,
) -> Assembly:  # fmt: skip
    found = accelerators.find(decided.device)
    precision = Precision(decided.precision, found.kind)
    random = StepRandom(settings.seed)
    registry = Registry()
    rate = LearningRate.make(settings.schedule, settings.optimizer.lr, train.plan.batch_size, num_steps)
    stage = Stage("train", task, Recorder(found.device))
    stage.enter()
    lightning.attach(task, view, train.loaded)
    if lightning.adds_modules(task):
        place(task, found, precision, settings.parallel.reduce == "tree", say)
    configured = _configured(task, view)
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in task.named_parameters()}
    optimizers = configured.optimizers if configured else _optimizers(task, settings, decided)
    view.optimizers = optimizers
    average = Average(task, settings.train.ema) if settings.train.ema is not None else None
    for name, part in (("model", ModuleState(task)), ("optimizer", OptimizerState(optimizers, names)),
                       ("recorder", stage.recorder), ("metrics", MetricStates(task, stage.metrics)), ("schedule", rate),
                       ("average", average), ("configured", configured)):  # fmt: skip
        if part is not None:
            registry.register(name, part)
    forward = Forward(task, stage, transforms, precision)
    assembly = Assembly(
        task, found, precision, random, registry, rate, train, stage, None, average, None, configured, transforms
    )
    _add_program(assembly, forward, optimizers, settings, decided, num_steps, view, say)
    return assembly


def _configured(task: Any, view: lightning.TrainerView) -> lightning.Configured | None:
    configure = getattr(task, "configure_optimizers", None)
    returned = configure() if configure is not None else None
    if returned is None:
        return None
    configured = lightning.Configured(returned, task, view.num_training_batches)
    view.schedulers = [entry["scheduler"] for entry in configured.schedulers]
    return configured


def _optimizers(task: nn.Module, settings: Settings, decided: Decisions) -> list[Any]:
    section = settings.optimizer
    return make_optimizers(section.name, section.lr, section.arguments, task.parameters(), decided.optimizer)


def _add_program(
    parts: Assembly, forward: Forward, optimizers: list[Any], settings: Settings, decided: Decisions, num_steps: int,
    view: lightning.TrainerView, say: Say,
) -> None:  # fmt: skip
    """Choose and build the program; the reason is said when it is not the obvious one."""
    reseed = _reseed(settings.seed, parts.accelerator)
    plan, feed = parts.train.plan, parts.train.feed
    before_fetch = _before_fetch(parts, reseed)
    after_step = hooks.after_step(parts.task, view, parts.configured, forward.compute)
    if not getattr(parts.task, "automatic_optimization", True):
        decided.program = "eager"
        say("program: eager, because the task updates its weights itself (manual optimisation)")
        manual.check(plan, settings.train, parts.precision)
        hooks.count_updates(parts.task, view, parts.configured, optimizers)
        parts.program = ManualProgram(
            forward, parts.random, reseed, feed, plan,
            manual.before(None if parts.configured else parts.rate, optimizers, before_fetch),
            manual.after(parts.train_stage.recorder, plan, parts.average, after_step),
        )  # fmt: skip
        return
    if len(optimizers) > 1 and parts.configured is not None:
        raise UserError("several optimizers need manual optimisation: set automatic_optimization = False in the task")
    parts.step = _make_step(parts, forward, optimizers, settings, reseed)
    own = parts.configured is not None
    tensor_lr = decided.optimizer.tensor_lr and not own
    inputs = Inputs(parts.rate, settings.train.loss_weights, num_steps, parts.accelerator.device, tensor_lr, own)
    if "compiled" in decided.program:
        forward.compute = compiled(forward.compute)
    launch = settings.train.steps_per_launch
    if decided.program in ("auto", "graphed", "compiled+graphed"):
        why = _cannot_capture(parts, own, tensor_lr, decided.optimizer.capturable)
        why = why or _hooks_in_the_way(parts.task, forward)
        if why is None:
            count = _steps_per_launch(launch, settings.observe.every)
            parts.program = GraphedProgram(
                parts.step, feed, plan, inputs, count, parts.registry, parts.accelerator,
                lambda: _captures(decided),
                _fall_back(decided, say) if settings.train.program == "auto" else None,
            )  # fmt: skip
            return
        if settings.train.program != "auto":
            raise UserError(f"train.program is {decided.program}, but {why}; use train.program=auto")
        _fall_back(decided, say)(why)
    fetched = None if is_vectorised(parts.train.source) else before_fetch
    parts.program = EagerProgram(parts.step, feed, plan, inputs, 1 if launch == "auto" else launch, after_step, fetched)


def _before_fetch(parts: Assembly, reseed: Callable[[int, int], None]) -> Callable[[int], None]:
    """Seed what a dataset may draw from (torch, numpy, random) by the step whose samples it is asked for."""

    def before_fetch(step: int) -> None:
        reseed(step, 255)
        seed = int(torch.randint(2**31, ()))
        python_random.seed(seed)
        np.random.seed(seed)

    return before_fetch


def _hooks_in_the_way(task: Any, forward: Forward) -> str | None:
    names = hooks.of_updates(task)
    if names or isinstance(forward.compute, AroundBatch):
        return f"the task's hooks ({', '.join(names or ['on_after_batch_transfer'])}) run on the host"
    return None


def _fall_back(decided: Decisions, say: Say) -> Say:
    def fall_back(reason: str) -> None:
        decided.program = "eager"
        say(f"program: eager, not graphed, because {reason}")

    return fall_back


def _captures(decided: Decisions) -> None:
    if decided.program == "auto":
        decided.program = "graphed"


def _cannot_capture(parts: Assembly, own: bool, tensor_lr: bool, capturable: bool) -> str | None:
    if not parts.accelerator.can_capture:
        return f"{parts.accelerator.kind} devices cannot capture steps"
    if own:
        return "the task configures its own optimizer"
    if not is_vectorised(parts.train.source):
        return "the dataset is read sample by sample on the host"
    if not tensor_lr:
        return "this optimizer cannot be captured by torch"
    if parts.precision.needs_scaler and parts.step is not None and parts.step.clip is not None:
        return "fp16 with clipping decides on the host; bf16 does not"
    return None


def _steps_per_launch(launch: int | str, log_every: int) -> int:
    """The largest divisor of the logging interval that is not too large to capture."""
    if isinstance(launch, int):
        return launch
    return max(count for count in range(1, AUTO_STEPS_PER_LAUNCH + 1) if log_every % count == 0)


def _make_step(
    parts: Assembly, forward: Forward, optimizers: list[Any], settings: Settings, reseed: Callable[[int, int], None]
) -> Step:
    section = settings.parallel
    scaler = None
    if parts.precision.needs_scaler:
        scaler = torch.amp.GradScaler(parts.accelerator.kind)
        parts.registry.register("scaler", ScalerState(scaler, parts.accelerator.device))
    hooks.check(parts.task, parts.train.plan.num_micro * parts.train.plan.num_shards, parts.precision.needs_scaler)
    make = hooks.HookedStep if hooks.of_updates(parts.task) else Step
    step = make(
        forward, optimizers, make_reducer(section.reduce, section.shards), parts.train_stage.recorder, parts.random,
        settings.train.clip, parts.average, scaler, reseed, parts.configured is None,
    )  # fmt: skip
    parts.registry.register("latch", LatchState(step))
    return step


def _reseed(seed: int, accelerator: Accelerator) -> Callable[[int, int], None]:
    """Seed torch's generators by (seed, step, part), for whatever a task draws from them."""
    high, low = derive_key(seed, "generator")
    base = high << 31 | low
    set_seed = accelerator.seeder()

    def reseed(step: int, part: int) -> None:
        set_seed((base + (step << 8) + part) & 0x7FFFFFFFFFFFFFFF)

    return reseed


class LatchState:
    """The flag that a gradient was not finite."""

    def __init__(self, step: Step) -> None:
        """The latch of `step`."""
        self._step = step

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The flag."""
        return {"latch": self._step.latch}, {}

    def load(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """Take over the flag."""
        self._step.latch.copy_(tensors["latch"])


class ScalerState:
    """The loss scale of fp16, and how long it has been good."""

    def __init__(self, scaler: Any, device: torch.device) -> None:
        """Make the scaler create its tensors now, so that they are part of every state."""
        self._scaler = scaler
        scaler.scale(torch.zeros((), device=device))

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Scale and growth counter."""
        return {"scale": self._scaler._scale, "growth": self._scaler._growth_tracker}, {}

    def load(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """Take over a state."""
        self._scaler._scale.copy_(tensors["scale"])
        self._scaler._growth_tracker.copy_(tensors["growth"])
