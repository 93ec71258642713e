"""Batches of ragged samples: which samples go together, and the few shapes that all batches have.

A batch has as many samples as the recipe asks for, and an epoch sees every sample once. What is chosen is which
samples share a batch: those of a window of batches are dealt out so that all batches, and inside a batch all shards,
have about as much to do. A function of the seed and of the epoch alone: neither ranks nor restarts are seen in it.
"""

import math
from collections.abc import Hashable
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoscale.data.batches import BatchPlan
from isoscale.data.feeds.feed import Indices
from isoscale.data.hashing import derive_key, fold
from isoscale.data.ragged import Room, levels_of, sizes_of, spare_rows
from isoscale.data.shards import cut

Integers = NDArray[np.int64]

MOST_SHAPES = 8
"""Of the batches of a training: each is captured by itself."""
TAIL_SHAPES = 3
"""Of these, for the smaller last batch of an epoch, where there is one."""
GOOD_ENOUGH = 0.02
"""Share of padding at which one shape more is not worth its capture."""
WINDOW = 64
"""Batches whose samples are dealt out together."""
LOOK_AHEAD = 1024
MOST_EPOCHS = 8
"""Shapes are made for so many batches, but for those of at most so many epochs."""
MULTIPLE = 16
"""Rows of a room are a multiple of this."""
SPARE = 1.1
"""How much larger than all known batches the shape is that others get."""
GROWTH = 1.25
"""From one shape of its own for what is too large to the next."""
MOST_TRIED = 8
"""So many samples are halved by trying all ways."""


