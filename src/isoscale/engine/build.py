"""Puts together what a training needs: task, data, optimizer, step and program, from settings and decisions."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from isoscale.data import rng
from isoscale.data.mixture import MixturePlan
from isoscale.data.rng import StepRandom
from isoscale.data.shards import check_world
from isoscale.engine import checks
from isoscale.engine.assembly import Assembly, Built
from isoscale.engine.boundaries import Planner
from isoscale.engine.config import Cadence, LossWeight, Optimizer, Schedule
from isoscale.engine.lazy import materialise
from isoscale.engine.lightning import module as lightning
from isoscale.engine.lightning.callbacks import CallbackState, chosen
from isoscale.engine.lightning.closure_step import why_closure
from isoscale.engine.lightning.configured import Configured
from isoscale.engine.lightning.logger import RunLogger, log_hyperparameters
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.engine.lightning.transfer import check_transforms
from isoscale.engine.metrics.accumulators import Recorder
from isoscale.engine.metrics.torchmetrics import MetricStates
from isoscale.engine.optim.ema import EMA
from isoscale.engine.optim.late_compiler import put_off_compiler
from isoscale.engine.optim.loss_weights import Length, make_weights
from isoscale.engine.optim.optimizers import OptimizerState, make_optimizers, path_for
from isoscale.engine.optim.own_update import OwnUpdate
from isoscale.engine.optim.schedules import make_rate
from isoscale.engine.precision import Precision
from isoscale.engine.settings import Decisions, Settings
from isoscale.engine.splits import Split, SplitMaker, read_dataset
from isoscale.engine.state.module_state import ExtraState
from isoscale.engine.state.progress import Progress
from isoscale.engine.state.registry import ModuleState, Registry
from isoscale.engine.step.choice import ProgramMaker, reseeder
from isoscale.engine.step.context import StepContext, step_method
from isoscale.engine.step.kernels import KernelChoice
from isoscale.engine.step.step import Forward
from isoscale.engine.threads import settle_threads
from isoscale.engine.training_data import TrainingData, adapted, in_step, prepares
from isoscale.engine.transforms import fit
from isoscale.errors import UserError
from isoscale.observe.observers import Observers
from isoscale.parallel.batch_norm import batch_norms, synchronise
from isoscale.parallel.collectives import ALONE, Ranks
from isoscale.parallel.config import Parallel
from isoscale.parallel.reduction import OVERLAP_FROM, Reducer, check_shards, make_reducer, tree_shards
from isoscale.system import devices as accelerators
from isoscale.system.devices import Accelerator, Kernels

Say = Callable[[str], None]


_DOUBLE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    torch.complex64: torch.complex128,
}


def place(task: nn.Module, accelerator: Accelerator, precision: Precision, tree: bool, say: Say) -> None:
    """Move a task to the device, in its precision, with dropout that is keyed by sample."""
    unkeyed = rng.key_dropout(task)
    if unkeyed and tree:
        raise UserError(f"parallel.reduce: tree needs keyed randomness, which these do not have: {', '.join(unkeyed)}")
    if unkeyed:
        say(f"randomness of {', '.join(unkeyed)} comes from torch's generator, reseeded every step")
    task.to(accelerator.device)
    if precision.dtype == torch.float64:
        task._apply(lambda tensor: tensor.to(_DOUBLE.get(tensor.dtype, tensor.dtype)))
        if "_dtype" in vars(task):  # what a LightningModule says as self.dtype
            vars(task)["_dtype"] = torch.float64


def build(
    task: Any, data: Any, transforms: Sequence[Any], settings: Settings, decided: Decisions, observers: Observers,
    ranks: Ranks = ALONE, saving: bool = False, begin: Callable[[Any], None] | None = None,
) -> Built:  # fmt: skip
    """Bring task and data to the device and put a training together; `begin` sets the weights of a new run."""
    checks.check_task(task)
    torch.set_num_threads(decided.cores or decided.threads)
    found = accelerators.find(decided.device)
    precision = Precision(decided.precision, found.kind, _in_evaluations(settings, decided))
    num_shards = _num_shards(settings.parallel, ranks)
    place(task, found, precision, settings.parallel.reduce == "tree", observers.note)
    with ExitStack() as undo:
        adapted_data = adapted(task, data, transforms, ranks, observers.note)
        preparing, transforms = prepares(transforms), in_step(transforms)
        splits = SplitMaker(adapted_data, settings, found, ranks, num_shards, decided.first_world, observers.note, task)
        why = check_transforms(splits.hooks_on_host, transforms, found.device)
        if why is not None:
            raise UserError(why)
        train, val = _splits(task, splits, settings, decided, observers, undo)
        if val is not None:
            read_dataset(val, "val", settings, found.device, observers.note, ranks)
        for name, split in (("train", train), ("val", val)):
            if split is not None and hasattr(task, "check_data"):
                task.check_data(name, split.source)
        plan, progress = _planner(settings, train, val, saving), Progress()
        if decided.reduce == "auto":
            count = sum(parameter.numel() for parameter in task.parameters() if not is_lazy(parameter))
            decided.reduce = "overlap" if count >= OVERLAP_FROM else "flat"
        new_reducer = partial(make_reducer, decided.reduce, num_shards, ranks)
        per_epoch = train.plan.steps_per_epoch
        view = TrainerView(progress, plan.num_steps, per_epoch, ranks, found.device)
        num_val = None if val is None or plan.evaluate.unit == "never" else val.plan.steps_per_epoch
        view.describe(settings.observe.every, plan.evaluate, num_val, settings.folder)
        view.saves, view.note = saving, observers.note
        view.precision = decided.precision
        view.logger = logger = RunLogger(observers, view)
        view.loggers, view.log_dir = [logger], logger.log_dir
        view.min_epochs, view.min_steps = settings.train.min_epochs, settings.train.min_steps
        with precision.applied():
            if begin is not None:
                fit(transforms, train.source, observers.note)
                if hasattr(task, "fit_statistics"):
                    samples = TrainingData(
                        train.source, ranks, observers.note, transforms, found.device, precision.dtype
                    )  # fmt: skip
                    with torch.no_grad():  # before the weights are copied anywhere
                        task.fit_statistics(samples)
                begin(task)
            undo.callback(lightning.detach, task)
            parts = assemble(
                task, train, settings, decided, plan.num_steps, transforms, view, observers.note,
                new_reducer(dtype=precision.dtype), undo,
            )  # fmt: skip
        log_hyperparameters(task, train.loaded, logger)
        if decided.reduce != "tree":
            undo.callback(synchronise(task, ranks))
            _check_share(task, train, decided, ranks)
        settle_threads(decided, parts, ranks)
        return Built(
            parts, train, val, splits.has_test, plan, progress, num_shards, new_reducer, undo.pop_all(), preparing
        )


def _num_shards(section: Parallel, ranks: Ranks) -> int:
    """Of a batch in `tree`, if the ranks can share them out."""
    count = tree_shards(section.reduce, section.shards)
    check_shards(count)
    if section.reduce == "tree":
        check_world(ranks.world_size, count)
    return count


def _splits(
    task: Any, splits: SplitMaker, settings: Settings, decided: Decisions, observers: Observers, undo: ExitStack
) -> tuple[Split, Split | None]:
    """The training and validation data, shared out among the ranks."""
    if splits.unused:
        observers.note(f"the loaders decide about batches: {', '.join(splits.unused)} is not used", "warning")
    train = splits.train(settings.train.accumulate, decided.residency)
    undo.callback(train.feed.close)
    decided.residency = train.residency
    val = splits.evaluation("val", settings.train.limit_val_batches)
    if val is not None:
        undo.callback(val.feed.close)
    if val is not None and step_method(task, "val") is None:
        observers.note(f"{type(task).__name__} has no validation_step: the validation data is not used")
        val = None
    return train, val


def _planner(settings: Settings, train: Split, val: Split | None, saving: bool) -> Planner:
    section = settings.train
    limits = [section.steps, section.epochs and section.epochs * train.plan.steps_per_epoch]
    never, every = Cadence(1, "never"), settings.checkpoint.every
    return Planner(
        train.plan,
        min(limit for limit in limits if limit),
        settings.observe.every,
        Cadence.parse(section.evaluate).in_steps(train.plan.steps_per_epoch) if val else never,
        Cadence.parse("1 epoch" if every == "auto" else every).in_steps(train.plan.steps_per_epoch)
        if saving
        else never,
        first=settings.observe.curve is not None,
    )


def _check_share(task: nn.Module, train: Split, decided: Decisions, ranks: Ranks) -> None:
    """Batch norms see the whole batch; then, and in `overlap`, a rank without samples would be missed."""
    smallest = train.plan.smallest
    if smallest < ranks.world_size and (batch_norms(task) or decided.reduce == "overlap"):
        why = "parallel.reduce: overlap" if decided.reduce == "overlap" else "batch norm"
        raise UserError(
            f"a batch of {smallest} samples does not reach all {ranks.world_size} ranks, which {why} needs; use "
            "data.drop_last=true, another data.batch_size, or parallel.reduce=tree"
        )


def assemble(
    task: Any, train: Split, settings: Settings, decided: Decisions, num_steps: int, transforms: Sequence[Any],
    view: TrainerView, say: Say, reducer: Reducer, undo: ExitStack,
) -> Assembly:  # fmt: skip
    """The parts that a step needs; `say` takes lines that the user should know."""
    found = accelerators.find(decided.device)
    precision = Precision(decided.precision, found.kind, _in_evaluations(settings, decided), say=say)
    random = StepRandom(settings.seed)
    random.steps_per_epoch = train.plan.steps_per_epoch
    registry = Registry()
    rate = make_rate(
        settings.schedule, settings.optimizer.lr, _asked_batch(train, settings), num_steps, settings.own_schedule
    )
    length = Length(num_steps, train.plan.steps_per_epoch)
    weights = make_weights(settings.train.loss_weights, settings.own_weights, rate, length, say)
    context = StepContext("train", task, Recorder(found.device), train.loaded)
    context.enter()
    lightning.attach(task, view, train.loaded, chosen(settings.callbacks, task, say))
    context.enter()  # again: the task has its trainer now
    if lightning.adds_modules(task):
        place(task, found, precision, settings.parallel.reduce == "tree", say)
    materialise(task, Forward(task, context, transforms, precision), train, settings.seed, found)
    is_automatic = getattr(task, "automatic_optimization", True)
    kernels = KernelChoice(task, found, precision, decided, is_automatic, settings.train.deterministic == "true", undo)
    configured = _configured(task, view)
    if configured and (settings.optimizer != Optimizer() or settings.schedule != Schedule()):
        say("the task configures its own optimizer: the recipe's optimizer and schedule are not used")
    if configured:
        _check_followed(settings)
    optimizers = configured.optimizers if configured else _optimizers(task, settings, decided)
    own_update = None
    is_own = configured and is_automatic and why_closure(task, optimizers) is None
    if is_own and decided.captures_own and found.can_capture and len(optimizers) == 1:
        own_update = OwnUpdate(optimizers[0], view.schedulers, found)
    view.optimizers, view.gradient_clip_val = optimizers, settings.train.clip
    average = EMA(task, settings.train.ema) if settings.train.ema is not None else None
    metrics = MetricStates(task, context.metrics, reducer.ranks)
    sees_gradients = any(overrides(task, name) for name in ("on_before_zero_grad", "optimizer_zero_grad"))
    extra = ExtraState(
        task,
        [*optimizers, *view.schedulers, *view.wrap(optimizers)],
        reducer.ranks,
        not is_automatic or sees_gradients,
        say,
    )
    states = OptimizerState(optimizers, task, own_class=configured is None and settings.own_optimizer is not None)
    if states.unsaved():
        say(f"checkpoints do not hold {', '.join(states.unsaved())}: after a restart it is as its constructor makes it")
    for name, part in (("model", ModuleState(task)), ("extra", extra), ("configured", configured),
                       ("optimizer", states), ("recorder", context),
                       ("metrics", metrics), ("schedule", rate), ("average", average)):  # fmt: skip
        if part is not None:
            registry.register(name, part)
    callbacks = CallbackState(task, view)
    if callbacks.is_needed:
        registry.register("callbacks", callbacks)
    forward = Forward(task, context, transforms, precision)
    assembly = Assembly(
        task, found, precision, random, registry, rate, weights, train, context, average, optimizers, configured,
        transforms, extra, reseeder(settings.seed, found), undo, kernels, view,
    )  # fmt: skip
    assembly.program = ProgramMaker(
        assembly, forward, optimizers, settings, decided, num_steps, view, say, reducer, own_update
    ).make()
    return assembly


def _in_evaluations(settings: Settings, decided: Decisions) -> Kernels:
    """Which kernels are taken outside of training steps: only deterministic ones where somebody asks for it."""
    is_strict = decided.kernels == "strict" and settings.train.deterministic != "true"
    return "lenient" if is_strict else decided.kernels


def _asked_batch(train: Split, settings: Settings) -> int:
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


def _configured(task: Any, view: TrainerView) -> Configured | None:
    put_off_compiler()
    configure = getattr(task, "configure_optimizers", None)
    returned = configure() if configure is not None else None
    if returned is None:
        return None
    configured = Configured(returned, task, view.num_training_batches)
    view.schedulers = [entry["scheduler"] for entry in configured.schedulers]
    view.lr_scheduler_configs = [SimpleNamespace(**{"name": None, **entry}) for entry in configured.schedulers]
    return configured


def _optimizers(task: nn.Module, settings: Settings, decided: Decisions) -> list[Any]:
    decided.optimizer = path_for(decided.optimizer, task.parameters())
    return make_optimizers(settings.optimizer, task.named_parameters(), decided.optimizer, settings.own_optimizer)
