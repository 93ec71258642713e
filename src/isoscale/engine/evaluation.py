"""Evaluation: every sample exactly once, metrics as (sum, weight) pairs, one read-back in the end."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from isoscale.data import rng
from isoscale.data.batches import Plan, map_tensors
from isoscale.data.combined import CombinedPlan
from isoscale.data.feeds.feed import Feed, Part
from isoscale.data.sources import is_vectorised
from isoscale.engine.assembly import Assembly
from isoscale.engine.boundaries import Planner
from isoscale.engine.dataset_metrics import Asked, EvaluatedDataset, Interrupted, Occasion, evaluates_dataset, never
from isoscale.engine.lightning.batch_hooks import AroundBatch
from isoscale.engine.lightning.module import is_lightning_module
from isoscale.engine.lightning.overrides import of_callbacks, overrides
from isoscale.engine.lightning.trainer_metrics import Shown
from isoscale.engine.metrics import torchmetrics as metrics
from isoscale.engine.metrics.accumulators import Recorded
from isoscale.engine.metrics.monitors import check_monitors, check_without_evaluation
from isoscale.engine.metrics.torchmetrics import keep
from isoscale.engine.metrics.weighted_sum import Tally, WeightedSum
from isoscale.engine.settings import Settings
from isoscale.engine.splits import Split, limited
from isoscale.engine.state.module_state import ModuleSnapshot
from isoscale.engine.state.progress import Progress
from isoscale.engine.step.context import OfEpoch, StepContext
from isoscale.engine.step.cuda_graph import GraphedProgram
from isoscale.engine.step.graphed_evaluation import GraphedEvaluation
from isoscale.engine.step.step import Forward, loss_terms
from isoscale.engine.stopping import Agreement
from isoscale.errors import UserError
from isoscale.observe.events import FiguresMade, Logged
from isoscale.observe.figures import Figure
from isoscale.observe.observers import Observers
from isoscale.parallel.collectives import ALONE, Ranks
from isoscale.parallel.reduction import Reducer


@torch.no_grad()
@rng.use(None)  # nothing is random in an evaluation: augmentation leaves its samples alone
def evaluate(
    forward: Forward, feed: Feed, plan: Plan, interrupted: Callable[[], bool] = lambda: False,
    reducer: Reducer | None = None, graphed: GraphedEvaluation | None = None,
) -> dict[str, float]:  # fmt: skip
    """The means of the losses and metrics of a stage over its data, which ranks share out where there are several.

    A reducer adds what they, or the shards of a batch, have recorded. `graphed` replays batches where it can.
    """
    context, task = forward.context, forward.task
    if interrupted():
        raise Interrupted
    shards: dict[int, torch.Tensor] = {}
    before, go_back = ModuleSnapshot(task, copies=True), keep(task)
    with context.entered():
        context.recorder.reset()
        terms: set[str] = set()
        begin(task, context.name)
        # what a hook does at the start (swap weights, say), only that of the end takes back: then it is seen through
        hooks = [f"on_{_NAMES[context.name]}_{moment}" for moment in ("start", "epoch_start")]
        # and what callbacks keep of batches nobody takes back
        beside = [f"on_{_NAMES[context.name]}_batch_{end}" for end in ("start", "end")]
        is_sealed = any(overrides(task, name) for name in hooks) or any(of_callbacks(task, name) for name in beside)
        if graphed is not None:
            graphed.begin()
        for step in range(plan.steps_per_epoch):
            batch_idx = context.begin_batch(plan, step)
            if not is_sealed and interrupted():
                go_back()
                before.restore(task)
                raise Interrupted
            if graphed is not None:
                terms |= graphed(batch_idx)
                continue
            for shard, parts in enumerate(feed.parts(step)):
                if parts and reducer is not None:
                    shards[shard] = context.recorder.begin_shard(shards.get(shard))
                terms |= _compute(forward, parts, batch_idx)
        context.end_batches()
        if graphed is not None:
            graphed.end()
        if reducer is not None:
            terms = add_up(context, shards, terms, reducer)
        ranks = reducer.ranks if reducer is not None else ALONE
        end = f"on_{_NAMES[context.name]}_epoch_end"
        if is_lightning_module(task):
            _show(context, bool(shards), ranks)
        call_hook(task, end)
        if ranks.alone or is_lightning_module(task) or overrides(task, end):
            context.flush_together(plan.num_samples, ranks, agree=True)
        tallies = {context.full_name(name): value for name, value in context.take_tallies().items()}
        found = _show(context, bool(shards), ranks, tallies)
        context.reset_metrics()
        values, loss = found.values, context.full_name("loss")
        if terms and loss not in values:
            weights = {name: forward.loss_weights.get(name, 1.0) for name in sorted(terms)}
            # a term that weighs nothing adds nothing, also where it is not finite
            values[loss] = sum(weight * values[context.full_name(name)] for name, weight in weights.items() if weight)
        context.hidden = found.hidden
        call_hook(task, f"on_{_NAMES[context.name]}_end")
    return values


def _show(context: StepContext, recorded: bool, ranks: Ranks, tallies: Mapping[str, float] = {}) -> OfEpoch:
    """The values of an evaluation so far, on all ranks, where those who look at what was logged find them."""
    found = context.of_epoch(context.recorder.read().pairs())
    found.values.update(tallies)
    if not ranks.alone:
        mine = (found.values, sorted(found.hidden), vars(found.shown)) if recorded else None
        every = ranks.all_gather(mine, "the values of an evaluation")
        values, hidden, shown = next((each for each in every if each is not None), mine or ({}, [], {}))
        found = OfEpoch(dict(values), set(hidden), Shown(**shown))
    context.shown.update(found.shown)
    if context.name == "val":
        context.shown.validated |= found.shown.callback.keys()
    return found


_NAMES = {"val": "validation", "test": "test", "predict": "predict"}


def begin(task: Any, stage: str) -> None:
    """Call what a task does at the start of a stage and of its one epoch."""
    call_hook(task, f"on_{_NAMES[stage]}_start")
    call_hook(task, f"on_{_NAMES[stage]}_epoch_start")


def call_hook(task: Any, name: str, *arguments: Any) -> None:
    """Call a method of the task if it has one."""
    hook = getattr(task, name, None)
    if hook is not None:
        hook(*arguments)


def _compute(forward: Forward, parts: Iterable[Part], batch_idx: int) -> set[str]:
    """Run the step of a stage on parts of a batch, and record its loss; returns the terms of it."""
    terms: set[str] = set()
    for part in parts:
        terms |= _record_loss(forward, forward(part, batch_idx), part.samples.shape[0])
    return terms


def _record_loss(forward: Forward, output: Any, count: int) -> set[str]:
    """Record what an evaluation step returned, if it is a loss: one number, a pair, or a dict of terms.

    A LightningModule logs its losses itself, and may return a dict of anything.
    """
    ignored = isinstance(output, dict) and is_lightning_module(forward.task)
    if ignored or not isinstance(output, WeightedSum | torch.Tensor | dict):
        return set()
    if isinstance(output, torch.Tensor) and output.numel() != 1:
        return set()
    terms = loss_terms(output, count)
    for name, pair in terms.items():
        forward.context.recorder.add(name, pair)
    return set(terms)


@torch.no_grad()
@rng.use(None)
def predict(forward: Forward, feed: Feed, plan: Plan, ranks: Ranks = ALONE) -> Any:
    """The predictions of every sample, in the order of the source, on the host; those of all ranks together.

    Where several loaders come one after the other, a list of what each of them gives.
    """
    outputs = [[_to_host(output) for output in batch] for batch in _predicted(forward, feed, plan)]
    of_ranks = ranks.all_gather(outputs, "the predictions of all ranks")
    of_steps = [[output for of_rank in batch for output in of_rank] for batch in zip(*of_ranks, strict=True)]
    if not isinstance(plan, CombinedPlan):
        return _joined([output for outputs in of_steps for output in outputs])
    return [
        _joined([output for step, outputs in enumerate(of_steps) if plan.loader(step) == number for output in outputs])
        for number in range(len(plan.plans))
    ]


@torch.no_grad()
@rng.use(None)
def predict_batches(forward: Forward, feed: Feed, plan: Plan) -> list[Any]:
    """What `predict_step` returns for each batch, whatever it is; its tensors on the host.

    Where several loaders come one after the other, a list for each of them.
    """
    found = [[map_tensors(output, Tensor.cpu) for output in batch] for batch in _predicted(forward, feed, plan)]
    if not isinstance(plan, CombinedPlan):
        return [output for outputs in found for output in outputs]
    return [
        [output for step, outputs in enumerate(found) if plan.loader(step) == number for output in outputs]
        for number in range(len(plan.plans))
    ]


def _predicted(forward: Forward, feed: Feed, plan: Plan) -> Iterator[list[Any]]:
    """What the parts of each batch are predicted to be."""
    if isinstance(plan, CombinedPlan) and plan.mode != "sequential":
        raise UserError(f"predictions are made of loaders one after the other, not {plan.mode}: use mode='sequential'")
    forward.context.enter()
    begin(forward.task, "predict")
    for step in range(plan.steps_per_epoch):
        batch_idx = forward.context.begin_batch(plan, step)
        yield [forward(part, batch_idx) for shard in feed.parts(step) for part in shard]
    forward.context.end_batches()
    call_hook(forward.task, "on_predict_epoch_end")
    call_hook(forward.task, "on_predict_end")
    forward.context.leave()


def show_results(forward: Forward, split: Split, ranks: Ranks = ALONE) -> dict[str, Figure]:
    """What the task shows of its predictions; nothing where it has nothing to show, at no cost."""
    if not overrides(forward.task, "show_results"):
        return {}
    outputs = predict(forward, split.feed, split.plan, ranks)
    if not isinstance(outputs, dict):
        outputs = {"prediction": forward.context.units.stored(outputs)}
    return dict(forward.task.show_results(split.source, outputs))


def _to_host(output: Any) -> Any:
    if isinstance(output, dict):
        return {name: _to_host(value) for name, value in output.items()}
    if not isinstance(output, torch.Tensor) or not output.dim():
        found = "one number" if isinstance(output, torch.Tensor) else type(output).__name__
        raise UserError(f"predict_step returned {found}; it must return a tensor or a dict of them, one row per sample")
    return output.cpu()


def _joined(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], dict):
        return {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}
    return torch.cat(outputs)


@dataclass
class Kept:
    """What a rank has recorded: by what name, and where."""

    recorded: Recorded
    terms: list[str]
    metrics: dict[str, str] = field(default_factory=dict)
    tallies: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)

    def as_tuple(self) -> tuple[Any, ...]:
        """In plain values, for other ranks."""
        return tuple(self.recorded), self.terms, self.metrics, self.tallies

    @classmethod
    def read(cls, recorded: tuple[Any, ...], *others: Any) -> "Kept":
        """As another rank told it."""
        return cls(Recorded(*recorded), *others)


def add_up(context: StepContext, shards: Mapping[int, Tensor], terms: set[str], reducer: Reducer) -> set[str]:
    """Add what the shards of all ranks recorded; returns the terms of the loss. Each sum is made once, at the end."""
    recorder, ranks = context.recorder, reducer.ranks
    mine = Kept(
        recorder.recorded, sorted(terms), metrics.paths(context.task, context.metrics), _shapes(context.tallies)
    )
    every = [Kept.read(*each) for each in ranks.all_gather(mine.as_tuple(), "what was evaluated")]
    known = next((kept for kept in every if kept.recorded.names or kept.tallies), mine)
    recorder.agree([kept.recorded for kept in every], shards.values())
    for shard in sorted(shards):
        reducer.add(shard, [shards[shard]])
    recorder.end_shards(reducer.total(lambda: [recorder.fresh()])[0])
    for name, path in known.metrics.items():  # torchmetrics add up themselves, if every rank asks them to
        context.metrics.setdefault(name, context.task.get_submodule(path))
    _add_tallies(context, known.tallies, ranks)
    return set(known.terms)


def _shapes(tallies: Mapping[str, Tally]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tally.counts.shape, tally.counts.dtype) for name, tally in tallies.items()}


def _add_tallies(context: StepContext, known: Mapping[str, tuple[torch.Size, torch.dtype]], ranks: Ranks) -> None:
    for name, (shape, dtype) in known.items() if not ranks.alone else ():
        own = context.tallies.get(name)
        counts = own.counts.clone() if own else torch.zeros(shape, dtype=dtype, device=context.recorder.buffer.device)
        ranks.all_reduce(counts, "the counts of an evaluation")
        if own:
            context.tallies[name] = Tally(counts, own.finish)


@dataclass
class Evaluations:
    """Measures the weights of a training as they are at the step that it has reached."""

    parts: Assembly
    plan: Planner
    settings: Settings
    progress: Progress
    agreed: Agreement
    observers: Observers
    ranks: Ranks
    make_reducer: Callable[[], Reducer]
    shows: bool
    """Whether anybody looks at more than numbers."""

    def __post_init__(self) -> None:
        """What the task measures of all data together is measured besides."""
        self._graphed: GraphedEvaluation | None = None
        self.hidden: set[str] = set()
        """Names that the last evaluation keeps from loggers."""
        self._whole = DatasetEvaluator(self.parts, self.plan, self.observers, self._reducer_of, self.shows)

    @property
    def loss_weights(self) -> dict[str, float]:
        """The weights of named loss terms at the present step."""
        last = max(0, self.progress.step - 1)
        return {name: weight(last) for name, weight in self.parts.weights.items()}

    def validate(self, split: Split) -> dict[str, float]:
        """The values of the present weights, or of their averages; broken off where a stop is asked for."""
        zero_grad = getattr(self.parts.task, "on_validation_model_zero_grad", None)
        if zero_grad is not None:  # as under Lightning: gradients that no update has used are gone then
            zero_grad()
        with self.parts.ema.swapped_in() if self.parts.ema else nullcontext():
            self.agreed.begin_evaluation()
            values = self.measure("val", split, self.agreed.in_evaluation, again=True)
        self.parts.train_context.enter()
        return values

    def measure(
        self, stage: str, split: Split, interrupted: Callable[[], bool] = lambda: False, again: bool = False
    ) -> dict[str, float]:
        """The values of the present weights on a split's data; what is measured `again` and again may be captured."""
        values = self._means(stage, split, interrupted, again)
        return {**values, **self._whole.after(stage, split, self.progress.step, interrupted)}

    def finish(self, split: Split) -> dict[str, float]:
        """What the task measures where training ends before its plan does."""
        values = self._whole.last(split, self.progress.step)
        self.parts.train_context.enter()
        return values

    def begin(self, split: Split | None) -> None:
        """What the task measures before its first step."""
        values = self._whole.before(split) if split is not None and not self.progress.step else {}
        self.parts.train_context.enter()
        if values:
            self.progress.values = values
            self.observers.notify(Logged(0, 0, values))

    def rehearse(self, split: Split | None) -> None:
        """Evaluate one batch before training: a mistake in it shows now, and the monitored metric must be there."""
        if self.progress.step:
            return
        if split is None or self.plan.evaluate.unit == "never":
            check_without_evaluation(self.settings)
            return
        rehearsed = replace(split, plan=limited(split.plan, 1))
        self.parts.view.sanity_checking = True
        call_hook(self.parts.task, "on_sanity_check_start")
        values = {**self._means("val", rehearsed), **self._whole.rehearse(rehearsed)}
        call_hook(self.parts.task, "on_sanity_check_end")
        self.parts.view.sanity_checking = False
        self.parts.train_context.enter()
        self.parts.train_context.shown.forget()
        check_monitors(self.settings, [*values, "train/loss_epoch"], self.observers.note)

    def _means(
        self, stage: str, split: Split, interrupted: Callable[[], bool] = lambda: False, again: bool = False
    ) -> dict[str, float]:
        reducer, forward = self._reducer_of(split), self.parts.forward(stage, self.loss_weights)
        program = self.parts.program
        is_plain = not isinstance(split.plan, CombinedPlan) and not isinstance(forward.compute, AroundBatch)
        can_capture = reducer is None and is_vectorised(split.source) and is_plain
        if self._graphed is None and again and can_capture and isinstance(program, GraphedProgram):
            self._graphed = GraphedEvaluation(
                forward, split, self.parts.accelerator, program.view, lambda: program.pool,
                lambda shards, batch_idx: _compute(forward, (part for each in shards for part in each), batch_idx),
            )  # fmt: skip
        graphed = self._graphed if again else None
        if graphed is not None:
            forward, reducer = graphed.forward, None
            forward.loss_weights = self.loss_weights
        values = evaluate(forward, split.feed, split.plan, interrupted, reducer, graphed)
        self.hidden = forward.context.hidden
        return values

    def _reducer_of(self, split: Split) -> Reducer | None:
        whole = self.ranks.alone and split.plan.num_shards == 1
        return None if whole else self.make_reducer()


