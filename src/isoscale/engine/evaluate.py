"""Evaluation: every sample exactly once, metrics as (sum, weight) pairs, one read-back in the end."""

from collections.abc import Callable
from typing import Any

import torch

from isoscale.data.batches import BatchPlan
from isoscale.data.residency import Feed
from isoscale.engine.losses import as_pair
from isoscale.engine.pairs import Pair
from isoscale.engine.recorder import means
from isoscale.engine.step import Forward


class Interrupted(Exception):
    """A stop was asked for in the middle of an evaluation, which will be done again."""


@torch.no_grad()
def evaluate(
    forward: Forward, feed: Feed, plan: BatchPlan, interrupted: Callable[[], bool] = lambda: False
) -> dict[str, float]:
    """The means of the losses and metrics of a stage over its data."""
    stage, task = forward.stage, forward.task
    mode = task.training
    stage.enter()
    stage.recorder.reset()
    call_hook(task, _HOOKS[stage.name][0])
    for batch_idx in range(plan.steps_per_epoch):
        if interrupted():
            task.train(mode)
            raise Interrupted
        for part in (part for shard in feed.parts(batch_idx) for part in shard):
            _record_loss(forward, forward(part, batch_idx), len(part.samples))
    call_hook(task, _HOOKS[stage.name][1])
    stage.flush(plan.num_samples)
    values = means(stage.recorder.read().pairs())
    values.update(stage.take_metrics())
    task.train(mode)
    return {stage.full_name(name): value for name, value in values.items()}


_HOOKS = {
    "val": ("on_validation_epoch_start", "on_validation_epoch_end"),
    "test": ("on_test_epoch_start", "on_test_epoch_end"),
}


def call_hook(task: Any, name: str) -> None:
    """Call a method of the task if it has one."""
    hook = getattr(task, name, None)
    if hook is not None:
        hook()


def _record_loss(forward: Forward, output: Any, count: int) -> None:
    """Record what an evaluation step returned, if it is a loss: a pair, one number, or a dict of our own terms."""
    recorder = forward.stage.recorder
    if isinstance(output, Pair) or (isinstance(output, torch.Tensor) and output.numel() == 1):
        recorder.add("loss", as_pair(output, count))
    elif isinstance(output, dict) and output and all(isinstance(term, Pair) for term in output.values()):
        for name, term in output.items():
            recorder.add(name, term)


@torch.no_grad()
def predict(forward: Forward, feed: Feed, plan: BatchPlan) -> Any:
    """The predictions of every sample, in the order of the source, on the host."""
    forward.stage.enter()
    outputs = []
    for batch_idx in range(plan.steps_per_epoch):
        for part in (part for shard in feed.parts(batch_idx) for part in shard):
            outputs.append(_to_host(forward(part, batch_idx)))
    return _joined(outputs)


def _to_host(output: Any) -> Any:
    if isinstance(output, dict):
        return {name: value.cpu() for name, value in output.items()}
    return output.cpu()


def _joined(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], dict):
        return {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}
    return torch.cat(outputs)
