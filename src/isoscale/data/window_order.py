"""A shuffle for slow file systems: blocks of consecutive samples in random order, mixed completely in windows.

An epoch reads the blocks of the source in a random order, some of them (a window) at a time, and visits the samples of
a window in a random order. Like `Order` it is an exact permutation in every epoch, a function of the seed alone, any
place of which is computed by itself, in O(1) memory, with equal values in numpy and in torch on any device.

How: where the last block is shorter, everything behind it moves up. A hash says where it comes in an epoch, and an
order of the others fills the places around it, so that window and offset of any position follow by arithmetic.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoscale.data.columns import Rows
from isoscale.data.feeds.feed import Indices
from isoscale.data.hashing import derive_key, fold
from isoscale.data.order import OUT_OF_PASSES, Order

NUM_REGIONS = 128
NUM_BATCHES = 400
MOST_SAMPLES = 1 << 23
"""To look at: large batches are measured on fewer of them."""


class WindowOrder:
    """An order of `num_samples` samples that stays within a window of blocks at a time."""

    def __init__(self, num_samples: int, seed: int, samples_per_block: int, blocks_per_window: int) -> None:
        """An order for a seed; the last block, and the last window of an epoch, may be smaller."""
        self.num_samples = num_samples
        self.samples_per_block = min(samples_per_block, num_samples)
        self._num_blocks = -(-num_samples // self.samples_per_block)
        self.blocks_per_window = min(blocks_per_window, self._num_blocks)
        self._num_windows = -(-self._num_blocks // self.blocks_per_window)
        self._lacking = self._num_blocks * self.samples_per_block - num_samples
        self._keys = derive_key(seed, "place of the last block")
        self._others = Order(max(1, self._num_blocks - 1), seed, purpose="order of blocks")
        blocks_in_last = self._num_blocks - (self._num_windows - 1) * self.blocks_per_window
        self._span = self.blocks_per_window * self.samples_per_block
        self._last_span = blocks_in_last * self.samples_per_block
        # A full window and the last one, each with or without the shorter block.
        sizes = {span - lacking for span in (self._span, self._last_span) for lacking in (0, self._lacking)}
        self._inside = {size: Order(size, seed, purpose="order inside a window") for size in sizes}

    def indices(self, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Sample indices (count,) for places `start` to `start + count`, which may span epochs."""
        device = torch.device(device)
        if device.type == "cpu":
            return torch.from_numpy(self.at(np.arange(start, start + count, dtype=np.int64)))
        return self.at(torch.arange(start, start + count, device=device))

    def at(self, place: Any) -> Any:
        """Sample indices for places in any order: an array for a numpy array, a tensor for a tensor."""
        where = np.where if isinstance(place, np.ndarray) else torch.where
        epoch = place // self.num_samples
        position = place - epoch * self.num_samples
        # Where the last block of the source comes in the epoch, the one that may be shorter, and in which window.
        high, low = (fold(key, epoch) for key in self._keys)
        last = ((high << 30) ^ low) % self._num_blocks
        shorter = last // self.blocks_per_window
        # The window of the position, the offset in it, and the samples of that window.
        moved = self._lacking * (position >= (shorter + 1) * self._span - self._lacking)
        window = (position + moved) // self._span
        start = window * self._span
        full = self._span - (self._span - self._last_span) * (window == self._num_windows - 1)
        size = full - self._lacking * (window == shorter)
        mixed = self._mix(epoch * self._num_windows + window, position + moved - start, size)
        # Where the mixed offset lies in an epoch whose blocks are all full, and which block of the source comes there.
        is_behind = (window == shorter) & (start + mixed >= (last + 1) * self.samples_per_block - self._lacking)
        cell = start + mixed + self._lacking * is_behind
        block_place = cell // self.samples_per_block
        others = self._others.at(epoch * self._others.num_samples + block_place - 1 * (block_place > last))
        block = where(block_place == last, self._num_blocks - 1, others)
        sample = block * self.samples_per_block + cell - block_place * self.samples_per_block
        return where((mixed == OUT_OF_PASSES) | (block == OUT_OF_PASSES), OUT_OF_PASSES, sample)

    def _mix(self, window: Any, offset: Any, size: Any) -> Any:
        """Offsets in random order, another one in every window of every epoch."""
        if not isinstance(offset, np.ndarray):
            mixed = offset
            for length, order in self._inside.items():
                mixed = torch.where(size == length, order.at(window * length + offset), mixed)
            return mixed
        mixed = np.empty_like(offset)
        for length, order in self._inside.items():  # on the host, each order is asked only for its own
            mine = np.flatnonzero(size == length)
            mixed[mine] = order.at(window[mine] * length + offset[mine])
        return mixed


def shuffle_quality(order: Indices, num_samples: int, batch_size: int) -> float:
    """How evenly batches represent a source of `num_samples`: 1 is as good as an exact shuffle, 0 is no shuffle.

    The source is cut into regions of equal size. Of each batch, chi-square says how far the numbers of its samples in
    the regions are from even; the quality is the value that chance gives an exact shuffle over the mean that is found.
    """
    batch_size = min(batch_size, order.num_samples)
    num_regions = min(NUM_REGIONS, num_samples)
    found = np.mean([_chi_square(batch, num_samples, num_regions) for batch in _some_batches(order, batch_size)])
    chance = (num_regions - 1) * (num_samples - batch_size) / max(1, num_samples - 1)
    return float(chance / found) if found > 0 else 1.0


def _some_batches(order: Indices, batch_size: int) -> Iterator[Rows]:
    """Batches from all over the first epoch, or all of the first epochs where one has few."""
    per_epoch = order.num_samples // batch_size
    count = max(16, min(NUM_BATCHES, MOST_SAMPLES // batch_size))
    for number in np.linspace(0, max(per_epoch, count) - 1, count).astype(int).tolist():
        epoch, within = divmod(number, per_epoch)
        yield order.indices(epoch * order.num_samples + within * batch_size, batch_size).numpy()


def _chi_square(batch: Rows, num_samples: int, num_regions: int) -> float:
    edges = -(-np.arange(num_regions + 1) * num_samples // num_regions)
    expected = np.diff(edges) * (len(batch) / num_samples)
    counts = np.bincount(batch * num_regions // num_samples, minlength=num_regions)
    return float(((counts - expected) ** 2 / expected).sum())


def describe_windows(order: WindowOrder, batch_size: int) -> str:
    """A window shuffle in words, with its quality for batches of a size."""
    quality = shuffle_quality(order, order.num_samples, batch_size)
    blocks = f"{order.blocks_per_window:,} blocks × {order.samples_per_block:,} samples"
    return f"window shuffle of {blocks}, quality {quality:.2f}"
