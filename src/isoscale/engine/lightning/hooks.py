"""Hooks of a training step, for the tasks that define them; all others do not pass through here.

The names and their order are those of a LightningModule. In a captured step, hooks between its parts are captured with
it, as the code of the step itself is; those at its start and end are called for every replay.
"""

from collections.abc import Callable, Sequence
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

_OF_WHOLE_BATCHES = (
    "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward", "backward"
)  # fmt: skip
ON_HOST = {
    "optimizer_step": "let a scheduler of configure_optimizers set the learning rate",
    "optimizer_zero_grad": "gradients are let go of before every step without it",
    "on_before_zero_grad": "on_before_optimizer_step sees the same gradients",
}
"""Hooks that a captured step cannot call, and what it can do instead."""
_OF_UPDATES = (*ON_HOST, "on_before_optimizer_step", "configure_gradient_clipping")


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
        self.hooks = {name: getattr(task, name) for name in of_updates(task)}
        self._logs_in_update = any(name in self.hooks for name in (*_OF_UPDATES, "on_after_backward"))
        self._clip_by_recipe = self.clip
        if "configure_gradient_clipping" in self.hooks:
            self.clip = None

    def __call__(self, shards: Any, number: int, batch_idx: int, *arguments: Any) -> None:
        """Train on a batch."""
        super().__call__(shards, number, batch_idx, *arguments)
        if self._logs_in_update:  # here, so that a captured step records it as well
            count = sum(part.samples.shape[0] for shard in shards for part in shard)
            self.forward.context.flush_together(count, self.reducer.ranks)

    def _differentiate(self, loss: Tensor) -> None:
        """The loss is known now, the gradients are not yet."""
        self._before_backward(loss)
        if "backward" in self.hooks:
            self.hooks["backward"](loss)
        else:
            super()._differentiate(loss)
        self._after_backward()

    def _overlapped(self, *arguments: Any) -> None:
        if "backward" in self.hooks:
            raise UserError(
                "parallel.reduce=overlap adds up gradients while they are computed, which backward of "
                f"{type(self.forward.task).__name__} may do in any way: use parallel.reduce=flat"
            )
        super()._overlapped(*arguments)
        self._after_backward()

    def groups(self, terms: Any, weights: Any) -> list[tuple[Tensor, Any]]:
        """Where several ranks share a batch, the loss of this one's is known now."""
        groups = super().groups(terms, weights)
        if "backward" in self.hooks and len(groups) > 1:
            raise UserError(
                f"backward of {type(self.forward.task).__name__} is given one loss, but its terms ({', '.join(terms)}) "
                "have weights of their own, which several ranks must add up first: return their weighted sum instead"
            )
        self._before_backward(torch.stack([total / weight for total, weight in groups]).sum())
        return groups

    def gradients_of(
        self, total: Tensor, weight: Any, parameters: Sequence[Tensor], retain_graph: bool
    ) -> Sequence[Tensor | None]:
        """What the task's own `backward` makes of the loss of this rank, which counts by its share of the batch."""
        if "backward" not in self.hooks:
            return super().gradients_of(total, weight, parameters, retain_graph)
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.hooks["backward"](total / weight)
        found = [None if parameter.grad is None else parameter.grad * weight for parameter in parameters]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        return found

    def _take(self, *arguments: Any) -> None:
        super()._take(*arguments)
        self._after_backward()

    def _before_backward(self, loss: Tensor) -> None:
        if "on_before_backward" in self.hooks:
            self.hooks["on_before_backward"](loss)

    def _after_backward(self) -> None:
        if "on_after_backward" in self.hooks:
            self.hooks["on_after_backward"]()

    def _update(self) -> None:
        for optimizer in self.optimizers:
            self._before_update(optimizer)
        super()._update()

    def _before_update(self, optimizer: Optimizer) -> None:
        """Let the task see, and clip, the gradients that an optimizer is about to use."""
        if "on_before_optimizer_step" in self.hooks:
            self.hooks["on_before_optimizer_step"](optimizer)
        if "configure_gradient_clipping" in self.hooks:
            algorithm = None if self._clip_by_recipe is None else "norm"
            self.hooks["configure_gradient_clipping"](optimizer, self._clip_by_recipe, algorithm)


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


def count_updates(
    task: Any, view: TrainerView, configured: Configured | None, optimizers: list[Any],
    average: Callable[[Optimizer], None],
) -> None:  # fmt: skip
    """Follow the updates of manual optimisation: `global_step` counts them, a hook may precede them.

    The hook sees the gradients of all ranks, which `average` gives to an optimizer.
    """

    def before(optimizer: Optimizer) -> None:
        average(optimizer)
        task.on_before_optimizer_step(optimizer)

    has_hook, is_module = overrides(task, "on_before_optimizer_step"), is_lightning_module(task)
    if has_hook and is_module:
        view.before_update = before
    for optimizer in optimizers:
        if has_hook and not is_module:
            optimizer.register_step_pre_hook(lambda each, *arguments: task.on_before_optimizer_step(each))
        if configured is not None:
            optimizer.register_step_post_hook(configured.note_update)
    if configured is not None:
        view.after_update = configured.count_update
        view.updates = lambda: configured.updates
