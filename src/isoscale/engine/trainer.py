"""The training loop: run to the next boundary, do what is due there, until the end."""

import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from isoscale.data import rng
from isoscale.data.feeds.device import DeviceFeed
from isoscale.data.generators import kept_generators
from isoscale.data.sources import Source
from isoscale.engine import checks
from isoscale.engine.assembly import Built
from isoscale.engine.boundaries import Due
from isoscale.engine.config import Limit
from isoscale.engine.dataset_metrics import Interrupted
from isoscale.engine.diagnose.memory import explained
from isoscale.engine.diagnose.profile import Profile, timed
from isoscale.engine.evaluation import Evaluations, call_hook
from isoscale.engine.figures import FigureWriter
from isoscale.engine.lightning.module import is_lightning_module
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.metrics.monitors import BestTracker, EarlyStopping, with_monitors
from isoscale.engine.metrics.windows import Journal
from isoscale.engine.settings import Decisions, Settings
from isoscale.engine.splits import Split, SplitMaker
from isoscale.engine.state.checkpoint import State
from isoscale.engine.state.host_snapshot import Snapshot
from isoscale.engine.state.module_state import HostGenerators
from isoscale.engine.state.progress import LogState, OrderState
from isoscale.engine.state.replicas import verify
from isoscale.engine.state.writer import NOWHERE, Output
from isoscale.engine.step.choice import compilation_explained
from isoscale.engine.step.recompute import differences_explained
from isoscale.engine.step.untrained import check_replaced, refuse_unreached
from isoscale.engine.stopping import Agreement, StopRequest, deadline
from isoscale.engine.task import Task
from isoscale.engine.training_data import adapted
from isoscale.engine.transforms import FittedStates, fitted
from isoscale.errors import Stopped
from isoscale.observe.events import EpochEnded
from isoscale.observe.observers import Observers
from isoscale.parallel.collectives import ALONE, Ranks

LONGEST_UNSAVED = 30
"""Minutes, where the recipe leaves it to us when to save."""
_START_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start")