class PackedOrder:
    """An order of samples in which batches, and halves of batches, have about as much to do."""

    def __init__(self, order: Indices, work: NDArray[np.float64], plan: BatchPlan, seed: int) -> None:
        """`order` says which samples an epoch sees, and which of them come near each other; `work` is that of each."""
        self.num_samples = order.num_samples
        self.window = plan.num_samples
        """Places that are worth evaluating at a time: an epoch is dealt out as a whole."""
        self._order, self._work, self._plan = order, work, plan
        self._key = derive_key(seed, "packing")[0]
        self._kept: dict[int, Tensor] = {}

    def indices(self, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Sample indices for `count` places from `start`."""
        found, stop, per_epoch = [], start + count, self._plan.num_samples
        while start < stop:
            epoch, first = divmod(start, per_epoch)
            end = min(stop, (epoch + 1) * per_epoch)
            found.append(self._epoch(epoch)[first : first + end - start])
            start = end
        return torch.cat(found).to(device)

    def _epoch(self, number: int) -> Tensor:
        """The samples of an epoch; those of its neighbours are kept, since a feed reads ahead."""
        if number not in self._kept:
            _forget_far(self._kept, number)
            self._kept[number] = torch.from_numpy(self._dealt(number))
        return self._kept[number]

    def _dealt(self, epoch: int) -> Integers:
        per_epoch, size = self._plan.num_samples, self._plan.batch_size
        samples = self._order.indices(epoch * per_epoch, per_epoch).numpy().copy()
        num_batches = per_epoch // size
        num_windows = num_batches // WINDOW
        edge, end = num_windows * WINDOW * size, num_batches * size
        whole = deal(samples[:edge].reshape(num_windows, WINDOW * size), self._work, WINDOW)
        others = deal(samples[None, edge:end], self._work, max(1, num_batches - num_windows * WINDOW))
        batches = np.concatenate([whole.reshape(-1, size), others.reshape(-1, size)])
        # those that were dealt first in a window hold its largest samples: they may come anywhere in it
        numbers = np.arange(num_batches)
        keys = np.asarray(fold(np.full(num_batches, self._key), numbers + epoch * num_batches))
        batches = batches[np.lexsort((keys, numbers // WINDOW))]
        samples[:end] = halved(batches, self._work).reshape(-1)
        if end < per_epoch:
            samples[end:] = halved(samples[None, end:], self._work)[0]
        return samples


def _forget_far(kept: dict[int, Any], number: int) -> None:
    for old in [each for each in kept if abs(each - number) > 1]:
        kept.pop(old, None)  # another thread may have done so


def deal(samples: Integers, work: NDArray[np.float64], hands: int) -> Integers:
    """Samples (…, n) dealt out, as (…, hands, n / hands): the largest that is left goes to who has the least to do."""
    *others, count = samples.shape
    listed = samples.reshape(math.prod(others), count)
    rows = np.take_along_axis(listed, np.argsort(-work[listed], axis=1, kind="stable"), 1)
    each, every = count // hands, np.arange(len(rows))
    found, loads = np.empty((len(rows), hands, each), np.int64), np.zeros((len(rows), hands))
    held = np.zeros((len(rows), hands), np.int64)
    for place in range(count):
        lightest = np.where(held < each, loads, np.inf).argmin(1)
        found[every, lightest, held[every, lightest]] = rows[:, place]
        loads[every, lightest] += work[rows[:, place]]
        held[every, lightest] += 1
    return found.reshape(*others, hands, each)


def halved(batches: Integers, work: NDArray[np.float64]) -> Integers:
    """Batches (batches, n) whose halves have about as much to do, and halves of halves, as far as n can be halved."""
    pieces = batches[:, None, :]
    while pieces.shape[-1] % 2 == 0:
        dealt = (_best_halves if pieces.shape[-1] <= MOST_TRIED else deal)(pieces, work, 2)
        pieces = dealt.reshape(len(batches), -1, dealt.shape[-1])
    return pieces.reshape(batches.shape)


def _best_halves(samples: Integers, work: NDArray[np.float64], hands: int) -> Integers:
    """What `deal` does for two hands, for few samples: the best of all ways, each half with its largest first."""
    count = samples.shape[-1]
    ways = np.asarray([(0, *others) for others in combinations(range(1, count), count // hands - 1)])
    rest = np.asarray([[place for place in range(count) if place not in way] for way in ways.tolist()])
    samples = np.take_along_axis(samples, np.argsort(-work[samples], axis=-1, kind="stable"), -1)
    loads = work[samples]
    best = np.abs(2 * loads[..., ways].sum(-1) - loads.sum(-1, keepdims=True)).argmin(-1)
    both = np.stack([ways[best], rest[best]], -2)
    return np.take_along_axis(samples[..., None, :], both, -1)


Shape = tuple[Room, ...]
"""The room of each part of a batch."""


class Shapes:
    """The few shapes that batches have; one that fits into none gets its own."""

    def __init__(self, needs: Integers, most: int = MOST_SHAPES) -> None:
        """For batches that need so many rows (batches, parts, levels); the last level counts most.

        The last ones are for batches of later epochs that fit into none that was made for those that are known: with
        a little more room, and where there are several parts, with room for the largest in each.
        """
        largest = needs.max(0)
        spare = [largest, np.broadcast_to(largest.max(0), largest.shape)][: min(2, len(largest), most - 1)]
        rooms = np.ceil(SPARE * np.stack(spare)).astype(np.int64)
        self._rooms = np.concatenate([_chosen(needs, most - len(spare)), _up(rooms, MULTIPLE)])

    def shape(self, need: Integers) -> Shape:
        """The smallest shape for a batch that needs so many rows (parts, levels)."""
        fitting = (self._rooms >= need).all((1, 2))
        if fitting.any():
            return _as_shape(self._rooms[int(fitting.argmax())])
        times = float((need / self._rooms[-1]).max())
        more = GROWTH ** math.ceil(math.log(times, GROWTH))
        return _as_shape(_up(np.ceil(more * self._rooms[-1]).astype(np.int64), MULTIPLE))


def _up(counts: Integers, multiple: Any) -> Integers:
    return -(-counts // multiple) * multiple


def _as_shape(rooms: Integers) -> Shape:
    return tuple(tuple(room) for room in rooms.tolist())


def _chosen(needs: Integers, most: int) -> Integers:
    """As few rooms (shapes, parts, levels) as waste little of the last level, the smallest first.

    Batches are sorted by their largest part and cut into runs; a run's rooms are as large as the largest that they are
    for. Where to cut is found by dynamic programming.
    """
    needs = needs[np.argsort(needs[:, :, -1].max(1), kind="stable")]
    last = needs[:, :, -1].astype(np.float64)
    ends = np.unique(np.linspace(0, len(last), 128, dtype=np.int64)[1:])  # where a run may end
    starts = np.concatenate([[0], ends[:-1]])
    tops = np.maximum.reduceat(last, starts, axis=0)
    total, waste = last.sum(), np.full((len(ends), len(ends)), np.inf)
    before = np.concatenate([[0], np.cumsum(last.sum(1))])
    for first, start in enumerate(
        starts
    ):  # waste[i, j]: padding where one shape is for those from starts[i] to ends[j]
        rooms = np.maximum.accumulate(tops[first:], 0).sum(1)
        waste[first, first:] = (ends[first:] - start) * rooms - (before[ends[first:]] - before[start])
    best = waste[0]
    cuts: list[Integers] = []
    while len(cuts) + 1 < min(most, len(ends)) and best[-1] > GOOD_ENOUGH * total:
        tried = best[:-1, None] + waste[1:]  # one run more, from where another ended
        cuts.append(tried.argmin(0))
        best = tried.min(0)
    bounds, end = [len(last)], len(ends) - 1
    for before_it in reversed(cuts):
        end = int(before_it[end])
        bounds.append(int(ends[end]))
    runs = [needs[start:stop].max(0) for start, stop in pairwise([0, *reversed(bounds)])]
    return _up(np.stack(runs), MULTIPLE)


class Packing:
    """What the batches of ragged samples need, and the shape that each gets."""

    def __init__(self, order: Indices, source: Any, plan: BatchPlan, repeats: bool = False) -> None:
        """For the samples of a ragged source in an order; `repeats` says that every epoch is the same."""
        self.plan = plan
        self._order, self._repeats = order, repeats
        self._sizes, self._levels = sizes_of(source), levels_of(source)
        self._spare = np.asarray(spare_rows(source))
        self._kept: dict[int, list[Shape]] = {}
        self._num_tails = int(plan.smallest != plan.batch_size)
        epochs = 1 if repeats else min(MOST_EPOCHS, -(-LOOK_AHEAD // plan.steps_per_epoch))
        whole, tails = zip(*(self._needs(epoch) for epoch in range(epochs)), strict=True)
        most = MOST_SHAPES - TAIL_SHAPES * self._num_tails, TAIL_SHAPES
        self._shapes = [
            Shapes(np.concatenate(needs), count)
            for needs, count in zip((whole, tails), most, strict=True)
            if len(needs[0])
        ]

    def shape(self, step: int) -> Shape:
        """The rooms of all parts of a step."""
        epoch, within = divmod(step, self.plan.steps_per_epoch)
        epoch = 0 if self._repeats else epoch
        if epoch not in self._kept:
            _forget_far(self._kept, epoch)
            needs = [each for each in self._needs(epoch) if len(each)]
            self._kept[epoch] = [
                shapes.shape(need) for shapes, each in zip(self._shapes, needs, strict=True) for need in each
            ]
        return self._kept[epoch][within]

    def in_words(self) -> str:
        """What people should know of it."""
        share, count = self.padding()
        return (
            f"batches of {self.plan.batch_size} samples are packed into {count} shape{'s' * (count > 1)}: "
            f"{100 * share:.1f} % of their {self._levels[-1]} are padding"
        )

    def padding(self, epoch: int = 0) -> tuple[float, int]:
        """The share of rows of the last level that is padding in an epoch, and the number of shapes there."""
        first = epoch * self.plan.steps_per_epoch
        shapes = [self.shape(step) for step in range(first, first + self.plan.steps_per_epoch)]
        laid = sum(room[-1] for shape in shapes for room in shape)
        real = int(self._sizes[self._samples(epoch), -1].sum())
        return 1 - real / max(1, laid), len(set(shapes))

    def _samples(self, epoch: int) -> Integers:
        plan = self.plan
        first = plan.place(epoch * plan.steps_per_epoch)
        return self._order.indices(first, min(plan.num_samples, plan.steps_per_epoch * plan.batch_size)).numpy()

    def _needs(self, epoch: int) -> tuple[Integers, Integers]:
        """Rows (steps, parts, levels) that the parts of whole batches need, and those of a smaller last one."""
        plan, sizes = self.plan, self._sizes[self._samples(epoch)]
        before = np.concatenate([np.zeros_like(sizes[:1]), np.cumsum(sizes, 0)])
        starts = np.arange(plan.steps_per_epoch)[:, None] * plan.batch_size
        num_whole = plan.steps_per_epoch - self._num_tails

        def needed(starts: Integers, size: int) -> Integers:
            firsts, ends = np.asarray([(start, stop) for _, start, stop in all_parts(plan, size)]).T
            return before[starts + ends] - before[starts + firsts] + self._spare

        return needed(starts[:num_whole], plan.batch_size), needed(starts[num_whole:], plan.smallest)


def all_parts(plan: BatchPlan, size: int) -> list[tuple[int, int, int]]:
    """The parts of a batch of `size` that all ranks together compute: their shard, and their rows."""
    num_shards = plan.num_shards if plan.num_shards > 1 else plan.world
    if plan.num_shards > 1:
        pieces = cut(size, plan.num_micro * num_shards)
    else:
        pieces = [(first + start, first + stop) for first, last in cut(size, plan.num_micro)
                  for start, stop in cut(last - first, num_shards)]  # fmt: skip
    return [(number % num_shards, *piece) for number, piece in enumerate(pieces) if piece[1] > piece[0]]


class PackedPlan:
    """The batches of ragged samples: what a BatchPlan says, and the room of each."""

    def __init__(self, packing: Packing, limit: int | None = None) -> None:
        """At most `limit` batches per epoch."""
        self.packing = packing
        self._plan = packing.plan if limit is None else packing.plan.limited(limit)
        self.num_samples, self.batch_size = self._plan.num_samples, self._plan.batch_size
        self.num_micro, self.num_shards = self._plan.num_micro, self._plan.num_shards
        self.steps_per_epoch, self.smallest = self._plan.steps_per_epoch, self._plan.smallest
        self.size, self.share, self.place = self._plan.size, self._plan.share, self._plan.place
        self.samples_before = self._plan.samples_before

    def limited(self, limit: int) -> "PackedPlan":
        """The same with at most `limit` batches per epoch."""
        return PackedPlan(self.packing, limit)

    def rooms(self, step: int) -> list[list[Room]]:
        """The rooms of the parts [shard][micro-batch] of a step that this rank computes."""
        size, shape = self.size(step), self._shape(step)
        found: list[list[Room]] = [[] for _ in self.share(size).parts]
        for (shard, _, _), room in zip(all_parts(self._plan, size), shape, strict=True):
            found[shard].append(room)
        return [rooms if parts else [] for rooms, parts in zip(found, self.share(size).parts, strict=True)]

    def _shape(self, step: int) -> Shape:
        epoch, within = divmod(step, self.steps_per_epoch)
        return self.packing.shape(epoch * self.packing.plan.steps_per_epoch + within)

    def kind(self, step: int) -> Hashable:
        """Steps of one kind have batches of one shape."""
        return self.size(step), self._shape(step)

    def end_of_kind(self, step: int) -> int:
        """The first step after this one whose batch has another shape, or that begins an epoch."""
        kind, epoch_end = self.kind(step), step - step % self.steps_per_epoch + self.steps_per_epoch
        end = step + 1
        while end < epoch_end and self.kind(end) == kind:
            end += 1
        return end
