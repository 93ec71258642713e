"""Several loaders read as one: side by side in every batch, or one after the other.

The batch of a step is a function of the step, as it is for one source: each loader has its own order, its own epochs,
and a place that follows from the step. So any step is addressable, and a restart needs no more than its number.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from isoscale.data.batches import Batch, Plan
from isoscale.data.feeds.feed import Feed, Part, Slot
from isoscale.data.shards import Share
from isoscale.data.sources import Source, is_on_disk, is_vectorised, locate, nbytes
from isoscale.errors import UserError

Mode = Literal["max_size_cycle", "min_size", "max_size", "sequential"]
MODES: tuple[str, ...] = get_args(Mode)


class CombinedSource:
    """The sources of several loaders; their samples are numbered one source after the other."""

    def __init__(self, systems: Sequence[Source]) -> None:
        """One source for each loader."""
        self.systems = list(systems)
        self.starts = [sum(len(system) for system in systems[:number]) for number in range(len(systems))]

    def __len__(self) -> int:
        """Samples of all loaders together."""
        return sum(len(system) for system in self.systems)

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return sum(nbytes(system) for system in self.systems)

    @property
    def is_vectorised(self) -> bool:
        """Whether every source is."""
        return all(is_vectorised(system) for system in self.systems)

    @property
    def on_disk(self) -> bool:
        """Whether every source is read from files."""
        return all(is_on_disk(system) for system in self.systems)

    def fetch(self, indices: Tensor) -> Batch:
        """Samples of one loader, as it gives them."""
        number = self._number(int(indices[0])) if len(indices) else 0
        return self.systems[number].fetch(indices - self.starts[number])

    def locate(self, index: int) -> str:
        """Where a sample is, for people."""
        number = self._number(index)
        return f"loader {number}, {locate(self.systems[number], index - self.starts[number])}"

    def _number(self, index: int) -> int:
        return max(number for number, start in enumerate(self.starts) if start <= index)


@dataclass(frozen=True)
class CombinedPlan:
    """The batches of several loaders: which batch of each loader a step takes."""

    plans: Sequence[Plan]
    mode: Mode
    limit: int | None = None
    """At most so many steps per epoch."""

    @cached_property
    def counts(self) -> list[int]:
        """Batches of one pass over each loader."""
        return [plan.steps_per_epoch for plan in self.plans]

    @cached_property
    def steps_per_epoch(self) -> int:
        """As Lightning's CombinedLoader has it."""
        counts = self.counts
        steps = sum(counts) if self.mode == "sequential" else min(counts) if self.mode == "min_size" else max(counts)
        return steps if self.limit is None else min(steps, self.limit)

    def where(self, step: int) -> list[int | None]:
        """The number of the batch that each loader gives to a step, counted over all its passes; None for no batch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self.mode == "sequential":
            number = self.loader(step)
            within = position - sum(self.counts[:number])
            return [epoch * count + within if each == number else None for each, count in enumerate(self.counts)]
        if self.mode == "max_size_cycle":  # an epoch makes as many passes as it takes, and the next begins a new one
            return [epoch * -(-self.steps_per_epoch // count) * count + position for count in self.counts]
        return [epoch * count + position if position < count else None for count in self.counts]

    def loader(self, step: int) -> int:
        """The loader of a step, where they come one after the other."""
        position = step % self.steps_per_epoch
        return next(number for number in range(len(self.counts)) if position < sum(self.counts[: number + 1]))

    def batch_idx(self, step: int) -> int:
        """The place of a step's batch in one pass over its loader, where they come one after the other."""
        return step % self.steps_per_epoch - sum(self.counts[: self.loader(step)])

    def _given(self, step: int) -> list[tuple[Plan, int]]:
        found = zip(self.plans, self.where(step), strict=True)
        return [(plan, number) for plan, number in found if number is not None]

    @property
    def is_stream(self) -> bool:
        """Whether the shapes of some batches are known only once they are read."""
        return any(getattr(plan, "is_stream", False) for plan in self.plans)

    @property
    def num_samples(self) -> int:
        """Samples of one pass over each loader."""
        return sum(plan.num_samples for plan in self.plans)

    @property
    def batch_size(self) -> int:
        """Samples of the largest batch."""
        return max(plan.batch_size for plan in self.plans)

    @property
    def num_micro(self) -> int:
        """Micro-batches of a batch, in time."""
        return self.plans[0].num_micro

    @property
    def num_shards(self) -> int:
        """Shards of a batch, in space."""
        return self.plans[0].num_shards

    @property
    def smallest(self) -> int:
        """Samples of the smallest batch of any loader."""
        return min(plan.smallest for plan in self.plans)

    def size(self, step: int) -> int:
        """Number of samples that a step counts: those of the first loader that gives it a batch."""
        plan, number = self._given(step)[0]
        return plan.size(number)

    def share(self, size: int) -> Share:
        """What this rank takes of a batch of `size` rows."""
        return self.plans[0].share(size)

    def place(self, step: int) -> int:
        """How far the samples have come before a step."""
        return self.samples_before(step)

    def samples_before(self, step: int) -> int:
        """Samples that the steps before this one have seen, those that an epoch leaves out among them."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return epoch * self._edges[-1] + self._edges[position]

    @cached_property
    def _edges(self) -> list[int]:
        """Samples before each step of an epoch; of a stream as many as it should have."""
        firsts = (self._given(step)[0] for step in range(self.steps_per_epoch))
        sizes = (plan.batch_size if getattr(plan, "is_stream", False) else plan.size(number) for plan, number in firsts)
        return list(accumulate(sizes, initial=0))

    def limited(self, limit: int) -> "CombinedPlan":
        """The same with at most `limit` batches per epoch."""
        return replace(self, limit=limit)

    def kind(self, step: int) -> Hashable:
        """Steps of one kind have batches of one shape, from the same loaders."""
        where = zip(self.plans, self.where(step), strict=True)
        return tuple(None if number is None else plan.kind(number) for plan, number in where)

    def end_of_kind(self, step: int) -> int:
        """The first step after this one whose batch has another shape, or where a loader or the epoch begins anew."""
        ends = [step + plan.end_of_kind(number) - number for plan, number in self._given(step)]
        return min([*ends, step - step % self.steps_per_epoch + self.steps_per_epoch])

    def check_pieces(self, world: int) -> None:
        """Refuse loaders whose batches cannot all be cut alike: the parts of a loss would weigh differently in each."""
        pieces = self.num_micro * (self.num_shards if self.num_shards > 1 else world)
        for number, plan in enumerate(self.plans) if pieces > 1 and self.mode != "sequential" else ():
            sizes = {min(plan.batch_size, plan.num_samples), plan.smallest}
            if getattr(plan, "is_stream", False) or any(size % pieces for size in sizes):
                found = "a stream" if getattr(plan, "is_stream", False) else f"batches of {sorted(sizes)} samples"
                raise UserError(
                    f"several loaders stand side by side in a batch, which is computed in {pieces} parts, and loader "
                    f"{number} gives {found}: every batch of every loader must be a multiple of {pieces}. Use "
                    "drop_last=True and another batch_size, or one rank with parallel.reduce=flat, train.accumulate=1"
                )


class CombinedFeed:
    """Delivers the parts of each step from the feeds of the loaders."""

    def __init__(self, source: CombinedSource, plan: CombinedPlan, feeds: Sequence[Feed], form: TreeSpec) -> None:
        """One feed for each loader, each counting the batches of its own; `form` is how batches stand side by side."""
        self._starts = source.starts
        self.plan = plan
        self._feeds = list(feeds)
        self._form = form

    def parts(self, step: int) -> list[list[Part]]:
        """The parts of a step."""
        found = zip(self._feeds, self.plan.where(step), strict=True)
        return self.joined([None if number is None else feed.parts(number) for feed, number in found])

    def joined(self, of_loaders: Sequence[list[list[Part]] | None]) -> list[list[Part]]:
        """The parts of all loaders as those of one; randomness is keyed by the samples of the first that gives any."""
        given = [(number, shards) for number, shards in enumerate(of_loaders) if shards is not None]
        first, shards = given[0]
        start = self._starts[first]
        if self.plan.mode == "sequential":
            return [[Part(part.batch, torch.add(part.samples, start)) for part in shard] for shard in shards]
        return [
            [
                Part(
                    tree_unflatten([each and each[row][column].batch for each in of_loaders], self._form),
                    torch.add(part.samples, start),
                )
                for column, part in enumerate(shard)
            ]
            for row, shard in enumerate(shards)
        ]

    def slot(self, step: int, num_steps: int) -> "CombinedSlot":
        """A slot for launches of steps of the kind of `step`."""
        found = zip(self._feeds, self.plan.where(step), strict=True)
        slots = [None if number is None else feed.slot(number, num_steps) for feed, number in found]
        return CombinedSlot(self, slots)

    def close(self) -> None:
        """Stop reading ahead."""
        for feed in self._feeds:
            feed.close()


class CombinedSlot:
    """The slots of several loaders."""

    def __init__(self, feed: CombinedFeed, slots: Sequence[Slot | None]) -> None:
        """None for loaders that give nothing to steps of this kind."""
        self._feed = feed
        self._slots = list(slots)

    def fill(self, step: int) -> None:
        """Bring the samples of the launch that begins at `step`."""
        for slot, number in zip(self._slots, self._feed.plan.where(step), strict=True):
            if slot is not None and number is not None:
                slot.fill(number)

    def parts(self, offset: int) -> list[list[Part]]:
        """The parts of a step of the launch."""
        return self._feed.joined([None if slot is None else slot.parts(offset) for slot in self._slots])


def mode_of(wanted: Any) -> Mode:
    """The mode of a CombinedLoader."""
    if wanted not in MODES:
        raise UserError(f"a CombinedLoader has the mode {wanted!r}; isoscale knows {', '.join(MODES)}")
    return wanted
