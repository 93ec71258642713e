"""Batch norm over the global batch: its statistics are those of all ranks together, never of what one rank holds.

torch.nn.SyncBatchNorm does this on GPUs only; this one runs wherever a process group does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from isoscale.errors import UserError
from isoscale.parallel.collectives import Ranks

Statistics = tuple[Tensor, Tensor, Tensor]
"""Mean and variance of every channel, and the number of values, over all ranks."""
_recorded: tuple[list[Statistics], ...] = ()
_repeated: Iterator[Statistics] | None = None


@contextmanager
def recorded(statistics: list[Statistics]) -> Iterator[None]:
    """Put the statistics of batch norms that are computed now into a list as well."""
    global _recorded
    before, _recorded = _recorded, (*_recorded, statistics)
    try:
        yield
    finally:
        _recorded = before


@contextmanager
def repeated(statistics: list[Statistics]) -> Iterator[None]:
    """Take statistics that were recorded instead of asking all ranks once more."""
    global _recorded, _repeated
    before, _recorded, _repeated = (_recorded, _repeated), (), iter(statistics)
    try:
        yield
    finally:
        _recorded, _repeated = before


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms below a module, by name; those of torch that synchronise themselves are left out."""
    found = {name: each for name, each in module.named_modules() if isinstance(each, _BatchNorm)}
    return {name: each for name, each in found.items() if not isinstance(each, nn.SyncBatchNorm)}


def synchronise(module: nn.Module, ranks: Ranks) -> Callable[[], None]:
    """Let every batch norm below a module see the whole batch; the function returned undoes it."""
    if ranks.alone:
        return lambda: None
    found = batch_norms(module)
    for name, norm in found.items():
        if type(norm).forward is not _BatchNorm.forward:
            raise UserError(
                f"{name} is a batch norm with a forward of its own ({type(norm).__name__}), which would see only the "
                "samples of one rank; use parallel.reduce=tree, where that is the meaning of a shard"
            )
        object.__setattr__(norm, "forward", partial(_forward, norm, ranks))

    def undo() -> None:
        for norm in found.values():
            norm.__dict__.pop("forward", None)

    return undo


def _forward(norm: _BatchNorm, ranks: Ranks, input: Tensor) -> Tensor:
    """What torch's batch norm computes, with the statistics of all ranks."""
    if not (norm.training or norm.running_mean is None):
        return _BatchNorm.forward(norm, input)
    norm._check_input_dim(input)
    output, mean, variance, count = _Normalise.apply(input, norm.weight, norm.bias, norm.eps, ranks)
    if norm.training and norm.running_mean is not None and norm.running_var is not None:
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        factor: Any = norm.momentum if norm.momentum is not None else 1.0 / norm.num_batches_tracked
        unbiased = variance * count / (count - 1)
        norm.running_mean += factor * (mean.to(norm.running_mean.dtype) - norm.running_mean)
        norm.running_var += factor * (unbiased.to(norm.running_var.dtype) - norm.running_var)
    return output


class _Normalise(torch.autograd.Function):
    """Normalise by the mean and variance over the samples of all ranks; both of its sums travel in one buffer."""

    @staticmethod
    def forward(
        context: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: Ranks
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = input.double() if input.dtype == torch.float64 else input.float()
        mean, variance, count = found = _statistics(values, ranks) if _repeated is None else next(_repeated)
        for each in _recorded:
            each.append(found)
        scale = torch.rsqrt(variance + eps)
        normalised = (values - _spread(mean, input)) * _spread(scale, input)
        context.save_for_backward(normalised, scale, weight, count)
        context.ranks, context.dtype = ranks, input.dtype
        output = normalised if weight is None else normalised * _spread(weight, input)
        if bias is not None:
            output = output + _spread(bias, input)
        context.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        normalised, scale, weight, count = context.saved_tensors
        gradient = gradient.to(normalised.dtype)
        rest = _all_but_channels(gradient)
        sums = torch.stack([gradient.sum(rest), (gradient * normalised).sum(rest)])  # (2, channels)
        of_bias, of_weight = sums.clone().unbind()  # of this rank alone: the reduction adds those of the others
        context.ranks.all_reduce(sums, "the gradients of a batch norm")
        means = sums / count
        factor = scale if weight is None else scale * weight
        centred = gradient - _spread(means[0], gradient) - normalised * _spread(means[1], gradient)
        of_input = (centred * _spread(factor, gradient)).to(context.dtype)
        return of_input, None if weight is None else of_weight, None if weight is None else of_bias, None, None


def _statistics(values: Tensor, ranks: Ranks) -> Statistics:
    """Mean, variance and number of values of every channel over all ranks, merged from those of each."""
    rest = _all_but_channels(values)
    count = values.numel() // values.shape[1]
    own = torch.cat([values.mean(rest), values.var(rest, correction=0), values.new_full((1,), count)])
    every = own.new_zeros(ranks.world_size, own.numel())
    every[ranks.rank] = own
    ranks.all_reduce(every, "the statistics of a batch norm")
    means, variances = every[:, :-1].view(ranks.world_size, 2, -1).unbind(1)
    counts = every[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean) ** 2) * counts).sum(0) / total
    return mean, variance, total


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [dimension for dimension in range(tensor.dim()) if dimension != 1]


def _spread(channels: Tensor, like: Tensor) -> Tensor:
    """A value for each channel in the shape of a batch."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))