class DatasetEvaluator:
    """Makes the surveys of a training: knows which is the first and the last, and hands on what is shown."""

    def __init__(
        self, parts: Assembly, plan: Planner, observers: Observers, reducer_of: Callable[[Split], Reducer | None],
        shows: bool,
    ) -> None:  # fmt: skip
        """`shows` says whether anybody looks at figures."""
        self._parts, self._plan, self._observers, self._reducer_of, self._shows = (
            parts, plan, observers, reducer_of, shows,
        )  # fmt: skip

    def before(self, split: Split) -> dict[str, float]:
        """What the task measures before its first step."""
        return self._measure("val", split, 0, self._occasion("val", 0))

    def rehearse(self, split: Split) -> dict[str, float]:
        """On a few samples, all names that the task will measure."""
        return self._measure("val", split, 0, Occasion(is_last=False, is_rehearsal=True, is_full=False, shows=False))

    def after(self, stage: str, split: Split, step: int, interrupted: Asked = never) -> dict[str, float]:
        """What the task measures after an evaluation."""
        return self._measure(stage, split, step, self._occasion(stage, step), interrupted)

    def last(self, split: Split, step: int) -> dict[str, float]:
        """What the task measures where training ends before its plan does; by the averaged weights if there are any."""
        average = self._parts.ema
        with average.swapped_in() if average else nullcontext():
            return self._measure("val", split, step, self._occasion("val", step, is_last=True))

    def _occasion(self, stage: str, step: int, is_last: bool = False) -> Occasion:
        apart = stage != "val"
        is_last = is_last or apart or step >= self._plan.num_steps
        return Occasion(
            self._epoch(step), self._epoch(self._step_before(step)), step == 0, is_last, is_full=apart,
            shows=self._shows,
        )  # fmt: skip

    def _epoch(self, step: int) -> int:
        return step // self._plan.batches.steps_per_epoch

    def _step_before(self, step: int) -> int:
        """Of the evaluation before."""
        cadence, per_epoch, last = self._plan.evaluate, self._plan.batches.steps_per_epoch, max(0, step - 1)
        every = int(cadence.count * (per_epoch if cadence.unit == "epoch" else 1))
        began = last - last % per_epoch if cadence.of_epoch else 0
        return began + (last - began) // every * every

    def _measure(
        self, stage: str, split: Split, step: int, occasion: Occasion, interrupted: Asked = never
    ) -> dict[str, float]:
        if not evaluates_dataset(self._parts.task):
            return {}
        dataset = EvaluatedDataset(
            stage, self._warn, self._parts.forward("predict", {}), split, occasion, lambda: self._reducer_of(split),
            interrupted,
        )  # fmt: skip
        values = dataset.metrics()
        if dataset.figures:
            self._observers.notify(FiguresMade(step, self._epoch(max(0, step - 1)), dataset.shown()))
        return values

    def _warn(self, text: str) -> None:
        self._observers.note(text, "warning")
