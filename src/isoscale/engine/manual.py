"""What the engine still does around the steps of a task that updates its weights itself (manual optimisation)."""

from collections.abc import Callable
from typing import Any

import torch

from isoscale.data.batches import Plan
from isoscale.engine.config import Train
from isoscale.engine.ema import Average
from isoscale.engine.optimizers import set_lr
from isoscale.engine.precision import Precision
from isoscale.engine.recorder import Recorder
from isoscale.engine.schedules import LearningRate
from isoscale.engine.step import loss_terms
from isoscale.errors import UserError


def check(plan: Plan, train: Train, precision: Precision) -> None:
    """Refuse what the engine would have to do inside an update that the task does itself."""
    for wrong, words in (
        (plan.num_micro > 1, "train.accumulate cuts batches: accumulate in training_step"),
        (plan.num_shards > 1, "parallel.reduce=tree cuts batches: use parallel.reduce=flat"),
        (train.clip is not None, "train.clip does not reach its gradients: call self.clip_gradients"),
        (bool(train.loss_weights), "train.loss_weights does not reach its loss: weigh it in training_step"),
        (precision.needs_scaler, "fp16 scales the loss of the engine's own updates: use train.precision=bf16"),
    ):
        if wrong:
            raise UserError(f"the task updates its weights itself (manual optimisation), and {words}")


def before(
    rate: LearningRate | None, optimizers: list[Any], before_fetch: Callable[[int], None]
) -> Callable[[int], None]:
    """Before a step, set the recipe's learning rate, unless the task has optimizers of its own (`rate` is None)."""

    def before_step(step: int) -> None:
        before_fetch(step)
        if rate is not None:
            for optimizer in optimizers:
                set_lr(optimizer, rate(step))

    return before_step


def after(
    recorder: Recorder, plan: Plan, average: Average | None, after_step: Callable[[int], None] | None
) -> Callable[[int, Any], None]:
    """After a step, record the loss that it returned, if any, and average the weights."""

    def told(step: int, output: Any) -> None:
        if isinstance(output, torch.Tensor) or (isinstance(output, dict) and "loss" in output):
            for name, pair in loss_terms(output, plan.size(step - 1)).items():
                recorder.add(name, pair)
        if average is not None:
            average.update()
        if after_step is not None:
            after_step(step)

    return told
