"""Predictions against true values: sums of errors, and counts for a picture, which shards and ranks can add."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

NUM_BINS = 256
"""Of values in each direction, before those without any are cut off."""


def error_sums(apart: Tensor, count: Tensor) -> Tensor:
    """Sums of squares and of sizes of errors (rows, entries), and their number (rows,): (rows, 3)."""
    return torch.stack([apart.square().sum(1), apart.abs().sum(1), count], 1)


def measures(sums: Tensor) -> tuple[float, float]:
    """The root of the mean square, and the mean, of errors, from sums of squares, of sizes, and their number."""
    squares, sizes, count = sums.tolist()
    return (squares / count) ** 0.5, sizes / count


def words(sums: Tensor, unit: float = 1.0) -> list[str]:
    """What a picture says about errors."""
    root, mean = measures(sums)
    return [f"mean absolute error {unit * mean:.3g}", f"root mean square error {unit * root:.3g}"]


def counted(values: Tensor) -> tuple[Any, float, float]:
    """How many samples have which true and predicted value (2, samples), and the range of both."""
    true, predicted = values.cpu().numpy()
    low, high = float(values.min()), float(values.max())
    room = 0.02 * (high - low) or 0.5
    low, high = low - room, high + room
    return np.histogram2d(true, predicted, bins=NUM_BINS // 4, range=[[low, high]] * 2)[0], low, high


class Counts:
    """How many values were predicted how, around 0; a range that is too small is doubled, and no value is lost.

    Ranges are powers of two, so that what several ranks count can be put together.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing is counted yet."""
        self.counts = torch.zeros(NUM_BINS, NUM_BINS, dtype=torch.float64, device=device)
        self.size = torch.tensor(-10.0, dtype=torch.float64)
        """Values up to 2 to its power are counted."""

    def add(self, true: Tensor, predicted: Tensor) -> None:
        """Count some more."""
        if not true.numel():
            return
        largest = float(torch.maximum(true.abs().max(), predicted.abs().max()))
        if not np.isfinite(largest):
            return
        self.grow_to(int(np.ceil(np.log2(max(largest, 2.0**-10)))))
        width = 2.0 ** (float(self.size) + 1) / NUM_BINS
        rows, columns = (
            (each / width + NUM_BINS / 2).long().clamp(0, NUM_BINS - 1).flatten() for each in (true, predicted)
        )
        found = torch.bincount(rows * NUM_BINS + columns, minlength=NUM_BINS**2)
        self.counts += found.view_as(self.counts)

    def grow_to(self, size: int) -> None:
        """Double the range until it is of this size."""
        while int(self.size) < size:
            half = self.counts.view(NUM_BINS // 2, 2, NUM_BINS // 2, 2).sum((1, 3))
            self.counts = torch.nn.functional.pad(half, [NUM_BINS // 4] * 4)
            self.size += 1

    def cut(self) -> tuple[Any, float, float]:
        """The counts, and their range, without empty bins at the ends."""
        seen = torch.nonzero(self.counts)
        middle = NUM_BINS // 2
        reach = int(max(middle - seen.min(), seen.max() - middle + 1)) if len(seen) else middle
        inner = slice(middle - reach, middle + reach)
        high = 2.0 ** float(self.size) * reach / middle
        return self.counts[inner, inner].cpu().numpy(), -high, high