class Trainer:
    """Trains a task on data, from its present state to the end of the plan."""

    def __init__(
        self, built: Built, settings: Settings, decided: Decisions, observers: Observers, output: Output = NOWHERE,
        profile: bool = False, ranks: Ranks = ALONE, saving: bool | None = None,
    ) -> None:  # fmt: skip
        """With `profile` it is measured where the time goes.

        Where several ranks train together, one of them has the output, and `saving` says to all that it saves.
        """
        self.settings = settings
        self.decided = decided
        self.observers = observers
        self.ranks = ranks
        self.parts = built.parts
        self.train = built.train
        self.val = built.val
        self.has_test = built.has_test
        self.plan = built.plan
        self.progress = built.progress
        self.started = False
        self.rolled_back: list[tuple[int, int]] = []
        """Steps, from the first to before the last, of which those that are not finite are left out."""
        self._built = built
        self._output = output
        self._saving = output.checkpoints is not None if saving is None else saving
        self._saver = output.saver
        self._clock = self._began = time.perf_counter()
        self._said_early = False
        self._verified = 0
        """The step at which the ranks compared their weights."""
        self._saved: State | None = None
        """A checkpoint that waits until the hooks of a start have run."""
        self._unsaved: set[str] = set()
        self._made = dict(self.parts.task.named_parameters())
        """When the optimizers were made."""
        self._parameters = self._made
        """When the first step was taken."""
        self._buffers: set[str] = set()

        step = self.parts.step
        self.profile = Profile(self.parts.accelerator, output.trace, self._saving) if profile else None
        self.parts.program.profile = self.profile
        if step is not None:
            step.forward.mark = self.profile
            if step.overlap is not None:
                step.overlap.profile = self.profile
        self.stop = StopRequest()
        task, view = self.parts.task, self.parts.view
        sees_steps = any(overrides(task, f"on_train_batch_{end}") for end in ("start", "end"))
        self.agreed = Agreement(ranks, self.stop, step, lambda: view.may_end, sees_steps)
        self._hooks_may_end = bool(view.callbacks) or is_lightning_module(task)
        """Whether there are hooks that may ask the training to end."""
        view.before_monitors = self._take_logged
        self.figures = FigureWriter(self.parts, settings.observe, observers, ranks)
        self.evaluations = Evaluations(
            self.parts, self.plan, settings, self.progress, self.agreed, observers, ranks,
            partial(built.new_reducer, dtype=torch.float64), self.figures.wanted,
        )  # fmt: skip
        self.best = BestTracker(settings.checkpoint.monitor, settings.checkpoint.mode)
        self.early_stopping = EarlyStopping(settings.train.early_stopping)
        nan_guard = step.nan_guard if step is not None else None
        self.journal = Journal(self.parts.train_context, observers, nan_guard, self.parts.accelerator)
        self._generators = HostGenerators(settings.seed)
        registry = self.parts.registry
        if fitted(self.parts.transforms):
            registry.register("transforms", FittedStates(self.parts.transforms))
        registry.register("journal", self.journal)
        registry.register("progress", self.progress)
        registry.register("order", OrderState(settings.seed, self.train.plan, self.progress))
        registry.register("random", self._generators)
        registry.register("best", self.best)
        registry.register("patience", self.early_stopping)
        registry.register("log", LogState(output.metric_log))

    @property
    def sources(self) -> dict[str, Source]:
        """The data that is trained and validated on, by split."""
        splits = {"train": self.train, "val": self.val}
        return {name: split.source for name, split in splits.items() if split is not None}

    def restore(self, state: State) -> None:
        """Take over the state of a checkpoint: now, or when the hooks of a start have run, whose doing it overrules."""
        if not any(overrides(self.parts.task, name) for name in _START_HOOKS):
            self.parts.registry.load(*state)
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
            stack.enter_context(self.stop.listening(aloud=self.ranks.is_main))
            self._watch()
            stack.enter_context(self._saver or nullcontext())
            stack.enter_context(rng.use(self.parts.random))
            stack.enter_context(kept_generators())
            self._generators.begin()
            stack.enter_context(self.parts.precision.applied())
            stack.enter_context(self._stream())
            stack.callback(self.release)
            stack.enter_context(self.parts.kernels.explained())
            stack.enter_context(explained(self.parts.accelerator, self.train.plan.batch_size))
            stack.enter_context(compilation_explained())
            if self.settings.train.recompute != "none":
                stack.enter_context(differences_explained())
            stack.push(self._tell_exception)
            self._prepare_training()
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
            self.figures.begin(self.progress.step)
            self._loop()

    def _tell_exception(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Let hooks know of an error; a stop on request is none."""
        if error is not None and not isinstance(error, Stopped):
            call_hook(self.parts.task, "on_exception", error)

    def _resume(self) -> None:
        """What hooks set up, then what was saved: a stop in the middle of an epoch is not to be seen afterwards."""
        if self._saved is None:
            return
        call_hook(self.parts.task, "on_train_start")
        if self.progress.step % self.train.plan.steps_per_epoch:
            call_hook(self.parts.task, "on_train_epoch_start")
        self._check_optimised()
        self.parts.train_context.forget()
        self.parts.registry.load(*self._saved)

    def _prepare_training(self) -> None:
        prepare_training = getattr(self.parts.task, "prepare_training", None)
        if prepare_training is not None:
            prepare_training(self.train.source, self.parts.transforms)

    def _settle(self) -> None:
        """Do to data on the device once what every step would do to it again."""
        step, feed, task = self.parts.step, self.train.feed, self.parts.task
        if step is None or not isinstance(feed, DeviceFeed):
            return
        step.forward.transforms = feed.settle(step.forward.transforms)
        if not step.forward.transforms and isinstance(task, Task) and overrides(task, "precompute"):
            found = self.parts.accelerator
            feed.precompute(task.precompute, found.total_memory // (self.ranks.num_here if found.kind == "cpu" else 1))

    def _loop(self) -> None:
        task, progress, plan = self.parts.task, self.progress, self.plan
        self.started = True
        if self._saved is None:
            call_hook(task, "on_train_start")
        self._saved = None
        self._check_optimised()
        self.parts.train_context.enter()
        self._parameters, self._buffers = dict(task.named_parameters()), checks.buffer_names(task)
        if not progress.step:
            checks.tell_not_optimised(self.parts, self.observers)
            checks.tell_modes(task, self.observers)
        self._clock = self._began = time.perf_counter()
        self.journal.start_clock()
        if self.profile:
            self.profile.start_clock()
        try:
            if progress.step:  # a run that was stopped at a boundary may have left something undone there
                if self._hooks_may_end:
                    self.agreed.agree_to_end()
                self._at_boundary(self._due())
            while progress.step < plan.num_steps and not progress.ended and not self.agreed.stopped:
                if progress.step % self.train.plan.steps_per_epoch == 0:
                    self.parts.reseed(progress.step, 254)
                    call_hook(task, "on_train_epoch_start")
                self._advance(plan.next_boundary(progress.step))
                self._at_boundary(self._due())
        except Interrupted:
            self._stop_here()
        if self.agreed.stopped and progress.step < plan.num_steps and not progress.ended:
            self._stop_here()
        self.journal.check_trained(progress.step)
        checks.check_not_skipped(self.parts, progress.step)
        checks.tell_never_updated(self.parts, progress.step, self.observers)
        self.parts.view.end_training()
        call_hook(task, "on_train_end")
        call_hook(task, "on_fit_end")

    def _due(self) -> Due:
        """What is due after the last step; where hooks have asked training to end, what is due at the end of it.

        An epoch of which a hook has skipped the rest is not evaluated.
        """
        step, plan = self.progress.step, self.plan
        due = plan.due(step)
        if step and self.progress.skipped_to == step:
            due = replace(due, evaluate=False)
        if not self.agreed.ending or not step:
            return due
        epoch = (step - 1) // self.train.plan.steps_per_epoch
        cadence = plan.evaluate
        evaluates = cadence.unit == "step" or (cadence.unit == "epoch" and (epoch + 1) % cadence.count == 0)
        return replace(due, log=True, evaluate=due.evaluate or evaluates, checkpoint=True, end=True)

    def _advance(self, boundary: int) -> None:
        """Train up to a boundary, or to where a trace ends before it."""
        progress, profile = self.progress, self.profile
        began = progress.step
        checks.check_parameters(self._parameters, dict(self.parts.task.named_parameters()))
        if self.parts.step is not None:
            self.parts.step.notice_listeners()
        boundary, guarded = self._guarded(boundary)
        program = self.parts.program
        visibly = self.figures.distributions and self.plan.due(boundary).evaluate
        run = program.run_eagerly if guarded else program.run_visibly if visibly else program.run
        end = profile.end_of_trace(progress.step, boundary, self.plan.num_steps) if profile else None
        with self.parts.kernels.in_steps():
            if profile and end is not None:
                with profile.traced():
                    progress.step = run(progress.step, end, self.agreed)
            if progress.step < boundary and not self.agreed.stopped:
                progress.step = run(progress.step, boundary, self.agreed)
        if self.parts.kernels.is_new and self.ranks.is_main:  # at once: it is not decided alike in every process
            self._output.record(decided=self.decided.as_dict())
        self.parts.kernels.is_new = False
        if profile:
            profile.settle()
        with timed(profile, "logging"):
            self.journal.flush()
        step = self.parts.step
        if (
            step is not None
            and not step.reaches
            and not step.num_skipped
            and began < progress.step != progress.skipped_to
        ):
            refuse_unreached(self.parts.task, self.parts.optimizers)
        if progress.step >= self.plan.num_steps:
            checks.check_parameters(self._parameters, dict(self.parts.task.named_parameters()))

    def _guarded(self, boundary: int) -> tuple[int, bool]:
        """Leave out steps that are not finite where the run has rolled back: up to where, and whether that is here."""
        step = self.progress.step
        guarded = any(first <= step < last for first, last in self.rolled_back)
        if self.rolled_back and self.parts.step is not None:
            self.parts.step.nan_guard.choose("skip" if guarded else "stop")
        edges = [edge for window in self.rolled_back for edge in window if edge > step]
        return min([boundary, *edges]), guarded

    def _stop_here(self) -> None:
        self._save()
        raise Stopped(f"stopped by {self.agreed.reason} at step {self.progress.step} of {self.plan.num_steps}")

    def _at_boundary(self, due: Due) -> None:
        """What is due after a step; each thing once, also when a run is continued here."""
        progress = self.progress
        self.parts.reseed(progress.step, 253)  # for hooks that draw: what they get follows from the step alone
        self.parts.view.between_batches = True
        if self._saver:
            self._saver.check()
        if due.log and progress.logged_at != progress.step:
            with timed(self.profile, "logging"):
                self._log()
        best = False
        is_over = due.evaluate or due.epoch_end or self.agreed.ending
        if is_over and progress.evaluated_at != progress.step:
            with self.journal.excluded(), timed(self.profile, "evaluation"):
                best = self._end_epoch(due)
        progress.ended = progress.ended or self.agreed.ending
        if due.log and self._verification_is_due():
            verify(self.parts.registry, self.ranks, progress.step)
            self._verified = progress.step
        wanted = due.checkpoint or progress.ended or self.agreed.save_due
        never_began = progress.ended and not progress.step
        if best or (wanted and (progress.saved_at != progress.step or never_began)):
            must = due.end or progress.ended or self.agreed.save_due
            with timed(self.profile, "saving"):
                self._save(best, may_wait=not must and self.settings.checkpoint.every == "auto")
        self.agreed.save_due = False
        self.parts.view.between_batches = False

    def _log(self) -> None:
        progress = self.progress
        step = progress.step
        rate = self.parts.configured.rates() if self.parts.configured else {"lr": self.parts.rate(step - 1)}
        moving = {name: weight for name, weight in self.parts.weights.items() if weight.constant is None}
        rate.update({f"loss_weight/{name}": weight(step - 1) for name, weight in moving.items()})
        rate["time/seconds"] = progress.seconds + time.perf_counter() - self._clock
        samples = self.train.plan.samples_before(step)
        self.journal.begin(step, (step - 1) // self.train.plan.steps_per_epoch, samples, rate)
        progress.logged_at = step

    def _end_epoch(self, due: Due) -> bool:
        """Means of the epoch, evaluation, and all who watch them; whether this is the best so far."""
        progress = self.progress
        values = self.evaluations.validate(self.val) if due.evaluate and self.val is not None else {}
        watched, hidden = values if due.steers else {}, self.evaluations.hidden
        epoch = (progress.step - 1) // self.train.plan.steps_per_epoch
        if due.epoch_end or self._is_ending():
            if overrides(self.parts.task, "on_train_epoch_end"):
                self.journal.show_epoch()
                call_hook(self.parts.task, "on_train_epoch_end")
                self._take_logged()
            of_epoch = self.journal.end_epoch(epoch, self.train.plan.steps_per_epoch)
            values, watched = {**of_epoch.values, **values}, {**of_epoch.values, **watched}
            hidden |= of_epoch.hidden
            if self.parts.configured and due.epoch_end:
                is_cut = progress.skipped_to == progress.step
                seen = {**progress.values, **values} if is_cut else values
                self.parts.configured.after_epoch(epoch + 1, seen, is_cut)
        checks.tell_not_finite(values, progress.step, self.observers)
        watched = with_monitors(watched, self.settings)
        stopped_improving = self.early_stopping.watch(watched) and self._has_trained_enough
        progress.ended = self._is_ending() or stopped_improving
        if progress.ended and self.val is not None:
            last = self.evaluations.finish(self.val)
            values, watched = {**values, **last}, with_monitors({**watched, **last}, self.settings)
        best = self.best.watch(watched, progress.step)
        if stopped_improving:
            self.observers.note(f"{self.settings.train.early_stopping.monitor} stopped improving: training ends here")  # type: ignore[union-attr]
        if self.parts.rate.watch(watched):
            self.observers.note(f"the learning rate drops to {self.parts.rate(progress.step):g}")
        progress.values, progress.evaluated_at = {**progress.values, **values}, progress.step
        seconds = self._count_seconds()
        logged = {name: value for name, value in values.items() if name not in hidden}
        logged["time/seconds"] = progress.seconds
        self.observers.notify(EpochEnded(progress.step, epoch, logged, seconds, best))
        if due.evaluate and self.val is not None:
            self.figures.evaluated(progress.step, epoch, self.val, self.evaluations.loss_weights)
        return best

    def _take_logged(self) -> None:
        """Record what the hook at the end of an epoch has logged, and let callbacks find it."""
        self.parts.train_context.flush_together(self.train.plan.batch_size, self.ranks, agree=True)
        self.journal.show_epoch()

    def _is_ending(self) -> bool:
        """Whether hooks of any rank have asked training to end; all ranks ask for it."""
        return self._hooks_may_end and self.agreed.agree_to_end()

    @property
    def _has_trained_enough(self) -> bool:
        """Whether so much is trained that something else than the plan may end it."""
        section, step = self.settings.train, self.progress.step
        return step >= (section.min_steps or 0) and step // self.train.plan.steps_per_epoch >= (section.min_epochs or 0)

    def _check_optimised(self) -> None:
        check_replaced(self.parts.task, self.parts.optimizers, self._made)

    def split(self, data: Any, name: str, limit: Limit) -> Split | None:
        """Another split of the data, shared out among the ranks as the others are."""
        seen = adapted(self.parts.task, data, self._built.preparing, self.ranks, self.observers.note)
        maker = SplitMaker(
            seen, self.settings, self.parts.accelerator, self.ranks, self._built.num_shards, self.decided.first_world,
            self.observers.note, self.parts.task,
        )  # fmt: skip
        return maker.evaluation(name, limit)

    def _watch(self) -> None:
        """The first rank looks at files and clock for all."""
        if self._output.folder is not None:
            cadence = self.plan.checkpoint
            minutes = 60.0 * cadence.count if cadence.unit == "minute" else None
            if self.settings.checkpoint.every == "auto":
                minutes = 60.0 * LONGEST_UNSAVED
            ends = deadline(self.settings.train.stop_after)
            self.stop.watch(self._output.folder, minutes, ends, self._output.check_folder)

    def _verification_is_due(self) -> bool:
        every, step = self.settings.parallel.verify, self.progress.step
        return bool(every) and step // every > self._verified // every

    def _save(self, best: bool = False, may_wait: bool = False) -> None:
        """Save the state; where that may wait and would take too much of the time, keep the best one in memory."""
        if not self._saving:
            return
        began = time.perf_counter()
        is_early = may_wait and self._is_too_early_to_save(began)
        if is_early and not best:
            return
        self.journal.check(self.progress.step)
        self._count_seconds()
        self.progress.saved_at = self.progress.step
        checks.tell_unsaved(self.parts, self._unsaved, self.observers)
        if self.started:
            checks.check_buffers(self._buffers, checks.buffer_names(self.parts.task))
        with self.journal.saving():
            self.observers.flush()
            state = self.parts.registry.together()
            if self._saver is not None and is_early:
                self._saver.keep_best(self.progress.step, state)
            elif self._saver is not None:
                self._saver.save(self.progress.step, state, best)
        self.stop.saved(max(time.perf_counter() - began, self._saver.longest if self._saver else 0.0))

    def _is_too_early_to_save(self, now: float) -> bool:
        """Whether saving would take more than its share of the time; rank 0, which saves, knows it for all."""
        is_early = self._saver is not None and self._saver.is_early(now - self._began)
        is_early = self.ranks.broadcast(is_early, "whether to save now")
        if is_early and not self._said_early:
            self._said_early = True
            self.observers.note("saving after every epoch would take more than 5 % of the time: it is done less often")
        return is_early

    @property
    def last_saved(self) -> tuple[int, Snapshot, bool] | None:
        """Step and state of the last checkpoint of this process, and whether it was the best."""
        return self._saver.newest if self._saver else None

    def _count_seconds(self) -> float:
        """Add the time since the last call to the run's."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self.progress.seconds += seconds
        return seconds

    def _stream(self) -> Any:
        """One stream of its own for all work on a CUDA device: what warms up there can be captured there."""
        return self.parts.accelerator.apart()

    def release(self) -> None:
        """Stop reading ahead, and leave the task as it was."""
        self._built.undo.close()
