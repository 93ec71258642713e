"""How the gradients and losses of a batch's shards are added, whoever computed them.

A reducer owns the plan of shards: which exist, which are this rank's, and in what order their sums are added. The step
hands it one list of tensors a shard (gradient sums, loss pairs, running statistics, votes) and gets back their total,
which is the same on every rank: all of it travels in one buffer.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from isoscale.errors import UserError
from isoscale.parallel.collectives import ALONE, Ranks

_ALIGNMENT = 128
"""Bytes: where a tensor may begin, so that vector loads are whole."""
DEFAULT_SHARDS = 8
OVERLAP_FROM = 32_000_000
"""Parameters from which `auto` sends gradients while others are still computed; below, there is little to hide."""
Like = Callable[[], list[Tensor]]


class Buffer:
    """Room for a list of tensors side by side, those of one dtype together."""

    def __init__(self, like: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
        """For tensors like these; all are kept in `dtype`, or each in its own. A complex one is two real ones."""
        self._is_complex = [tensor.is_complex() for tensor in like]
        like = _real(like)
        self._like = [torch.empty_like(tensor, device="meta") for tensor in like]
        self._dtype = dtype
        self._device = like[0].device
        kinds = [dtype or tensor.dtype for tensor in like]
        places: list[tuple[int, int]] = [(0, 0)] * len(like)
        bounds, position = [], 0
        for kind in dict.fromkeys(kinds):
            first = position
            for number in (number for number, each in enumerate(kinds) if each == kind):
                length = like[number].numel() * kind.itemsize
                places[number] = (position, position + length)
                position += -(-length // _ALIGNMENT) * _ALIGNMENT
            bounds.append((kind, first, position))
        self.bytes = torch.zeros(position, dtype=torch.uint8, device=self._device)
        self.sections = [self.bytes[first:last].view(kind) for kind, first, last in bounds]
        """All tensors of a dtype as one."""
        self._views = [
            self.bytes[first:last].view(kind).view(tensor.shape)
            for (first, last), kind, tensor in zip(places, kinds, like, strict=True)
        ]

    @cached_property
    def other(self) -> "Buffer":
        """Room for what another rank sends."""
        return Buffer([torch.empty_like(tensor, device=self._device) for tensor in self._like], self._dtype)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors in."""
        torch._foreach_copy_(self._views, _real(tensors))

    def clear(self) -> None:
        """Fill with what changes no sum: adding +0 would change the sign of a zero, adding -0 does not."""
        for section in self.sections:
            section.zero_().neg_()

    def tensors(self) -> list[Tensor]:
        """What is inside: views where the dtype is that of the buffer."""
        found = [view.to(tensor.dtype) for view, tensor in zip(self._views, self._like, strict=True)]
        pairs = zip(found, self._is_complex, strict=True)
        return [torch.view_as_complex(tensor) if is_complex else tensor for tensor, is_complex in pairs]


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]


class Buffers:
    """The buffers of the kinds of lists that a rank sends; they stay where they are from step to step."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        """Buffers in which all is kept in `dtype`, or each tensor in its own."""
        self._dtype = dtype
        self._buffers: dict[object, Buffer] = {}

    def filled(self, tensors: Sequence[Tensor]) -> Buffer:
        """A buffer with these tensors."""
        buffer = self._like(tensors)
        buffer.fill(tensors)
        return buffer

    def cleared(self, like: Sequence[Tensor]) -> Buffer:
        """A buffer for tensors like these that changes no sum."""
        buffer = self._like(like)
        buffer.clear()
        return buffer

    def _like(self, tensors: Sequence[Tensor]) -> Buffer:
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key not in self._buffers:
            self._buffers[key] = Buffer(tensors, self._dtype)
        return self._buffers[key]


class Reducer(Protocol):
    """Adds what the shards of one batch give."""

    ranks: Ranks
    num_shards: int
    """Shards of the whole batch, on all ranks together."""
    apart: bool
    """Whether every shard is computed as if it were alone, batch statistics included."""

    @property
    def owned(self) -> range:
        """The shards that this rank computes."""

    def add(self, shard: int, tensors: Sequence[Tensor]) -> None:
        """Take the sums of an owned shard; the reducer keeps the tensors. Shards come in increasing order."""

    def total(self, like: Like = list) -> list[Tensor]:
        """The sums over all shards of all ranks, and be ready for the next batch.

        `like` makes a list of tensors as others have it, where this rank had no samples and added nothing.
        """


class FlatReducer:
    """One shard a rank, computed at once, and one sum over the ranks."""

    apart = False

    def __init__(self, ranks: Ranks = ALONE, dtype: torch.dtype = torch.float32) -> None:
        """What travels is of the gradients' `dtype`: losses and counts are no more precise than these."""
        self.ranks = ranks
        self.num_shards = ranks.world_size
        self._buffers = Buffers(dtype)
        self._tensors: list[Tensor] = []

    @property
    def owned(self) -> range:
        """The one of this rank."""
        return range(self.ranks.rank, self.ranks.rank + 1)

    def add(self, shard: int, tensors: Sequence[Tensor]) -> None:
        """Keep the rank's sums."""
        self._tensors = list(tensors)

    def total(self, like: Like = list) -> list[Tensor]:
        """The sums of all ranks."""
        tensors, self._tensors = self._tensors, []
        if self.ranks.alone:
            return tensors
        buffer = self._buffers.filled(tensors) if tensors else self._buffers.cleared(like())
        for section in buffer.sections:
            self.ranks.all_reduce(section, "the gradients of all ranks")
        return buffer.tensors()


