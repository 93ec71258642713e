"""Data as a task wants it before training: in its own form, and as samples to measure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isoscale.data.batches import Batch
from isoscale.data.sources import Source
from isoscale.engine.figures import sample
from isoscale.parallel.collectives import ALONE, Ranks


def adapted(
    task: Any, data: Any, transforms: Sequence[Any] = (), ranks: Ranks = ALONE,
    say: Callable[[str], None] = lambda text: None,
) -> Any:  # fmt: skip
    """The data as the task reads it, after the transforms that prepare data (`adapt`), in their order."""
    for prepare in (*prepares(transforms), task):
        adapt = getattr(prepare, "adapt", None)
        data = data if adapt is None else adapt(data, ranks, say)
    return data


def prepares(transforms: Sequence[Any]) -> list[Any]:
    """The transforms that are done once, to all data, before training: they have an `adapt`, as tasks do."""
    return [each for each in transforms if hasattr(each, "adapt")]


def in_step(transforms: Sequence[Any]) -> list[Any]:
    """The transforms of batches, which are done in every step."""
    return [each for each in transforms if not hasattr(each, "adapt")]


@dataclass(frozen=True)
class TrainingData:
    """The training data, for a task that measures it."""

    source: Source
    ranks: Ranks
    say: Callable[[str], None]
    transforms: Sequence[Any]
    device: torch.device
    dtype: torch.dtype

    def __call__(self, count: int) -> Batch:
        """The first samples, after the transforms, on the device."""
        return sample(self.source, count, self.transforms, self.device, self.dtype)
