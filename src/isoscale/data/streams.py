"""Streams: loaders that can only be read from their start, such as those of an IterableDataset.

A stream has no places, so that its order is its own. An epoch reads it from its start; a restart in the middle of one
reads again, and passes over, what was seen. Every rank reads all of it and computes its rows of each batch.
"""

import signal
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, default_collate

from isoscale.data.batches import Batch, map_tensors, tensors_of
from isoscale.data.feeds.feed import Part, cut_rows
from isoscale.data.feeds.host import HostSlot, to_device_part
from isoscale.data.generators import seeded
from isoscale.data.hashing import derive_key
from isoscale.data.shards import Share, rank_share
from isoscale.errors import UserError
from isoscale.system.signals import ALL as STOP_SIGNALS

Say = Callable[[str], None]


class StreamSource:
    """The batches of a loader that can only be read from its start."""

    is_vectorised = False
    is_stream = True

    def __init__(self, loader: Any, seed: int, name: str) -> None:
        """What `loader` gives, a batch at a time; `name` is what people call it."""
        self.loader = loader
        self.name = name
        self._seed = seed
        self._first: Batch = None
        self.num_samples = 1
        """As many as an epoch should have."""
        if iter_is_itself(loader):
            raise UserError(
                f"{name} gives a {type(loader).__name__}, an iterator that can be read once only; give an object "
                "whose __iter__ begins anew, such as a DataLoader of an IterableDataset"
            )

    def __len__(self) -> int:
        """As many samples as an epoch should have."""
        return self.num_samples

    def batches(self, epoch: int, number: int = 0) -> Iterator[Batch]:
        """All batches of a reading; whatever they draw at random follows from seed, epoch and place."""
        generator = getattr(self.loader, "generator", None)
        for sampler in _samplers(self.loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        with seeded(derive_key(self._seed, f"stream {number}", epoch)[0], generator), _deaf_workers(self.loader):
            batches = iter(self.loader)
        for position in count():
            with seeded(derive_key(self._seed, f"stream {number}", epoch, position)[0]):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def count(self, most: int | None = None) -> int:
        """Read the stream once, to see how many batches it has; not further than to the `most`."""
        number = 0
        for number, _ in enumerate(self.batches(0), 1):
            if number == most:
                break
        return number

    @property
    def first(self) -> Batch:
        """The first batch."""
        if self._first is None:
            self._first = next(self.batches(0), None)
            if self._first is None:
                raise UserError(f"{self.name} gives no batches: it needs at least one")
        return self._first

    def fetch(self, indices: Tensor) -> Batch:
        """Rows of the first batch, which is all that can be looked at ahead."""
        batch, rows = self.first, num_rows(self.first)
        if any(not tensor.dim() or len(tensor) != rows for tensor in tensors_of(batch)):
            return batch
        return map_tensors(batch, lambda tensor: tensor[indices % rows])


def iter_is_itself(loader: Any) -> bool:
    """Whether this is an iterator, which cannot begin anew."""
    return hasattr(loader, "__next__")


def num_rows(batch: Batch) -> int:
    """The number of samples of a batch: the rows of its first tensor, as Lightning counts them."""
    found = tensors_of(batch)
    return len(found[0]) if found and found[0].dim() else 1


def _samplers(loader: Any) -> list[Any]:
    batches = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


@contextmanager
def _deaf_workers(loader: Any) -> Iterator[None]:
    """Let the worker processes of a loader, which start inside, ignore signals that ask the training to stop."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        yield
        return
    before = loader.worker_init_fn
    loader.worker_init_fn = _Deaf(before)
    try:
        yield
    finally:
        loader.worker_init_fn = before


@dataclass
class _Deaf:
    prepare: Callable[[int], Any] | None

    def __call__(self, number: int) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        if self.prepare is not None:
            self.prepare(number)


@dataclass
class StreamPlan:
    """The batches of a stream, whose sizes are known once they are read."""

    steps_per_epoch: int
    batch_size: int
    """As many samples as a batch should have."""
    num_micro: int = 1
    num_shards: int = 1
    rank: int = 0
    world: int = 1
    last: tuple[int, int] = field(default=(-1, 0))
    """The step that was read last, and how many samples it had."""
    num_read: int = 0
    """Samples of the epoch that is read, so far."""
    is_stream = True

    @property
    def num_samples(self) -> int:
        """Samples that an epoch should have."""
        return self.steps_per_epoch * self.batch_size

    @property
    def smallest(self) -> int:
        """Samples that a batch should have; one that is smaller than the ranks are many is refused when it is read."""
        return self.batch_size

    def size(self, step: int) -> int:
        """Number of samples of the batch of a step, once it is read."""
        return self.last[1] if step == self.last[0] else self.batch_size

    def share(self, size: int) -> Share:
        """What this rank takes of a batch of `size` rows."""
        return rank_share(size, self.num_micro, self.num_shards, self.rank, self.world)

    def place(self, step: int) -> int:
        """How far the samples should have come before a step."""
        return step * self.batch_size

    def samples_before(self, step: int) -> int:
        """Samples that the steps before this one should have seen."""
        return step * self.batch_size

    def limited(self, limit: int) -> "StreamPlan":
        """The same with at most `limit` batches per epoch."""
        return replace(self, steps_per_epoch=min(limit, self.steps_per_epoch))

    def kind(self, step: int) -> Hashable:
        """Of what shape a batch is, nobody knows ahead."""
        return self.size(step)

    def end_of_kind(self, step: int) -> int:
        """The end of the epoch."""
        return step - step % self.steps_per_epoch + self.steps_per_epoch


class StreamFeed:
    """Reads a stream in the thread of the step, from its start in each epoch."""

    def __init__(self, source: StreamSource, plan: StreamPlan, device: torch.device, training: bool, say: Say) -> None:
        """In training, a stream that ends before the epoch does begins again; an evaluation counts samples once."""
        self._source = source
        self._plan = plan
        self._device = device
        self._training = training
        self._say = say
        self._said = False
        self._batches: Iterator[Batch] | None = None
        self._next = -1

    def parts(self, step: int) -> list[list[Part]]:
        """The parts of a step; where it is not the one after the last, the epoch is read again from its start."""
        epoch, position = divmod(step, self._plan.steps_per_epoch)
        if self._batches is None or step != self._next or position == 0:
            self.close()
            if position:
                self._say(f"{self._source.name} is read again from the start of the epoch: {position} batches pass by")
            self._batches = self._of_epoch(epoch)
            for _ in range(position):
                next(self._batches)
        batch = next(self._batches)
        self._next = step + 1
        rows = num_rows(batch)
        self._plan.last = step, rows
        self._plan.num_read = rows + (self._plan.num_read if position else 0)
        samples = torch.arange(rows) + position * self._plan.batch_size
        return [[to_device_part(part, self._device) for part in shard] for shard in self._cut(batch, rows, samples)]

    def _of_epoch(self, epoch: int) -> Iterator[Batch]:
        for number in count():
            found = 0
            for batch in self._source.batches(epoch, number):
                found += 1
                yield batch
            expected, name = self._plan.steps_per_epoch, self._source.name
            if not found:
                raise UserError(f"{name} gives no batches in epoch {epoch}: it must begin anew whenever it is read")
            if not self._training:
                raise UserError(
                    f"{name} gave {found} batches, and {expected} were expected: its length must stay the same, and "
                    "its __len__ must be true"
                )
            if not self._said:
                self._said = True
                self._say(
                    f"{name} ended after {found} batches of an epoch of {expected}, and is read from its start again; "
                    f"train.limit_train_batches={found} lets the epoch end there"
                )

    def _cut(self, batch: Batch, rows: int, samples: Tensor) -> list[list[Part]]:
        plan = self._plan
        share = plan.share(rows)
        if plan.num_micro * plan.num_shards * plan.world == 1:
            is_own = getattr(self._source.loader, "collate_fn", None) is default_collate
            return [[Part(batch if is_own else map_tensors(batch, torch.clone), samples)]]
        others = any(not isinstance(leaf, Tensor | None) for leaf in tree_leaves(batch))
        if others or any(not tensor.dim() or len(tensor) != rows for tensor in tensors_of(batch)):
            raise UserError(
                f"a batch of {self._source.name} is computed in parts, but not all that it holds is a tensor with one "
                f"row for each of its {rows} samples: give tensors that are, or use one rank with parallel.reduce=flat "
                "and train.accumulate=1"
            )
        if self._training and rows < plan.world:
            raise UserError(
                f"a batch of {rows} samples of {self._source.name} does not reach all {plan.world} ranks; use "
                "drop_last=True"
            )
        mine = torch.cat([torch.arange(start, stop) for start, stop in share.rows] or [torch.arange(0)])
        return cut_rows(share, map_tensors(batch, lambda tensor: tensor[mine]), samples[mine])

    def slot(self, step: int, num_steps: int) -> HostSlot:
        """A slot that holds whole batches, if they are all of the shape of this one."""
        return HostSlot(self, self.parts(step), num_steps)

    def close(self) -> None:
        """Forget the reading that is under way; the loader ends its worker processes."""
        self._batches = None
