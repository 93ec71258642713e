"""Data as a task wants it before training: in its own form, and as samples to measure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isoscale.data.batches import Batch
from isoscale.data.sources import Source
from isoscale.engine.figures import sample
from isoscale.parallel.collectives import ALONE, Ranks


def adapted(task: Any, data: Any, ranks: Ranks = ALONE, say: Callable[[str], None] = lambda text: None) -> Any:
    """The data as the task reads it."""
    adapt = getattr(task, "adapt", None)
    return data if adapt is None else adapt(data, ranks, say)


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
