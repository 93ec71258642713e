"""What the engine still does around the steps of a task that updates its weights itself (manual optimisation)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from isoscale.data.batches import Plan
from isoscale.engine.config import Train
from isoscale.engine.lightning.module import clip_gradients
from isoscale.engine.metrics.accumulators import Recorder
from isoscale.engine.optim.ema import EMA
from isoscale.engine.optim.optimizers import set_lr
from isoscale.engine.optim.schedules import LearningRate
from isoscale.engine.precision import Precision
from isoscale.engine.step.step import loss_terms
from isoscale.errors import UserError
from isoscale.parallel.collectives import Ranks
from isoscale.parallel.reduction import Buffer


def check(plan: Plan, train: Train, precision: Precision) -> None:
    """Refuse what the engine would have to do inside an update that the task does itself."""
    for wrong, words in (
        (plan.num_micro > 1, "train.accumulate cuts batches: accumulate in training_step"),
        (plan.num_shards > 1, "parallel.reduce=tree cuts batches: use parallel.reduce=flat"),
        (train.clip is not None, "train.clip does not reach its gradients: call self.clip_gradients"),
        (bool(train.loss_weights), "train.loss_weights does not reach its loss: weigh it in training_step"),
        (train.nan != "stop", f"train.nan={train.nan} does not reach its updates: use train.nan=stop"),
        (precision.needs_scaler, "fp16 scales the loss of the engine's own updates: use train.precision=bf16"),
    ):
        if wrong:
            raise UserError(f"the task updates its weights itself (manual optimisation), and {words}")


class SharedUpdates:
    """Several ranks that share the batches of a task which updates its weights itself.

    The gradients of a rank are of a mean over its share of the batch, and count by its size: they are averaged before
    each update. What was recorded is added up after each step.
    """

    def __init__(self, ranks: Ranks, plan: Plan, recorder: Recorder, optimizers: list[Any], task: nn.Module) -> None:
        """Average before the updates of `optimizers`, which must be all that update the parameters of `task`."""
        if plan.smallest < ranks.world_size:
            raise UserError(
                f"the task updates its weights itself (manual optimisation), and a batch of {plan.smallest} samples "
                f"does not reach all {ranks.world_size} ranks; use data.drop_last=true or another data.batch_size"
            )
        self._ranks, self._plan, self._recorder = ranks, plan, recorder
        self.weight = 1.0
        """By how much the gradients of this rank count among those of all."""
        self._record: Tensor | None = None
        self._optimizers, self._parameters = optimizers, dict(task.named_parameters())
        self._handles = []
        if not ranks.alone:
            self._handles = [optimizer.register_step_pre_hook(self._before_update) for optimizer in optimizers]
            self._handles.append(register_optimizer_step_pre_hook(self._refuse_others))
            object.__setattr__(task, "clip_gradients", self._clip)

    def close(self) -> None:
        """Training is over."""
        for handle in self._handles:
            handle.remove()

    def _refuse_others(self, optimizer: Any, *arguments: Any) -> None:
        own = {id(parameter) for parameter in self._parameters.values()}
        is_known = any(optimizer is each for each in self._optimizers)
        if not is_known and any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            raise UserError(
                f"{type(optimizer).__name__} updates parameters of the task, but configure_optimizers does not return "
                "it, so that each rank would update its own: return it there, and take it from self.optimizers()"
            )

    def _clip(self, optimizer: Any, *arguments: Any, **options: Any) -> None:
        """Clip the gradients of all ranks together; averaged again before the update, they stay what they are."""
        self.average(optimizer)
        clip_gradients(optimizer, *arguments, **options)

    def begin(self, step: int) -> None:
        """A step begins."""
        if not self._ranks.alone:
            for name, parameter in self._parameters.items():
                if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                    raise UserError(
                        f"{name} has a hook on its gradient, which under manual optimisation sees that of one rank "
                        "only; change gradients in on_before_optimizer_step instead"
                    )
            size = self._plan.size(step)
            self.weight = self._plan.share(size).count / size
            self._record = self._recorder.begin_shard()

    def _before_update(self, optimizer: Any, arguments: Any, options: Any) -> Any:
        """Average the gradients; where the optimizer computes them itself (a closure), each time that it does."""
        closure = options.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            self.average(optimizer)
            return None

        def of_all() -> Any:
            loss = closure()
            self.average(optimizer)
            if loss is None:
                return None
            mean = torch.as_tensor(loss).detach().double() * self.weight
            self._ranks.all_reduce(mean, "the loss of all ranks")
            return mean.to(loss.dtype) if isinstance(loss, Tensor) else float(mean)

        return (arguments[0], of_all), {key: value for key, value in options.items() if key != "closure"}

    def average(self, optimizer: Any) -> None:
        """Give the parameters of an optimizer the mean of the gradients of all ranks."""
        if self._ranks.alone:
            return
        owners = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if not owners:
            return
        gradients = [each.grad.to_dense() if each.grad.is_sparse else each.grad for each in owners]
        buffer = Buffer(gradients)
        buffer.fill([gradient * self.weight for gradient in gradients])
        for section in buffer.sections:
            self._ranks.all_reduce(section, "the gradients of all ranks")
        torch._foreach_copy_(gradients, buffer.tensors())
        for owner, mean in zip(owners, gradients, strict=True):
            if owner.grad.is_sparse:
                owner.grad = mean.to_sparse(1)

    def end(self) -> None:
        """A step is over."""
        if self._record is not None:
            self._ranks.all_reduce(self._record, "the losses of all ranks")
            self._recorder.end_shards(self._record)
            self._record = None


def before(
    rate: LearningRate | None, optimizers: list[Any], before_fetch: Callable[[int], None], shared: SharedUpdates
) -> Callable[[int], None]:
    """Before a step, set the recipe's learning rate, unless the task has optimizers of its own (`rate` is None)."""

    def before_step(step: int) -> None:
        before_fetch(step)
        shared.begin(step)
        if rate is not None:
            for optimizer in optimizers:
                set_lr(optimizer, rate(step))

    return before_step


def after(
    recorder: Recorder, plan: Plan, average: EMA | None, after_step: Callable[[int], None] | None,
    shared: SharedUpdates,
) -> Callable[[int, Any], None]:  # fmt: skip
    """After a step, record the loss that it returned, if any, and average the weights."""

    def told(step: int, output: Any) -> None:
        if isinstance(output, torch.Tensor) or (isinstance(output, dict) and "loss" in output):
            for name, pair in loss_terms(output, plan.share(plan.size(step - 1)).count).items():
                recorder.add(name, pair)
        shared.end()
        if average is not None:
            average.update()
        if after_step is not None:
            after_step(step)

    return told
