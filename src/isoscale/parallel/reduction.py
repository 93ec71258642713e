"""How the gradients and losses of a batch's shards are added, whoever computed them.

A reducer owns the plan of shards: which exist, which are this rank's, and in what order their sums are added. The step
hands it one list of tensors a shard (gradient sums, loss pairs, running statistics) and gets back their total.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

DEFAULT_SHARDS = 8


class Reducer(Protocol):
    """Adds what the shards of one batch give."""

    num_shards: int
    """Shards of the whole batch, on all ranks together."""

    @property
    def owned(self) -> range:
        """The shards that this rank computes."""

    def add(self, shard: int, tensors: Sequence[Tensor]) -> None:
        """Take the sums of an owned shard; the reducer keeps the tensors. Shards come in increasing order."""

    def total(self) -> list[Tensor]:
        """The sums over all shards of all ranks, and be ready for the next batch."""


class FlatReducer:
    """One shard a rank, computed at once, and one sum over the ranks."""

    num_shards = 1
    owned = range(1)

    def __init__(self) -> None:
        """A reducer for one rank."""
        self._tensors: list[Tensor] = []

    def add(self, shard: int, tensors: Sequence[Tensor]) -> None:
        """Keep the rank's sums."""
        self._tensors = list(tensors)

    def total(self) -> list[Tensor]:
        """The rank's sums: there is no other rank."""
        total, self._tensors = self._tensors, []
        return total


class TreeReducer:
    """A fixed binary tree over the shards, so that the sum has the same bits whoever computed which shard.

    A shard that a small batch leaves empty is left out of the tree, and the others keep their places in it. A finished
    subtree waits until its right neighbour arrives, so that at most 1 + log2(shards) sums are held at a time.
    """

    def __init__(self, num_shards: int = DEFAULT_SHARDS) -> None:
        """A tree over a power of two of shards."""
        if num_shards < 1 or num_shards & (num_shards - 1):
            lower = 1 << (max(1, num_shards).bit_length() - 1)
            raise ValueError(f"parallel.shards must be a power of two, not {num_shards}: use {lower} or {2 * lower}")
        self.num_shards = num_shards
        self._waiting: list[tuple[int, list[Tensor]]] = []  # (first shard, sums) of subtrees, left to right

    @property
    def owned(self) -> range:
        """All shards: there is no other rank."""
        return range(self.num_shards)

    def add(self, shard: int, tensors: Sequence[Tensor]) -> None:
        """Add a leaf, after joining the subtrees that meet below the node where it meets them."""
        while len(self._waiting) > 1 and self._top() < _meeting(self._waiting[-1][0], shard):
            self._join()
        self._waiting.append((shard, list(tensors)))

    def total(self) -> list[Tensor]:
        """The root of the tree."""
        while len(self._waiting) > 1:
            self._join()
        return self._waiting.pop()[1]

    def _top(self) -> int:
        return _meeting(self._waiting[-2][0], self._waiting[-1][0])

    def _join(self) -> None:
        _, right = self._waiting.pop()
        torch._foreach_add_(self._waiting[-1][1], right)


def _meeting(left: int, right: int) -> int:
    """Height of the lowest node of the tree that is above both shards."""
    return (left ^ right).bit_length()


def make_reducer(reduce: str, shards: int | str) -> FlatReducer | TreeReducer:
    """The reducer that the recipe's `parallel` section asks for."""
    if reduce != "tree":
        return FlatReducer()
    return TreeReducer(DEFAULT_SHARDS if shards == "auto" else int(shards))
