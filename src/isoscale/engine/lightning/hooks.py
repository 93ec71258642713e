"""Hooks of a training step, for the tasks that define them; all others do not pass through here.

The names and their order are those of a LightningModule. In a captured step, hooks between its parts are captured with
it, as the code of the step itself is; those at its start and end are called for every replay.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isoscale.engine.lightning.batch_hooks import AroundBatch
from isoscale.engine.lightning.configured import Configured
from isoscale.engine.lightning.module import is_lightning_module
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.engine.step.step import Step
from isoscale.errors import UserError

_OF_WHOLE_BATCHES = ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward")
ON_HOST = {
    "optimizer_step": "let a scheduler of configure_optimizers set the learning rate",
    "on_before_zero_grad": "on_before_optimizer_step sees the same gradients",
}
"""Hooks that a captured step cannot call, and what it can do instead."""
_OF_UPDATES = ("on_before_zero_grad", "on_before_optimizer_step", "optimizer_step", "configure_gradient_clipping")


def of_updates(task: Any) -> list[str]:
    """The hooks of a task that a training step has to call."""
    return [name for name in (*_OF_WHOLE_BATCHES, *_OF_UPDATES) if overrides(task, name)]


def check(task: Any, num_parts: int, needs_scaler: bool) -> None:
    """Refuse hooks that cannot see what they are for."""
    found = of_updates(task)
    whole = [name for name in found if name in _OF_WHOLE_BATCHES]
    if whole and num_parts > 1:
        raise UserError(
            f"{', '.join(whole)} of {type(task).__name__} sees whole batches, but a batch is computed in {num_parts} "
            "parts: use train.accumulate=1 and parallel.reduce=flat"
        )
    if found and needs_scaler:
        raise UserError(f"{', '.join(found)} would see gradients that fp16 has scaled: use train.precision=bf16")


class HookedStep(Step):
    """A step that calls the hooks of its task."""

    def __post_init__(self) -> None:
        """Find the hooks."""
        super().__post_init__()
        task = self.forward.task
        self._hooks = {name: getattr(task, name) for name in of_updates(task)}
        self._logs_in_update = any(name in self._hooks for name in (*_OF_UPDATES, "on_after_backward"))
        self._old_gradients: list[Tensor | None] | None = None
        self._loss: Tensor | None = None
        self._clip = self.clip
        if "optimizer_step" in self._hooks:
            self._steps = [partial(self.ask, optimizer) for optimizer in self.optimizers]

    def __call__(self, shards: Any, number: int, batch_idx: int, *arguments: Any) -> None:
        """Train on a batch."""
        if "on_before_zero_grad" in self._hooks:
            self._old_gradients = [parameter.grad for parameter in self.parameters]
        self._batch_idx = batch_idx
        super().__call__(shards, number, batch_idx, *arguments)
        if self._logs_in_update:  # here, so that a captured step records it as well
            count = sum(part.samples.shape[0] for shard in shards for part in shard)
            self.forward.context.flush_together(count, self.reducer.ranks)

    def _scaled(self, loss: Tensor) -> Tensor:
        """The loss is known now, the gradients are not yet."""
        self._show_old_gradients()
        if "on_before_backward" in self._hooks:
            self._hooks["on_before_backward"](loss)
        self._loss = loss.detach()
        return loss

    def groups(self, terms: Any, weights: Any) -> list[tuple[Tensor, Any]]:
        """Where several ranks share a batch, the loss of this one's is known now."""
        groups = super().groups(terms, weights)
        self._scaled(torch.stack([total / weight for total, weight in groups]).sum())
        return groups

    def _show_old_gradients(self) -> None:
        """Let `on_before_zero_grad` see the gradients of the last step, which are gone already."""
        if self._old_gradients is None:
            return
        for parameter, gradient in zip(self.parameters, self._old_gradients, strict=True):
            parameter.grad = gradient
        for optimizer in self.optimizers:
            self._hooks["on_before_zero_grad"](optimizer)
        for parameter in self.parameters:
            parameter.grad = None
        self._old_gradients = None

    def _update(self) -> None:
        if "on_after_backward" in self._hooks:
            self._hooks["on_after_backward"]()
        for optimizer in self.optimizers:
            if "on_before_optimizer_step" in self._hooks:
                self._hooks["on_before_optimizer_step"](optimizer)
            if "configure_gradient_clipping" in self._hooks:
                self.clip = None
                algorithm = None if self._clip is None else "norm"
                self._hooks["configure_gradient_clipping"](optimizer, self._clip, algorithm)
        super()._update()

    def notice_listeners(self) -> None:
        """The task's own `optimizer_step` calls the optimizer as it is."""
        if "optimizer_step" not in self._hooks:
            super().notice_listeners()

    def ask(self, optimizer: Optimizer) -> None:
        """Let the task update its weights; the closure that it is given has run already."""
        epoch = getattr(self.forward.task, "current_epoch", 0)
        self._hooks["optimizer_step"](epoch, self._batch_idx, optimizer, lambda: self._loss)


class AfterStep:
    """What follows a finished step: schedulers that count steps, then `on_train_batch_end`."""

    def __init__(
        self, task: Any, view: TrainerView, configured: Configured | None, compute: Any, record: Callable[[int], None]
    ) -> None:
        """`compute` is the task's step method, which knows the batch; `record` takes what the hook has logged."""
        self._view = view
        self._record = record
        self._configured = configured
        self._seen = compute if isinstance(compute, AroundBatch) else None
        self._end = task.on_train_batch_end if overrides(task, "on_train_batch_end") else None

    def __call__(self, step: int) -> None:
        """`step` steps are finished."""
        self.move(step)
        self.end(step)

    def move(self, step: int) -> None:
        """Count the steps, and move the schedulers that do."""
        self._view.finish(step)
        if self._configured is not None:
            self._configured.after_step(step)

    def end(self, step: int) -> None:
        """Call the hook at the end of a batch, whose update is made."""
        if self._end is not None and self._seen is not None:
            self._view.between_batches = True
            self._end(self._seen.output, self._seen.batch, self._seen.batch_idx)
            self._seen.forget()
            self._record(step)
            self._view.between_batches = False


def after_step(
    task: Any, view: TrainerView, configured: Configured | None, compute: Any, record: Callable[[int], None]
) -> AfterStep | None:
    """What is due after each step of a task; None for most tasks."""
    is_plain = configured is None and not is_lightning_module(task) and not view.callbacks
    if is_plain and not overrides(task, "on_train_batch_end"):
        return None
    return AfterStep(task, view, configured, compute, record)


def count_updates(task: Any, view: TrainerView, configured: Configured | None, optimizers: list[Any]) -> None:
    """Follow the updates of manual optimisation: `global_step` counts them, a hook may precede them."""
    for optimizer in optimizers:
        if overrides(task, "on_before_optimizer_step"):
            optimizer.register_step_pre_hook(lambda each, *arguments: task.on_before_optimizer_step(each))
        if configured is not None:
            optimizer.register_step_post_hook(configured.count_update)
    if configured is not None:
        view.updates = lambda: configured.updates
