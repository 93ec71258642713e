"""Losses and metrics as pairs and counts, which shards and ranks can add without changing their meaning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tally:
    """Counts of one batch, which add up over batches and ranks, and the metrics that follow from their total.

    For metrics that are no mean over samples, such as F1: logged in an evaluation, computed once at its end.
    """

    counts: Tensor
    finish: Callable[[Tensor], dict[str, float]]
    """From the total, on the host, to metrics by name."""


class WeightedSum:
    """A sum and its weight. A mean over n samples is the pair (n * mean, n).

    Made from a mean, it keeps that mean, so that a batch computed at once costs no more than a plain loss.
    """

    __slots__ = ("_mean", "_sum", "weight")

    def __init__(self, sum: Tensor | None, weight: Tensor | float, mean: Tensor | None = None) -> None:
        """A pair of a sum and its weight: a number of samples, atoms, pixels, or a sum of class weights."""
        self._sum = sum
        self._mean = mean
        self.weight = weight

    @classmethod
    def of_mean(cls, mean: Tensor, weight: Tensor | float) -> WeightedSum:
        """The pair of a mean over `weight` samples."""
        return cls(None, weight, mean)

    @property
    def sum(self) -> Tensor:
        """The sum."""
        if self._sum is None:
            assert self._mean is not None
            self._sum = self._mean * self.weight
        return self._sum

    @property
    def mean(self) -> Tensor:
        """The sum divided by the weight."""
        if self._mean is None:
            assert self._sum is not None
            self._mean = self._sum / self.weight
        return self._mean

    def add_to(self, total: Tensor) -> None:
        """Add the sum to a tensor, in one operation wherever the weight is a plain number."""
        if self._sum is None and isinstance(self._mean, Tensor) and not isinstance(self.weight, Tensor):
            total.add_(self._mean.detach(), alpha=self.weight)
        else:
            total.add_(self.sum.detach())


def as_total(weight: Tensor | float, device: torch.device) -> Tensor:
    """A weight as a device tensor, made by a fill: a copy from the host could not be captured."""
    if isinstance(weight, Tensor):
        return weight.detach().to(torch.float64, copy=True)
    return torch.full((), weight, dtype=torch.float64, device=device)
