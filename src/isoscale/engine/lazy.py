"""Lazy modules (nn.LazyLinear and others): they learn their shapes from the first training batch, before optimizers."""

from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from isoscale.data import rng
from isoscale.data.generators import kept_generators
from isoscale.data.hashing import derive_key
from isoscale.engine.lightning.batch_hooks import AroundBatch
from isoscale.engine.metrics.torchmetrics import keep
from isoscale.engine.splits import Split
from isoscale.engine.state.module_state import ModuleSnapshot
from isoscale.engine.step.step import Forward
from isoscale.errors import UserError
from isoscale.system.devices import Accelerator, Cuda


class _AllKnown(BaseException):
    """Every lazy module has its shape: nothing more is to be computed."""


def materialise(task: nn.Module, forward: Forward, train: Split, seed: int, accelerator: Accelerator) -> None:
    """Give lazy modules their shapes, by a training step without gradients on the first batch of the run.

    It ends as soon as all are known. Their weights are drawn by the seed of the recipe, so that they are the same on
    all ranks and in every start; nothing else moves: no random generator, no statistics, no attribute of the task.
    """
    lazy = _lazy(task)
    if not lazy:
        return
    name = next(name for name, parameter in task.named_parameters() if is_lazy(parameter))
    advice = "call the network once on a batch, in __init__ or in setup"
    part = next((part for shard in train.feed.parts(0) for part in shard), None)
    if part is None:
        raise UserError(f"{name} has no shape yet (a lazy module), and this rank has no sample to find it: {advice}")
    waiting = list(lazy)

    def note(module: nn.Module, arguments: Any) -> None:
        if module in waiting and not _is_waiting(module):
            waiting.remove(module)
        if not waiting:
            raise _AllKnown

    buffers = [(each, each.clone()) for each in task.buffers() if not is_lazy(each)]
    before, go_back = ModuleSnapshot(task), keep(task)
    compute, high_low = forward.compute, derive_key(seed, "lazy modules")
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(_devices(accelerator)))
        stack.enter_context(kept_generators())
        stack.enter_context(rng.use(None))
        stack.enter_context(torch.no_grad())
        stack.enter_context(compute.replayed() if isinstance(compute, AroundBatch) else nullcontext())
        for module in lazy:
            stack.callback(module.register_forward_pre_hook(note).remove)
        torch.manual_seed(high_low[0] << 31 | high_low[1])
        try:
            forward(part, 0)
        except _AllKnown:
            pass
        except Exception as error:
            if waiting:
                raise UserError(
                    f"{name} has no shape yet (a lazy module), and training_step, which was tried on the first batch "
                    f"to find it, did not get there ({type(error).__name__}: {error}): {advice}"
                ) from error
    _put_back(task, before, lazy)
    go_back()
    forward.context.forget()
    for module in lazy:
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.reset_running_stats()
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    left = [name for name, parameter in task.named_parameters() if is_lazy(parameter)]
    if left:
        raise UserError(f"{left[0]} has no shape yet (a lazy module), and training_step does not use it: {advice}")


def _lazy(task: nn.Module) -> list[nn.Module]:
    return [module for module in task.modules() if isinstance(module, LazyModuleMixin) and _is_waiting(module)]


def _is_waiting(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(each is not None and is_lazy(each) for each in tensors)


def _put_back(task: nn.Module, before: ModuleSnapshot, lazy: list[nn.Module]) -> None:
    """Undo what running the code of a step has done to the task, but for what lazy modules now know."""
    known = [(module, dict(vars(module))) for module in lazy]
    before.restore(task)
    for module, attributes in known:
        vars(module).update(attributes)


def _devices(accelerator: Accelerator) -> list[int]:
    return [accelerator.device.index or 0] if isinstance(accelerator, Cuda) else []
