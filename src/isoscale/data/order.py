"""Which sample comes when: a keyed bijection from the place in training to the index of a sample.

The order is a function of the seed alone. Any place of any epoch is computed by itself, in O(1) memory, with equal
values in numpy and in torch on any device, so that a restart, another number of ranks or another residency reads the
same samples. The values are pinned by a test and never change between versions.

How: a Feistel network of six rounds (24 for a handful of samples) on a grid of a x b >= N cells, a = isqrt(N), so
that fewer than a cells lie outside of the data. A place that lands outside is sent through again. On a device that is
done for a fixed number of masked passes, chosen so that running out of them has a probability below 1e-15 per epoch;
what is left over is marked with `OUT_OF_PASSES`, which no index can be.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoscale.data.hashing import MASK, MULTIPLIER_1, MULTIPLIER_2, derive_key, fold

NUM_ROUNDS = 6
NUM_ROUNDS_SMALL = 24  # on a grid of a few cells six rounds prefer some permutations
SMALL = 64
OUT_OF_PASSES = -1
_CHUNK = 1 << 14  # positions that numpy turns at a time: small enough for the processor's cache
_MANY = 1 << 10  # samples from which on epochs are walked through one by one
MAX_SAMPLES = 1 << 46


class Order:
    """The order of `num_samples` samples, epoch after epoch, addressed by `epoch * num_samples + position`."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool = True, purpose: str = "order") -> None:
        """An order for a seed; `shuffle=False` is the order of the source, every epoch the same."""
        if not 0 < num_samples <= MAX_SAMPLES:
            raise ValueError(f"an order needs between 1 and 2^46 samples, not {num_samples}")
        self.num_samples = num_samples
        self.shuffle = shuffle and num_samples > 1
        num_rounds = NUM_ROUNDS if num_samples >= SMALL else NUM_ROUNDS_SMALL
        self._keys = [derive_key(seed, purpose, round_)[0] for round_ in range(num_rounds)]
        self._height = max(2, math.isqrt(num_samples))
        self._width = -(-num_samples // self._height)
        self.num_passes = _passes_needed(num_samples, self._height, self._width)

    def indices(self, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Sample indices (count,) for places `start` to `start + count`, which may span epochs."""
        device = torch.device(device)
        if device.type == "cpu":
            return torch.from_numpy(self._on_host(start, count))
        return self._masked(torch.arange(start, start + count, device=device))

    def at(self, place: Any) -> Any:
        """Sample indices for places in any order: an array for a numpy array, a tensor for a tensor."""
        return self._walk(place) if isinstance(place, np.ndarray) else self._masked(place)

    def _on_host(self, start: int, count: int) -> np.ndarray:
        found = np.empty(count, dtype=np.int64)
        offset = 0
        while offset < count:
            epoch, position = divmod(start + offset, self.num_samples)
            size = min(_CHUNK, count - offset)
            if self.shuffle and self.num_samples >= _MANY:
                size = min(size, self.num_samples - position)
                found[offset : offset + size] = self._walk_through(epoch, position, size)
            else:
                place = np.arange(start + offset, start + offset + size, dtype=np.int64)
                found[offset : offset + size] = self._walk(place)
            offset += size
        return found

    def _walk_through(self, epoch: int, position: int, count: int) -> np.ndarray:
        """Numpy, for neighbouring places of one epoch: the keys are numbers, and halves are words of 32 bits."""
        keys = self._round_keys(epoch)
        cell = self._turn_words(np.arange(position, position + count, dtype=np.int64), keys)
        outside = np.flatnonzero(cell >= self.num_samples)
        while outside.size:
            cell[outside] = self._turn_words(cell[outside], keys)
            outside = outside[cell[outside] >= self.num_samples]
        return cell

    def _turn_words(self, cell: np.ndarray, keys: list[int]) -> np.ndarray:
        """`_turn` in words of 32 bits, whose products wrap around by themselves; four times as fast."""
        rows = cell // self._width
        row, column = rows.astype(np.uint32), (cell - rows * self._width).astype(np.uint32)
        for round_, key in enumerate(keys):
            if round_ % 2 == 0:
                row = _shift_words(row, column, key, self._height)
            else:
                column = _shift_words(column, row, key, self._width)
        return row.astype(np.int64) * self._width + column

    def _walk(self, place: np.ndarray) -> np.ndarray:
        """Numpy: send through again only what is still outside."""
        epoch, position = np.divmod(place, self.num_samples)
        if not self.shuffle:
            return position
        cell = self._turn(position, epoch)
        outside = np.flatnonzero(cell >= self.num_samples)
        while outside.size:
            cell[outside] = self._turn(cell[outside], epoch[outside])
            outside = outside[cell[outside] >= self.num_samples]
        return cell

    def _masked(self, place: Tensor) -> Tensor:
        """Torch: the same walk with a fixed number of passes and no data-dependent shape, hence no wait."""
        epoch = torch.div(place, self.num_samples, rounding_mode="floor")
        position = place - epoch * self.num_samples
        if not self.shuffle:
            return position
        keys = self._round_keys(epoch)
        cell = self._turn(position, epoch, keys)
        for _ in range(self.num_passes - 1):
            cell = torch.where(cell >= self.num_samples, self._turn(cell, epoch, keys), cell)
        return torch.where(cell >= self.num_samples, OUT_OF_PASSES, cell)

    def _round_keys(self, epoch: Any) -> list[Any]:
        return [fold(key, epoch) for key in self._keys]

    def _turn(self, cell: Any, epoch: Any, keys: list[Any] | None = None) -> Any:
        """One pass through the network: a bijection of the grid's cells."""
        height, width = self._height, self._width
        row = cell // width
        column = cell - row * width
        for round_, key in enumerate(keys or self._round_keys(epoch)):
            if round_ % 2 == 0:
                row = _shift(row, column, key, height)
            else:
                column = _shift(column, row, key, width)
        return row * width + column


def _shift(half: Any, other: Any, key: Any, modulus: int) -> Any:
    """Add a keyed hash of the other half, modulo `modulus`, without a division."""
    word = ((other ^ key) * MULTIPLIER_1) & MASK
    word = ((word ^ (word >> 15)) * MULTIPLIER_2) & MASK
    moved = half + ((word * modulus) >> 32)
    return moved - modulus * (moved >= modulus)


def _shift_words(half: np.ndarray, other: np.ndarray, key: int, modulus: int) -> np.ndarray:
    """`_shift` in words of 32 bits."""
    word = other ^ np.uint32(key)
    word *= np.uint32(MULTIPLIER_1)
    word ^= word >> np.uint32(15)
    word *= np.uint32(MULTIPLIER_2)
    moved = half + ((word.astype(np.uint64) * np.uint64(modulus)) >> np.uint64(32)).astype(np.uint32)
    # what is too small for the difference becomes huge
    return np.minimum(moved, moved - np.uint32(modulus))


def _passes_needed(num_samples: int, height: int, width: int) -> int:
    outside = height * width - num_samples
    if outside == 0:
        return 1
    likely = 1 + math.ceil(math.log(num_samples * 1e15) / math.log(max(2, width)))
    return min(outside + 1, likely)
