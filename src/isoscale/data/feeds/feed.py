"""What a feed is: it hands the parts of each step to the engine, with their samples, on the device.

Parts are gathered each into tensors of their own: matrix libraries change bits with the alignment of their operands.
"""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from isoscale.data.batches import Batch, map_tensors
from isoscale.data.shards import Share


class Part(NamedTuple):
    """One micro-batch of one shard."""

    batch: Batch
    samples: Tensor


def owned(samples: Tensor, share: Share) -> Tensor:
    """The places (…, batch) of a batch, or of several, that belong to a share."""
    if len(share.rows) == 1:
        start, stop = share.rows[0]
        return samples if (start, stop) == (0, samples.shape[-1]) else samples[..., start:stop]
    return torch.cat([samples[..., start:stop] for start, stop in share.rows] or [samples[..., :0]], dim=-1)


def cut_rows(share: Share, batch: Batch, samples: Tensor) -> list[list[Part]]:
    """The parts of the rows of a share, each copied into tensors of its own."""
    return [
        [
            Part(map_tensors(batch, lambda tensor: tensor[start:stop].clone()), samples[start:stop])  # noqa: B023
            for start, stop in shard
        ]
        for shard in share.parts
    ]


def as_part(share: Share, batch: Batch, samples: Tensor) -> list[list[Part]]:
    """The rows of a share that is computed at once, as they are."""
    return [[Part(batch, samples)] if shard == share.only else [] for shard in range(len(share.parts))]


ALIGNMENT = 256
"""Bytes: what matrix libraries look at; a tensor of its own has as much where it matters."""


def aligned_stride(size: int, row_bytes: list[int]) -> int:
    """At least `size` rows, so many that batches which follow each other at this distance are equally aligned."""
    unit = math.lcm(*(ALIGNMENT // math.gcd(ALIGNMENT, count) for count in row_bytes if count))
    return -(-size // unit) * unit


class Indices(Protocol):
    """An order of samples, as the feeds read it."""

    num_samples: int

    def indices(self, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Sample indices for `count` places from `start`."""


class Window:
    """A part of the order, evaluated ahead of the steps that read it."""

    def __init__(self, order: Indices, device: torch.device, size: int) -> None:
        """Windows of `size` places on `device`."""
        self._order = order
        self._device = device
        self._size = size
        self._start = self._count = 0
        self._values = torch.empty(0, dtype=torch.int64)

    def read(self, place: int, count: int) -> Tensor:
        """Sample indices for `count` places from `place`."""
        offset = place - self._start
        if offset < 0 or offset + count > self._count:
            self._start, offset, self._count = place, 0, max(self._size, count)
            self._values = self._order.indices(place, self._count, self._device)
        return self._values[offset : offset + count]


class Slot(Protocol):
    """Fixed tensors from which a captured launch of several steps reads its samples."""

    def fill(self, step: int) -> None:
        """Bring the samples of the launch that begins at `step`."""

    def parts(self, offset: int) -> list[list[Part]]:
        """The parts [shard][micro-batch] of the step `offset` into the launch."""


class Feed(Protocol):
    """Delivers the parts of each step."""

    def parts(self, step: int) -> list[list[Part]]:
        """The parts [shard][micro-batch] of a step."""

    def slot(self, step: int, num_steps: int) -> Slot:
        """A slot for launches of `num_steps` steps of the same size as that of `step`."""

    def close(self) -> None:
        """Stop reading ahead."""
