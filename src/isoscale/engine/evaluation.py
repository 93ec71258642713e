"""Evaluation: every sample exactly once, metrics as (sum, weight) pairs, one read-back in the end."""

from collections.abc import Callable
from typing import Any

import torch

from isoscale.data import rng
from isoscale.data.batches import Plan
from isoscale.data.feeds.feed import Feed
from isoscale.engine.lightning.module import is_lightning_module, remember
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.metrics.accumulators import means
from isoscale.engine.metrics.together import add_up, agreed_values
from isoscale.engine.metrics.torchmetrics import keep
from isoscale.engine.metrics.weighted_sum import WeightedSum
from isoscale.engine.splits import Split
from isoscale.engine.state.module_state import ModuleSnapshot
from isoscale.engine.step.step import Forward, loss_terms
from isoscale.errors import UserError
from isoscale.observe.figures import Figure
from isoscale.parallel.collectives import ALONE, Ranks
from isoscale.parallel.reduction import Reducer


class Interrupted(Exception):
    """A stop was asked for in the middle of an evaluation, which will be done again."""


@torch.no_grad()
@rng.use(None)  # nothing is random in an evaluation: augmentation leaves its samples alone
def evaluate(
    forward: Forward, feed: Feed, plan: Plan, interrupted: Callable[[], bool] = lambda: False,
    reducer: Reducer | None = None,
) -> dict[str, float]:  # fmt: skip
    """The means of the losses and metrics of a stage over its data, which ranks share out where there are several.

    A reducer adds what they, or the shards of a batch, have recorded.
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
        is_sealed = any(overrides(task, name) for name in hooks)
        for batch_idx in range(plan.steps_per_epoch):
            if not is_sealed and interrupted():
                go_back()
                before.restore(task)
                raise Interrupted
            for shard, parts in enumerate(feed.parts(batch_idx)):
                if parts and reducer is not None:
                    shards[shard] = context.recorder.begin_shard(shards.get(shard))
                for part in parts:
                    terms |= _record_loss(forward, forward(part, batch_idx), part.samples.shape[0])
        call_hook(task, f"on_{_NAMES[context.name]}_epoch_end")
        context.flush(plan.num_samples)
        if reducer is not None:
            terms = add_up(context, shards, terms, reducer)
        found = context.recorder.shown(means(context.recorder.read().pairs()))
        found.update(context.take_metrics())
        if terms and "loss" not in found:
            found["loss"] = sum(forward.loss_weights.get(name, 1.0) * found[name] for name in sorted(terms))
        values = {context.full_name(name): value for name, value in found.items()}
        if reducer is not None:
            values = agreed_values(values, bool(shards), reducer.ranks)
        remember(task, values)
        call_hook(task, f"on_{_NAMES[context.name]}_end")
    return values


_NAMES = {"val": "validation", "test": "test", "predict": "predict"}


def begin(task: Any, stage: str) -> None:
    """Call what a task does at the start of a stage and of its one epoch."""
    call_hook(task, f"on_{_NAMES[stage]}_start")
    call_hook(task, f"on_{_NAMES[stage]}_epoch_start")


def call_hook(task: Any, name: str) -> None:
    """Call a method of the task if it has one."""
    hook = getattr(task, name, None)
    if hook is not None:
        hook()


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
    """The predictions of every sample, in the order of the source, on the host; those of all ranks together."""
    forward.context.enter()
    begin(forward.task, "predict")
    outputs = []
    for batch_idx in range(plan.steps_per_epoch):
        parts = (part for shard in feed.parts(batch_idx) for part in shard)
        outputs.append([_to_host(forward(part, batch_idx)) for part in parts])
    call_hook(forward.task, "on_predict_epoch_end")
    call_hook(forward.task, "on_predict_end")
    forward.context.leave()
    of_ranks = ranks.all_gather(outputs, "the predictions of all ranks")
    return _joined([output for batch in zip(*of_ranks, strict=True) for of_rank in batch for output in of_rank])


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
