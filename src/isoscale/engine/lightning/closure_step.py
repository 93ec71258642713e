"""A training step that the optimizer drives: it calls loss and gradients (a closure) as often as it needs them.

LBFGS and optimizers such as SAM do so, and a task with `optimizer_step`, `optimizer_zero_grad` or
`on_before_zero_grad` of its own is given the same closure as under Lightning. Every evaluation costs a forward and a
backward pass, and with several ranks a reduction. The host decides, so that none of it is captured.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isoscale.engine.lightning.hooks import ON_HOST, HookedStep
from isoscale.engine.lightning.optimizers import needs_closure
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.engine.step.step import Shards
from isoscale.engine.step.untrained import optimised
from isoscale.errors import UserError


def why_closure(task: Any, optimizers: list[Any]) -> str | None:
    """Why the optimizer has to drive the step, if so."""
    names = [name for name in ON_HOST if overrides(task, name)]
    if names:
        return f"the task's hook {names[0]} runs on the host: {ON_HOST[names[0]]}"
    classes = [type(each).__name__ for each in optimizers if needs_closure(each)]
    return f"{classes[0]} evaluates the loss several times in one step, as the host decides" if classes else None


class ClosureStep(HookedStep):
    """A step in which the optimizer calls a closure: zero gradients, loss, gradients."""

    def __post_init__(self) -> None:
        """Nothing is computed so far."""
        super().__post_init__()
        self._closed: Tensor | None = None
        """The loss that the closure has computed."""
        self._is_zeroed = self._has_run = False
        self._batch_idx = 0
        self._view: Any = None

    def drive(self, view: TrainerView) -> None:
        """Let `view`, which wraps the optimizers for the task, ask this step what precedes an update."""
        task, self._view = self.forward.task, view
        view.before_update = self._before_update
        several = [type(each).__name__ for each in self.optimizers if needs_closure(each)]
        if several and (self.scaler is not None or self.nan_guard.policy != "stop"):
            what = "fp16 scales the loss of one" if self.scaler is not None else "train.nan looks at one"
            raise UserError(
                f"{several[0]} of {type(task).__name__} evaluates the loss several times in a step, and {what}: use "
                "train.precision=bf16 and train.nan=stop"
            )

    def __call__(
        self, shards: Shards, number: int, batch_idx: int, lr: Any, weights: Mapping[str, Tensor], time: Any
    ) -> None:
        """Train on a batch."""
        if self.overlap is not None:
            raise UserError(
                "parallel.reduce=overlap adds up gradients while they are computed, once in a step; this task's "
                "optimizer computes them when it likes (a closure): use parallel.reduce=flat"
            )
        self._begin(number, lr, time)
        self._batch_idx, self._has_run = batch_idx, False
        guarded = self.nan_guard.policy != "stop"
        if guarded:
            floating = [buffer for buffer in self.forward.task.buffers() if buffer.is_floating_point()]
            self.nan_guard.begin(floating, self.average.tensors if self.average else ())

        @torch.enable_grad()
        def closure() -> Tensor | None:
            self._has_run, self._is_zeroed, self._closed = True, False, None
            self._compute(shards, number, batch_idx, weights)
            self._zero()  # where there was nothing to differentiate
            return self._closed

        for place, optimizer in enumerate(
            self._view.wrap(self.optimizers)
        ):  # several only where the recipe's one is made of two
            compute = closure if place == 0 else (lambda: self._closed)
            if "optimizer_step" in self.hooks:
                self.hooks["optimizer_step"](self._view.current_epoch, batch_idx, optimizer, compute)
            else:
                optimizer.step(closure=compute)
        if not self._has_run:
            raise UserError(
                f"optimizer_step of {type(self.forward.task).__name__} never called its closure, which computes loss "
                "and gradients: call optimizer.step(closure=optimizer_closure), or optimizer_closure()"
            )
        if self.average is not None:
            self.average.update()
        if guarded:
            self.nan_guard.end()
        if self._logs_in_update:
            count = sum(part.samples.shape[0] for shard in shards for part in shard)
            self.forward.context.flush_together(count, self.reducer.ranks)
        self.mark("optimizer")

    def notice_listeners(self) -> None:
        """The optimizers are called as they are."""

    def _zero(self) -> None:
        """Let go of the gradients of the last evaluation, once in each, between loss and gradients."""
        if self._is_zeroed:
            return
        self._is_zeroed = True
        for optimizer in self.optimizers:
            if "on_before_zero_grad" in self.hooks:
                self.hooks["on_before_zero_grad"](optimizer)
            if "optimizer_zero_grad" in self.hooks:
                self.hooks["optimizer_zero_grad"](self._view.current_epoch, self._batch_idx, optimizer)
            else:
                optimizer.zero_grad()
        trained = {id(parameter) for parameter in optimised(self.optimizers)}
        for parameter in self.parameters:
            if id(parameter) not in trained:
                parameter.grad = None

    def _before_backward(self, loss: Tensor) -> None:
        self._zero()
        super()._before_backward(loss)
        self._closed = loss.detach()

    def _take(self, *arguments: Any) -> None:
        """Where several ranks share a batch, add their gradients to what the task has kept of those before."""
        self._zero()
        kept = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        super()._take(*arguments)
        if "optimizer_zero_grad" in self.hooks:  # they may outlive this step, and the memory of its reduction
            for parameter in self.parameters:
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        for parameter, gradient in kept:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def take_record(self, head: Tensor, record: Tensor, names: list[str], weights: Mapping[str, Tensor]) -> None:
        """The loss of all ranks together, by which all of them decide alike."""
        super().take_record(head, record, names, weights)
        self._closed = self.weighted(self.recorder.means(record, self.counting(names)), weights)

    def _before_update(self, optimizer: Optimizer) -> None:
        super()._before_update(optimizer)
        if optimizer is self.optimizers[0]:
            self._check_and_clip()
