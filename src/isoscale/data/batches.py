"""How the stream of samples is cut: batches in time, micro-batches and shards inside a batch. Pure functions."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from isoscale.data.shards import Share, rank_share

Batch = Any
"""Tensors in a dict, list or tuple, nested as the source likes; the first dimension of each is the batch."""


class Plan(Protocol):
    """What the engine asks of the batches of an epoch."""

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""

    @property
    def batch_size(self) -> int:
        """Samples of a batch; of the largest, where batches differ."""

    @property
    def num_micro(self) -> int:
        """Micro-batches of a batch, in time."""

    @property
    def num_shards(self) -> int:
        """Shards of a batch, in space."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""

    @property
    def smallest(self) -> int:
        """Samples of the smallest batch."""

    def size(self, step: int) -> int:
        """Number of samples of the batch of a step."""

    def share(self, size: int) -> Share:
        """What this rank takes of a batch of `size` rows."""

    def place(self, step: int) -> int:
        """How far the samples have come before a step."""

    def samples_before(self, step: int) -> int:
        """Samples that the steps before this one have seen."""

    def limited(self, limit: int) -> Self:
        """The same with at most `limit` batches per epoch."""

    def kind(self, step: int) -> Hashable:
        """Steps of one kind have batches of one shape."""

    def end_of_kind(self, step: int) -> int:
        """The first step after this one whose batch has another shape, or that begins an epoch."""


@dataclass(frozen=True)
class BatchPlan:
    """The batches of an epoch, and the parts of a batch."""

    num_samples: int
    """What an epoch counts: all samples of the data, or as many as it draws."""
    batch_size: int
    drop_last: bool = False
    limit: int | None = None
    """At most so many batches per epoch."""
    num_micro: int = 1
    num_shards: int = 1
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch_size > self.num_samples:
            raise ValueError(f"the batch ({self.batch_size}) is larger than the data ({self.num_samples} samples)")

    @cached_property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, a smaller last one included unless it is dropped."""
        full, rest = divmod(self.num_samples, self.batch_size)
        steps = full + (rest > 0 and not self.drop_last)
        return steps if self.limit is None else min(steps, self.limit)

    def size(self, step: int) -> int:
        """Number of samples of the batch of a step."""
        within = step % self.steps_per_epoch
        return min(self.batch_size, self.num_samples - within * self.batch_size)

    @property
    def smallest(self) -> int:
        """Samples of the smallest batch: the last of an epoch."""
        return self.size(self.steps_per_epoch - 1)

    def place(self, step: int) -> int:
        """Where the batch of a step begins in the order: `epoch * num_samples + position`."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.num_samples + within * self.batch_size

    def samples_before(self, step: int) -> int:
        """Samples that the steps before this one have seen."""
        epoch, within = divmod(step, self.steps_per_epoch)
        per_epoch = min(self.num_samples, self.steps_per_epoch * self.batch_size)
        return epoch * per_epoch + within * self.batch_size

    def limited(self, limit: int) -> "BatchPlan":
        """The same with at most `limit` batches per epoch."""
        return replace(self, limit=limit)

    def kind(self, step: int) -> Hashable:
        """Steps of one kind have batches of one shape."""
        return self.size(step)

    def end_of_kind(self, step: int) -> int:
        """The first step after this one whose batch has another size, or that begins an epoch."""
        last = step - step % self.steps_per_epoch + self.steps_per_epoch - 1
        ragged = self.size(last) != self.batch_size
        return last if ragged and step < last else last + 1

    def share(self, size: int) -> Share:
        """What this rank takes of a batch of `size` rows."""
        return _share(size, self.num_micro, self.num_shards, self.rank, self.world)


_share = lru_cache(maxsize=4096)(rank_share)


def map_tensors(batch: Batch, function: Callable[[Tensor], Any]) -> Batch:
    """Apply a function to every tensor of a batch and keep its structure."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def tensors_of(batch: Batch) -> list[Tensor]:
    """Every tensor of a batch, in the order of its structure."""
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


def copy_batch(target: Batch, source: Batch) -> None:
    """Copy a batch into another of the same structure and shapes, without waiting."""
    for into, tensor in zip(tensors_of(target), tensors_of(source), strict=True):
        into.copy_(tensor, non_blocking=True)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device, without waiting for the copy."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))
