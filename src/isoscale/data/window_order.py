"""A shuffle for slow file systems: blocks of consecutive samples in random order, mixed completely in windows.

An epoch reads the blocks of the source in a random order, some of them (a window) at a time, and visits the samples of
a window in a random order. Like `Order` it is an exact permutation in every epoch, a function of the seed alone, any
place of which is computed by itself, in O(1) memory, with equal values in numpy and in torch on any device.

How: where the last block is shorter, everything behind it moves up. A hash says where it comes in an epoch, and an
order of the others fills the places around it, so that window and offset of any position follow by arithmetic.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoscale.data.columns import Rows
from isoscale.data.hashing import derive_key, fold
from isoscale.data.order import OUT_OF_PASSES, Order


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
        self._inside = {size: Order(size, seed, purpose="order inside a window") for size in self._window_sizes()}

    def _window_sizes(self) -> set[int]:
        """Samples of a full window and of the last one, each with or without the shorter block."""
        blocks_in_last = self._num_blocks - (self._num_windows - 1) * self.blocks_per_window
        self._span = self.blocks_per_window * self.samples_per_block
        self._last_span = blocks_in_last * self.samples_per_block
        return {span - lacking for span in (self._span, self._last_span) for lacking in (0, self._lacking)}

    def indices(self, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Sample indices (count,) for places `start` to `start + count`, which may span epochs."""
        device = torch.device(device)
        if device.type == "cpu":
            return torch.from_numpy(self.at(np.arange(start, start + count, dtype=np.int64)))
        return self.at(torch.arange(start, start + count, device=device))

    def at(self, place: Any) -> Any:
        """Sample indices for places in any order: an array for a numpy array, a tensor for a tensor."""
        where = _where(place)
        epoch = place // self.num_samples
        last = self._place_of_last_block(epoch)
        window, offset = self._window(place - epoch * self.num_samples, last)
        mixed = self._mix(epoch * self._num_windows + window, offset, self._size(window, last))
        cell = self._cell(mixed, window, last)
        block_place = cell // self.samples_per_block
        block = self._block(epoch, block_place, last)
        sample = block * self.samples_per_block + cell - block_place * self.samples_per_block
        return where((mixed == OUT_OF_PASSES) | (block == OUT_OF_PASSES), OUT_OF_PASSES, sample)

    def _place_of_last_block(self, epoch: Any) -> Any:
        """Which block of an epoch is the last of the source, the one that may be shorter."""
        high, low = (fold(key, epoch) for key in self._keys)
        return ((high << 30) ^ low) % self._num_blocks

    def _window(self, position: Any, last: Any) -> tuple[Any, Any]:
        """The window of a position in an epoch, and the offset in it."""
        end_of_shorter = (last // self.blocks_per_window + 1) * self._span - self._lacking
        moved = self._lacking * (position >= end_of_shorter)
        window = (position + moved) // self._span
        return window, position + moved - window * self._span

    def _size(self, window: Any, last: Any) -> Any:
        is_shorter = window == last // self.blocks_per_window
        full = self._span - (self._span - self._last_span) * (window == self._num_windows - 1)
        return full - self._lacking * is_shorter

    def _mix(self, window: Any, offset: Any, size: Any) -> Any:
        """Offsets in random order, another one in every window of every epoch."""
        if isinstance(offset, np.ndarray):
            return self._mix_on_host(window, offset, size)
        mixed = offset
        for length, order in self._inside.items():
            mixed = torch.where(size == length, order.at(window * length + offset), mixed)
        return mixed

    def _mix_on_host(self, window: Rows, offset: Rows, size: Rows) -> Rows:
        """The same, each order asked only for its own."""
        mixed = np.empty_like(offset)
        for length, order in self._inside.items():
            mine = np.flatnonzero(size == length)
            mixed[mine] = order.at(window[mine] * length + offset[mine])
        return mixed

    def _cell(self, offset: Any, window: Any, last: Any) -> Any:
        """Where an offset in a window lies in an epoch whose blocks are all full."""
        start = window * self._span
        end_of_last = (last + 1) * self.samples_per_block - self._lacking
        is_behind = (window == last // self.blocks_per_window) & (start + offset >= end_of_last)
        return start + offset + self._lacking * is_behind

    def _block(self, epoch: Any, block_place: Any, last: Any) -> Any:
        """Which block of the source comes at a place among the blocks of an epoch."""
        others = self._others.at(epoch * self._others.num_samples + block_place - 1 * (block_place > last))
        return _where(block_place)(block_place == last, self._num_blocks - 1, others)


def _where(values: Any) -> Any:
    return np.where if isinstance(values, np.ndarray) else torch.where
