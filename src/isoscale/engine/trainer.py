"""The training loop: run to the next boundary, do what is due there, until the end."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from isoscale.data import keyed
from isoscale.data.device_feed import DeviceFeed
from isoscale.data.samples import kept_generators
from isoscale.data.shards import check_world
from isoscale.engine import accelerator as accelerators
from isoscale.engine import lightning
from isoscale.engine.accelerator import Accelerator
from isoscale.engine.agreement import Agreement
from isoscale.engine.assembly import (
    Assembly,
    assemble,
    buffer_names,
    check_buffers,
    check_parameters,
    check_task,
    place,
)
from isoscale.engine.cadence import Cadence
from isoscale.engine.checkpoint import State
from isoscale.engine.config import Limit
from isoscale.engine.evaluate import Interrupted, call_hook
from isoscale.engine.evaluations import Evaluations
from isoscale.engine.extra_state import HostGenerators
from isoscale.engine.fitting import FittedStates, fit, fitted
from isoscale.engine.journal import Journal
from isoscale.engine.loaders import read_dataset
from isoscale.engine.memory import explained
from isoscale.engine.monitors import Best, Patience
from isoscale.engine.overrides import overrides
from isoscale.engine.planner import Due, Planner
from isoscale.engine.precision import Precision
from isoscale.engine.profile import Profile, timed
from isoscale.engine.progress import LogState, OrderState, Progress
from isoscale.engine.roles import Role, RoleMaker
from isoscale.engine.run_directory import RunDirectory
from isoscale.engine.saver import Saver
from isoscale.engine.settings import Decisions, Settings
from isoscale.engine.show import Exhibition
from isoscale.engine.stage import step_method
from isoscale.engine.staging import Staged
from isoscale.engine.stop import StopRequest, deadline
from isoscale.engine.task import Task
from isoscale.engine.training_data import TrainingData, adapted
from isoscale.engine.untrained import check_replaced, named, not_optimised, refuse_unreached
from isoscale.engine.verify import verify
from isoscale.errors import Stopped, UserError
from isoscale.observe.events import EpochEnded
from isoscale.observe.metric_log import MetricLog
from isoscale.observe.observers import Observers
from isoscale.parallel.batch_norm import batch_norms, synchronise
from isoscale.parallel.ranks import ALONE, Ranks
from isoscale.parallel.reduction import OVERLAP_FROM, check_shards, make_reducer, tree_shards


class Trainer:
    """Trains a task on data, from its present state to the end of the plan."""

    def __init__(
        self,
        settings: Settings,
        decided: Decisions,
        observers: Observers,
        directory: RunDirectory | None = None,
        metric_log: MetricLog | None = None,
        profile: bool = False,
        ranks: Ranks = ALONE,
        saving: bool | None = None,
    ) -> None:
        """Without a directory nothing is written here; with `profile` it is measured where the time goes.

        Where several ranks train together, one of them has the directory, and `saving` says to all that it saves.
        """
        self.ranks = ranks
        self._saving = directory is not None if saving is None else saving
        self.settings = settings
        self.decided = decided
        self.observers = observers
        self.progress = Progress()
        self.stop = StopRequest()
        self.agreed = Agreement(ranks, self.stop)
        self._directory = directory
        self.rolled_back: list[tuple[int, int]] = []
        """Steps, from the first to before the last, of which those that are not finite are left out."""
        self.started = False
        self._saver = _saver(directory, settings.checkpoint.keep, metric_log) if directory else None
        self._metric_log = metric_log
        trace = directory.trace if directory else None
        self.profile = Profile(accelerators.find(decided.device), trace, self._saving) if profile else None
        self._clock = time.perf_counter()
        self._undo: Callable[[], None] = lambda: None
        self._generators = HostGenerators(settings.seed)
        self._saved: State | None = None
        """A checkpoint that waits until the hooks of a start have run."""
        self._parameters: dict[str, nn.Parameter] = {}
        self._buffers: set[str] = set()
        self._unsaved: set[str] = set()

    def prepare(
        self, task: Any, data: Any, transforms: Sequence[Any] = (), begin: Callable[[Any], None] | None = None
    ) -> None:
        """Bring task and data to the device and put everything together; `begin` sets the weights of a new run."""
        check_task(task)
        settings = self.settings
        torch.set_num_threads(self.decided.threads)
        found = accelerators.find(self.decided.device)
        precision = Precision(self.decided.precision, found.kind)
        num_shards = self._num_shards
        place(task, found, precision, settings.parallel.reduce == "tree", self.observers.note)
        self._take_roles(task, adapted(task, data, self.ranks, self.observers.note), found)
        self._check_data(task)
        self.plan = self._planner(self.train)
        view = lightning.TrainerView(self._where, self.plan.num_steps, self.train.plan.steps_per_epoch, self.ranks)
        self._choose_reduction(task)
        self._make_reducer = partial(make_reducer, self.decided.reduce, num_shards, self.ranks)
        with precision.applied():
            if begin is not None:
                fit(transforms, self.train.source, self.observers.note)
                self._measure(task, transforms, found, precision)
                begin(task)
            self.parts: Assembly = assemble(
                task, self.train, settings, self.decided, self.plan.num_steps, transforms, view, self.observers.note,
                self._make_reducer(dtype=precision.dtype),
            )  # fmt: skip
        if self.decided.reduce != "tree":
            self._share_batch_norms(task)
        self._made = dict(task.named_parameters())
        self._connect()
        self._register()

    @property
    def _num_shards(self) -> int:
        """Of a batch in `tree`, if the ranks can share them out."""
        section = self.settings.parallel
        count = tree_shards(section.reduce, section.shards)
        check_shards(count)
        if section.reduce == "tree":
            check_world(self.ranks.world, count)
        return count

    def _take_roles(self, task: Any, data: Any, found: Accelerator) -> None:
        """The training and validation data, shared out among the ranks."""
        roles, section = self._roles(data, found), self.settings.train
        if roles.unused:
            self.observers.note(f"the loaders decide about batches: {', '.join(roles.unused)} is not used", "warning")
        self.train = roles.train(section.accumulate, self.decided.residency)
        self.decided.residency = self.train.residency
        self.val = roles.evaluation("val", section.limit_val_batches)
        if self.val is not None and step_method(task, "val") is None:
            self.observers.note(f"{type(task).__name__} has no validation_step: the validation data is not used")
            self.val = None
        self.has_test = roles.has_test
        if self.val is not None:
            read_dataset(self.val, "val", self.settings, found.device, self.observers.note, self.ranks)

    def _roles(self, data: Any, found: Accelerator) -> RoleMaker:
        return RoleMaker(data, self.settings, found, self.ranks, self._num_shards, self.decided.first_world)

    def _connect(self) -> None:
        """Let votes travel with the step, and those who watch see it."""
        step = self.parts.step
        self.agreed.vote_with(step)
        self.parts.program.profile = self.profile
        if step is not None:
            step.forward.mark = self.profile
            if step.overlap is not None:
                step.overlap.profile = self.profile
        self.exhibition = Exhibition(self.parts, self.settings.observe, self.observers, self.ranks)
        self.evaluations = Evaluations(
            self.parts, self.plan, self.settings, self.progress, self.agreed, self.observers, self.ranks,
            partial(self._make_reducer, dtype=torch.float64), self.exhibition.wanted,
        )  # fmt: skip

    def _choose_reduction(self, task: Any) -> None:
        if self.decided.reduce == "auto":
            count = sum(parameter.numel() for parameter in task.parameters() if not is_lazy(parameter))
            self.decided.reduce = "overlap" if count >= OVERLAP_FROM else "flat"

    def _share_batch_norms(self, task: Any) -> None:
        """Let batch norms see the whole batch; then, and in `overlap`, a rank without samples would be missed."""
        self._undo = synchronise(task, self.ranks)
        smallest = self.train.plan.smallest
        if smallest < self.ranks.world and (batch_norms(task) or self.decided.reduce == "overlap"):
            why = "parallel.reduce: overlap" if self.decided.reduce == "overlap" else "batch norm"
            raise UserError(
                f"a batch of {smallest} samples does not reach all {self.ranks.world} ranks, which {why} needs; use "
                "data.drop_last=true, another data.batch_size, or parallel.reduce=tree"
            )

    def _check_data(self, task: Any) -> None:
        check = getattr(task, "check_data", None)
        for name, role in (("train", self.train), ("val", self.val)):
            if check is not None and role is not None:
                check(name, role.source)

    def _measure(self, task: Any, transforms: Sequence[Any], found: Accelerator, precision: Precision) -> None:
        """Let the task measure training samples, before its weights are copied anywhere."""
        measure = getattr(task, "measure", None)
        if measure is not None:
            with torch.no_grad():
                measure(TrainingData(
                    self.train.source, self.ranks, self.observers.note, transforms, found.device, precision.dtype
                ))  # fmt: skip

    def _planner(self, train: Role) -> Planner:
        section = self.settings.train
        per_epoch = train.plan.steps_per_epoch
        limits = [section.steps, section.epochs and section.epochs * per_epoch]
        never = Cadence(1, "never")
        return Planner(
            train.plan,
            min(limit for limit in limits if limit),
            self.settings.observe.every,
            Cadence.parse(section.evaluate) if self.val else never,
            Cadence.parse(self.settings.checkpoint.every) if self._saving else never,
            first=self.settings.observe.curve is not None,
        )

    def _register(self) -> None:
        section = self.settings.checkpoint
        self.best = Best(section.monitor, section.mode)
        self.patience = Patience(self.settings.train.early_stopping)
        self.journal = Journal(
            self.parts.train_stage,
            self.observers,
            self.parts.step.soundness if self.parts.step else None,
            self.parts.accelerator,
        )
        registry = self.parts.registry
        if fitted(self.parts.transforms):
            registry.register("transforms", FittedStates(self.parts.transforms))
        registry.register("journal", self.journal)
        registry.register("progress", self.progress)
        registry.register("order", OrderState(self.settings.seed, self.train.plan, self.progress))
        registry.register("random", self._generators)
        registry.register("best", self.best)
        registry.register("patience", self.patience)
        registry.register("log", LogState(self._metric_log))

    def restore(self, state: State) -> None:
        """Take over the state of a checkpoint: now, or when the hooks of a start have run, whose doing it overrules."""
        if not any(overrides(self.parts.task, name) for name in _START_HOOKS):
            self.parts.registry.load(*state)
            lightning.remember(self.parts.task, self.progress.values)
            return
        self._saved = state
        self.parts.registry.load_some(("progress", "transforms"), *state)
        if self.parts.configured is not None:
            self.parts.configured.updates = state[1].get("configured", {}).get("updates", 0)

    def fit(self) -> None:
        """Train to the end; raises Stopped when asked to stop, after saving."""
        try:
            self._fit()
        except Stopped:  # on all ranks
            self.ranks.any(False, "the last checkpoint")  # or else some would end well though it could not be written
            raise

    def _fit(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.stop.listening(aloud=self.ranks.is_first))
            self._watch()
            stack.enter_context(self._saver or nullcontext())
            stack.enter_context(keyed.use(self.parts.random))
            stack.enter_context(kept_generators())
            self._generators.begin()
            stack.enter_context(self.parts.precision.applied())
            stack.enter_context(self._stream())
            stack.callback(self.release)
            stack.enter_context(explained(self.parts.accelerator, self.train.plan.batch_size))
            self._get_ready()
            self._settle()
            call_hook(self.parts.task, "on_fit_start")
            self._check_optimised()
            self._resume()
            verify(self.parts.registry, self.ranks, self.progress.step)
            self._verified = self.progress.step
            if self.settings.train.nan == "rollback" and not self.progress.step:
                self._save()  # so that there is always something to go back to
            self.evaluations.rehearse(self.val)
            self.evaluations.begin(self.val)
            self.exhibition.begin(self.progress.step)
            self._loop()

    def _resume(self) -> None:
        """What hooks set up, then what was saved: a stop in the middle of an epoch is not to be seen afterwards."""
        if self._saved is None:
            return
        call_hook(self.parts.task, "on_train_start")
        if self.progress.step % self.train.plan.steps_per_epoch:
            call_hook(self.parts.task, "on_train_epoch_start")
        self._check_optimised()
        self.parts.train_stage.forget()
        self.parts.registry.load(*self._saved)
        lightning.remember(self.parts.task, self.progress.values)

    def _get_ready(self) -> None:
        get_ready = getattr(self.parts.task, "get_ready", None)
        if get_ready is not None:
            get_ready(self.train.source, self.parts.transforms)

    def _settle(self) -> None:
        """Do to data on the device once what every step would do to it again."""
        step, feed, task = self.parts.step, self.train.feed, self.parts.task
        if step is None or not isinstance(feed, DeviceFeed):
            return
        step.forward.transforms = feed.settle(step.forward.transforms)
        if not step.forward.transforms and isinstance(task, Task) and type(task).prepare is not Task.prepare:
            found = self.parts.accelerator
            feed.prepare(task.prepare, found.total_memory // (self.ranks.num_here if found.kind == "cpu" else 1))

    def _loop(self) -> None:
        task, progress, plan = self.parts.task, self.progress, self.plan
        self.started = True
        if self._saved is None:
            call_hook(task, "on_train_start")
        self._saved = None
        self._check_optimised()
        self._tell_not_optimised()
        self.parts.train_stage.enter()
        self._parameters, self._buffers = dict(task.named_parameters()), buffer_names(task)
        self._tell_modes()
        self._clock = time.perf_counter()
        self.journal.start_clock()
        if self.profile:
            self.profile.start_clock()
        try:
            if progress.step:  # a run that was stopped at a boundary may have left something undone there
                self._at_boundary(plan.due(progress.step))
            while progress.step < plan.num_steps and not progress.ended and not self.agreed.stopped:
                if progress.step % self.train.plan.steps_per_epoch == 0:
                    self.parts.reseed(progress.step, 254)
                    call_hook(task, "on_train_epoch_start")
                self._advance(plan.next_boundary(progress.step))
                self._at_boundary(plan.due(progress.step))
        except Interrupted:
            self._stop_here()
        if self.agreed.stopped and progress.step < plan.num_steps and not progress.ended:
            self._stop_here()
        self._check_trained()
        call_hook(task, "on_train_end")
        call_hook(task, "on_fit_end")

    def _advance(self, boundary: int) -> None:
        """Train up to a boundary, or to where a trace ends before it."""
        progress, profile = self.progress, self.profile
        began = progress.step
        check_parameters(self._parameters, dict(self.parts.task.named_parameters()))
        if self.parts.step is not None:
            self.parts.step.notice_listeners()
        boundary, guarded = self._guarded(boundary)
        program = self.parts.program
        visibly = self.exhibition.distributions and self.plan.due(boundary).evaluate
        run = program.run_eagerly if guarded else program.run_visibly if visibly else program.run
        end = profile.end_of_trace(progress.step, boundary, self.plan.num_steps) if profile else None
        if profile and end is not None:
            with profile.traced():
                progress.step = run(progress.step, end, self.agreed)
        if progress.step != boundary and not self.agreed.stopped:
            progress.step = run(progress.step, boundary, self.agreed)
        if profile:
            profile.settle()
        with timed(profile, "logging"):
            self.journal.flush()
        if self.parts.step is not None and not self.parts.step.reaches and progress.step > began:
            refuse_unreached(self.parts.task, self.parts.optimizers)
        if progress.step >= self.plan.num_steps:
            check_parameters(self._parameters, dict(self.parts.task.named_parameters()))

    def _guarded(self, boundary: int) -> tuple[int, bool]:
        """Leave out steps that are not finite where the run has rolled back: up to where, and whether that is here."""
        step = self.progress.step
        guarded = any(first <= step < last for first, last in self.rolled_back)
        if self.rolled_back and self.parts.step is not None:
            self.parts.step.soundness.choose("skip" if guarded else "stop")
        edges = [edge for window in self.rolled_back for edge in window if edge > step]
        return min([boundary, *edges]), guarded

    def _stop_here(self) -> None:
        self._save()
        raise Stopped(f"stopped by {self.agreed.reason} at step {self.progress.step} of {self.plan.num_steps}")

    def _at_boundary(self, due: Due) -> None:
        """What is due after a step; each thing once, also when a run is continued here."""
        progress = self.progress
        self.parts.reseed(progress.step, 253)  # for hooks that draw: what they get follows from the step alone
        if self._saver:
            self._saver.check()
        if due.log and progress.logged_at != progress.step:
            with timed(self.profile, "logging"):
                self._log()
        best = False
        if (due.evaluate or due.epoch_end) and progress.evaluated_at != progress.step:
            with self.journal.excluded(), timed(self.profile, "evaluation"):
                best = self._end_epoch(due)
        if due.log and self._verification_is_due():
            verify(self.parts.registry, self.ranks, progress.step)
            self._verified = progress.step
        wanted = due.checkpoint or progress.ended or self.agreed.save_due
        if best or (wanted and progress.saved_at != progress.step):
            with timed(self.profile, "saving"):
                self._save(best)
        self.agreed.save_due = False

    def _log(self) -> None:
        progress = self.progress
        step = progress.step
        rate = self.parts.configured.rates() if self.parts.configured else {"lr": self.parts.rate(step - 1)}
        rate["time/seconds"] = progress.seconds + time.perf_counter() - self._clock
        samples = self.train.plan.samples_before(step)
        self.journal.begin(step, (step - 1) // self.train.plan.steps_per_epoch, samples, rate)
        progress.logged_at = step

    def _end_epoch(self, due: Due) -> bool:
        """Means of the epoch, evaluation, and all who watch them; whether this is the best so far."""
        progress = self.progress
        values = self.evaluations.validate(self.val) if due.evaluate and self.val is not None else {}
        watched = values if due.steers else {}
        epoch = (progress.step - 1) // self.train.plan.steps_per_epoch
        if due.epoch_end:
            if overrides(self.parts.task, "on_train_epoch_end"):
                lightning.remember(self.parts.task, self.journal.epoch_so_far())
                call_hook(self.parts.task, "on_train_epoch_end")
                self.parts.train_stage.flush_together(self.train.plan.batch_size, self.ranks)
            of_epoch = self.journal.end_epoch(epoch, self.train.plan.steps_per_epoch)
            values, watched = {**of_epoch, **values}, {**of_epoch, **watched}
            if self.parts.configured:
                self.parts.configured.after_epoch(epoch + 1, values)
        self._tell_not_finite(values)
        progress.ended = self.patience.watch(watched)
        if progress.ended and self.val is not None:
            last = self.evaluations.conclude(self.val)
            values, watched = {**values, **last}, {**watched, **last}
        best = self.best.watch(watched, progress.step)
        if progress.ended:
            self.observers.note(f"{self.settings.train.early_stopping.monitor} stopped improving: training ends here")  # type: ignore[union-attr]
        if self.parts.rate.watch(watched):
            self.observers.note(f"the learning rate drops to {self.parts.rate(progress.step):g}")
        progress.values, progress.evaluated_at = {**progress.values, **values}, progress.step
        seconds = self._count_seconds()
        logged = {**values, "time/seconds": progress.seconds}
        self.observers.notify(EpochEnded(progress.step, epoch, logged, seconds, best))
        if due.evaluate and self.val is not None:
            self.exhibition.evaluated(progress.step, epoch, self.val, self.evaluations.loss_weights)
        return best

    def _tell_modes(self) -> None:
        """Say which modules are in eval mode when training begins: people forget that."""
        resting = [name for name, module in self.parts.task.named_modules() if not module.training]
        outermost = [name for name in resting if not any(name.startswith(f"{other}.") for other in resting if other)]
        if outermost and not self.progress.step:
            names = ", ".join(name or "the task itself" for name in outermost[:4])
            self.observers.note(
                f"in eval mode when training begins, and left so: {names}{' …' * (len(outermost) > 4)} (no dropout, no "
                "new batch norm statistics; module.train() changes that)"
            )

    def _check_optimised(self) -> None:
        check_replaced(self.parts.task, self.parts.optimizers, self._made)

    def _tell_not_optimised(self) -> None:
        """Say which parameters no optimizer has: that may be meant, or forgotten."""
        names = not_optimised(self.parts.task, self.parts.optimizers)
        if names and not self.progress.step:
            self.observers.note(
                f"in no optimizer, and so not trained: {named(names)} (requires_grad_(False) says that this is meant)"
            )

    def _check_trained(self) -> None:
        """Do not call it a training where nothing has changed any weights."""
        self.journal.check_trained(self.progress.step)
        configured = self.parts.configured
        if self.parts.step is None and configured is not None and not configured.updates and self.progress.step:
            self.observers.note(
                "training_step is to update the weights itself (automatic_optimization = False), and in "
                f"{self.progress.step:,} steps no optimizer of configure_optimizers made one: call "
                "self.optimizers().step() there, unless the weights are changed in another way",
                "warning",
            )

    def _tell_unsaved(self) -> None:
        """Say what a checkpoint does not hold, once."""
        found = {name: kind for name, kind in self.parts.extra.unsaved().items() if name not in self._unsaved}
        self._unsaved.update(found)
        if found:
            names = ", ".join(f"{name} ({kind})" for name, kind in list(found.items())[:4])
            self.observers.note(
                f"changed in training and cannot be saved: {names}{' …' * (len(found) > 4)}; after a restart it is as "
                "the constructor makes it. Keep numbers, text, tensors, lists or dicts of these in attributes, or give "
                "the class state_dict and load_state_dict",
                "warning",
            )

    def _tell_not_finite(self, values: dict[str, float]) -> None:
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            self.observers.note(
                f"{', '.join(bad)} at step {self.progress.step} {'is' if len(bad) == 1 else 'are'} NaN or infinite: "
                "look for bad samples in the data; training goes on, and `best` is not moved",
                "warning",
            )

    def role(self, data: Any, name: str, limit: Limit) -> Role | None:
        """Another role of the data, shared out among the ranks as the others are."""
        seen = adapted(self.parts.task, data, self.ranks, self.observers.note)
        return self._roles(seen, self.parts.accelerator).evaluation(name, limit)

    def _watch(self) -> None:
        """The first rank looks at files and clock for all."""
        if self._directory is not None:
            cadence = self.plan.checkpoint
            minutes = 60.0 * cadence.count if cadence.unit == "minute" else None
            ends = deadline(self.settings.train.stop_after)
            self.stop.watch(self._directory.path, minutes, ends, self._directory.check)

    def _verification_is_due(self) -> bool:
        every, step = self.settings.parallel.verify, self.progress.step
        return bool(every) and step // every > self._verified // every

    def _save(self, best: bool = False) -> None:
        if not self._saving:
            return
        began = time.perf_counter()
        self.journal.check(self.progress.step)
        self._count_seconds()
        self.progress.saved_at = self.progress.step
        self._tell_unsaved()
        if self.started:
            check_buffers(self._buffers, buffer_names(self.parts.task))
        with self.journal.saving():
            state = self.parts.registry.together()
            if self._saver is not None:
                self._saver.save(self.progress.step, state, best)
        self.stop.saved(max(time.perf_counter() - began, self._saver.longest if self._saver else 0.0))

    @property
    def last_saved(self) -> tuple[int, Staged, bool] | None:
        """Step and state of the last checkpoint of this process, and whether it was the best."""
        return self._saver.newest if self._saver else None

    def _count_seconds(self) -> float:
        """Add the time since the last call to the run's."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self.progress.seconds += seconds
        return seconds

    def _where(self) -> tuple[int, int]:
        return self.progress.step // self.train.plan.steps_per_epoch, self.progress.step

    def _stream(self) -> Any:
        """One stream of its own for all work on a CUDA device: what warms up there can be captured there."""
        if self.parts.accelerator.kind != "cuda":
            return nullcontext()
        stream = torch.cuda.Stream(self.parts.accelerator.device)
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def release(self) -> None:
        """Stop reading ahead, and leave the task as it was; also after a start that failed half-way."""
        for role in (getattr(self, "train", None), getattr(self, "val", None)):
            if role is not None:
                role.feed.close()
        self._undo()
        if hasattr(self, "parts"):
            while self.parts.closing:
                self.parts.closing.pop()()
            lightning.detach(self.parts.task)


_START_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start")


def _saver(directory: RunDirectory, keep: int, metric_log: MetricLog | None) -> Saver:
    checkpoints = directory.checkpoints(keep)
    return Saver(checkpoints, metric_log.sync) if metric_log else Saver(checkpoints)