class TreeReducer:
    """A fixed binary tree over the shards, so that the sum has the same bits whoever computed which shard.

    A rank adds its own shards, which are a subtree, and then exchanges sums with one partner at each level above: both
    compute the same sum of two. A shard that a small batch leaves empty is left out of the tree, and the others keep
    their places in it. A finished subtree waits until its right neighbour arrives, so that at most 1 + log2(shards)
    sums are held at a time.
    """

    apart = True

    def __init__(self, num_shards: int = DEFAULT_SHARDS, ranks: Ranks = ALONE) -> None:
        """A tree over a power of two of shards, of which each rank has as many."""
        check_shards(num_shards)
        self.ranks = ranks
        self.num_shards = num_shards
        self._buffers = Buffers(None)
        self._waiting: list[tuple[int, list[Tensor]]] = []  # (first shard, sums) of subtrees, left to right

    @property
    def owned(self) -> range:
        """A contiguous range of shards, the leaves of a subtree."""
        each = self.num_shards // self.ranks.world_size
        return range(self.ranks.rank * each, (self.ranks.rank + 1) * each)

    def add(self, shard: int, tensors: Sequence[Tensor]) -> None:
        """Add a leaf, after joining the subtrees that meet below the node where it meets them."""
        while len(self._waiting) > 1:
            (left, _), (right, _) = self._waiting[-2:]
            if _meeting(left, right) >= _meeting(right, shard):
                break
            self._join()
        self._waiting.append((shard, list(tensors)))

    def total(self, like: Like = list) -> list[Tensor]:
        """The root of the tree."""
        while len(self._waiting) > 1:
            self._join()
        own = self._waiting.pop()[1] if self._waiting else []
        if self.ranks.alone:
            return own
        buffer = self._buffers.filled(own) if own else self._buffers.cleared(like())
        self.ranks.tick("the gradients of all ranks")
        level = 1  # from the root of this rank's subtree to the root of all
        while level < self.ranks.world_size:
            self.ranks.exchange(buffer.bytes, buffer.other.bytes, self.ranks.rank ^ level)
            for mine, theirs in zip(buffer.sections, buffer.other.sections, strict=True):
                mine.add_(theirs)
            level *= 2
        return buffer.tensors()

    def _join(self) -> None:
        _, right = self._waiting.pop()
        torch._foreach_add_(self._waiting[-1][1], right)


def _meeting(left: int, right: int) -> int:
    """Height of the lowest node of the tree that is above both shards."""
    return (left ^ right).bit_length()


def check_shards(num_shards: int) -> None:
    """Refuse a number of shards that makes no binary tree."""
    if num_shards < 1 or num_shards & (num_shards - 1):
        lower = 1 << (max(1, num_shards).bit_length() - 1)
        raise UserError(f"parallel.shards must be a power of two, not {num_shards}: use {lower} or {2 * lower}")


def tree_shards(reduce: str, shards: int | str) -> int:
    """The number of shards that the recipe's `parallel` section asks for; 1 where there is no tree."""
    if reduce != "tree":
        return 1
    return DEFAULT_SHARDS if shards == "auto" else int(shards)


def make_reducer(
    reduce: str, num_shards: int, ranks: Ranks = ALONE, dtype: torch.dtype = torch.float32
) -> FlatReducer | TreeReducer:
    """The reducer of a kind, for gradients of a dtype."""
    return TreeReducer(num_shards, ranks) if reduce == "tree" else FlatReducer(ranks, dtype)
