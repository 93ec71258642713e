"""Several systems whose samples have different shapes: every batch comes from one of them, the same one on all ranks.

Which system a step draws is a keyed function of the step, and a system's own samples come in its own order, without
replacement. So any step is addressable, as it is for one source.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoscale.data.batches import Batch, BatchPlan
from isoscale.data.feeds.feed import Feed, Indices, Part, Slot
from isoscale.data.hashing import derive_key, fold
from isoscale.data.shards import Share
from isoscale.data.sources import SPLITS, Source, Sources, as_source, is_on_disk, is_vectorised, locate, nbytes
from isoscale.errors import UserError

AUTO_SIZE = 32
"""`auto` takes the smallest batch whose samples have at least so many atoms, or whatever a sample is made of."""
_BLOCK = 4096
_SYNONYMS = {"prob_uniform": "uniform", "prob_sys_size": "size"}


class Mixture:
    """Several sources; their samples are numbered one source after the other."""

    def __init__(
        self, systems: Sequence[Any], probabilities: str | Sequence[float] = "uniform", joined: Source | None = None
    ) -> None:
        """`probabilities`: uniform, size, blocks such as `size;0:2:0.3;2:4:0.7`, or a number for each system.

        `joined` has all samples, numbered as here, in one shape: with it, steps of several systems run in one launch.
        """
        if not systems:
            raise UserError("a mixture needs at least one system")
        self.systems: list[Source] = [as_source(system) for system in systems]
        if not self.is_vectorised:
            raise UserError("the systems of a mixture are tensors, files or other sources with `fetch`, not datasets")
        self.probabilities = probabilities
        self.joined = joined
        self.starts = np.cumsum([0, *(len(system) for system in self.systems)])

    def __len__(self) -> int:
        """Samples of all systems together."""
        return int(self.starts[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return sum(nbytes(system) for system in self.systems)

    @property
    def is_vectorised(self) -> bool:
        """Whether every system is."""
        return all(is_vectorised(system) for system in self.systems)

    @property
    def on_disk(self) -> bool:
        """Whether the samples of every system are read from files."""
        return all(is_on_disk(system) for system in self.systems)

    def fetch(self, indices: Tensor) -> Batch:
        """Samples of one system, which is all that a batch can hold."""
        which = np.unique(np.searchsorted(self.starts, indices.numpy(), "right") - 1)
        if len(which) != 1:
            raise UserError(f"samples of the systems {which.tolist()} have shapes of their own and make no batch")
        return self.systems[which[0]].fetch(indices - int(self.starts[which[0]]))

    def locate(self, index: int) -> str:
        """Where a sample is, for people."""
        system = int(np.searchsorted(self.starts, index, "right")) - 1
        return f"system {system}, {locate(self.systems[system], index - int(self.starts[system]))}"


class Systems(Sources):
    """Mixtures for training, validation and test, made of lists of sources."""

    def __init__(
        self,
        train: Sequence[Any],
        val: Sequence[Any] | None = None,
        test: Sequence[Any] | None = None,
        probabilities: str | list[float] = "uniform",
    ) -> None:
        """Each entry is a source, or data with splits of which it takes the one that it stands under."""
        parts = dict(zip(SPLITS, (train, val, test), strict=False))
        mixtures = {}
        for split, given in parts.items():
            if given:
                systems = [getattr(each, split) if isinstance(each, Sources) else each for each in given]
                mixtures[split] = Mixture(systems, probabilities)
        super().__init__(**mixtures)


def system_batch_sizes(mixture: Mixture, wanted: int | Sequence[int] | str) -> list[int]:
    """The batch of each system: one for all, one for each, or `auto` by the size of its samples."""
    systems = mixture.systems
    if isinstance(wanted, str):
        least, _, times = wanted.partition(":")[2].partition("x")
        atoms = [max(1, int(getattr(system, "sample_size", 1))) for system in systems]
        sizes = [-(-int(least or AUTO_SIZE) // number) * int(times or 1) for number in atoms]
    elif isinstance(wanted, int):
        sizes = [wanted] * len(systems)
    else:
        sizes = list(wanted)
    if len(sizes) != len(systems):
        raise UserError(f"data.batch_size lists {len(sizes)} batches, but there are {len(systems)} systems")
    return [min(size, len(system)) for size, system in zip(sizes, systems, strict=True)]


def system_probabilities(wanted: str | Sequence[float], num_batches: Sequence[int]) -> NDArray[np.float64]:
    """How likely each system is drawn; `num_batches` are those of one pass over each."""
    weights = np.asarray(num_batches, dtype=np.float64)
    if not isinstance(wanted, str):
        num_systems, weights = len(num_batches), np.asarray(wanted, dtype=np.float64)
        if weights.shape != (num_systems,) or (weights < 0).any() or not weights.sum() > 0:
            raise UserError(
                f"probabilities: expected {num_systems} numbers, one for each system, not negative and not all 0; "
                f"found {list(wanted)}"
            )
    else:
        kind, _, rest = wanted.partition(";")
        kind = _SYNONYMS.get(kind, kind)
        if kind not in ("uniform", "size") or (rest and kind == "uniform"):
            raise UserError(
                f"probabilities: {wanted!r} is not uniform, size, size;0:2:0.3;2:4:0.7 or a list of numbers"
            )
        weights = np.ones_like(weights) if kind == "uniform" else _in_blocks(weights, rest, wanted)
    return weights / weights.sum()


def _in_blocks(weights: NDArray[np.float64], rest: str, wanted: str) -> NDArray[np.float64]:
    """Blocks `start:stop:weight` share out their weight by size; systems in no block are never drawn."""
    if not rest:
        return weights
    found = np.zeros_like(weights)
    for block in rest.split(";"):
        try:
            start, stop, weight = (float(word) for word in block.split(":"))
        except ValueError:
            raise UserError(f"probabilities: {block!r} in {wanted!r} is not start:stop:weight") from None
        chosen = slice(int(start), int(stop))
        if not weights[chosen].sum() > 0:
            raise UserError(f"probabilities: the block {block!r} holds none of the {len(weights)} systems")
        found[chosen] += weight * weights[chosen] / weights[chosen].sum()
    if (found < 0).any() or not 0 < found.sum() < np.inf:
        raise UserError(f"probabilities: the weights of blocks in {wanted!r} must not be negative, and not all 0")
    return found


class Draws(Protocol):
    """Which system each step takes."""

    def system(self, step: int) -> int:
        """The system of a step."""

    def counts(self, step: int) -> NDArray[np.int64]:
        """How often each system was taken before a step."""


class RandomDraws:
    """Systems drawn with given probabilities, a function of seed and step.

    What is kept may be found twice, but not differently: a feed that reads ahead asks from a thread of its own.
    """

    def __init__(self, seed: int, probabilities: NDArray[np.float64]) -> None:
        """Draws for a seed."""
        self._key = derive_key(seed, "mixture")[0]
        self._edges = np.cumsum(probabilities)[:-1]
        self._num_systems = len(probabilities)
        self._starts = {0: np.zeros(self._num_systems, dtype=np.int64)}
        self._block: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, dtype=np.int64))

    def system(self, step: int) -> int:
        """The system of a step."""
        return int(self._drawn(step // _BLOCK)[step % _BLOCK])

    def systems(self, step: int, count: int) -> NDArray[np.int64]:
        """The systems of `count` steps from `step` on."""
        first, last = step // _BLOCK, (step + count - 1) // _BLOCK
        blocks = np.concatenate([self._drawn(number) for number in range(first, last + 1)])
        return blocks[step - first * _BLOCK :][:count]

    def counts(self, step: int) -> NDArray[np.int64]:
        """How often each system was taken before a step; counted once, block by block."""
        number = step // _BLOCK
        for last in range(len(self._starts) - 1, number):
            self._starts[last + 1] = self._starts[last] + self._counted(self._drawn(last))
        return self._starts[number] + self._counted(self._drawn(number)[: step % _BLOCK])

    def _counted(self, systems: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(systems, minlength=self._num_systems)

    def _drawn(self, number: int) -> NDArray[np.int64]:
        kept, systems = self._block
        if kept != number:
            steps = np.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=np.int64)
            uniform = np.asarray(fold(np.full_like(steps, self._key), steps)) * 2.0**-32
            systems = np.asarray(np.searchsorted(self._edges, uniform, "right"), dtype=np.int64)
            self._block = number, systems
        return systems


class OneAfterTheOther:
    """All batches of the first system, then all of the next: how an evaluation goes through them."""

    def __init__(self, num_batches: Sequence[int]) -> None:
        """The number of batches of each system."""
        self._edges = np.cumsum([0, *num_batches])

    def system(self, step: int) -> int:
        """The system of a step."""
        return int(np.searchsorted(self._edges, step % self._edges[-1], "right") - 1)

    def counts(self, step: int) -> NDArray[np.int64]:
        """How many batches of each system come before a step."""
        passes, rest = divmod(step, int(self._edges[-1]))
        sizes = np.diff(self._edges)
        return passes * sizes + np.clip(rest - self._edges[:-1], 0, sizes)


class MixturePlan:
    """The batches of a mixture: what a BatchPlan says of one source."""

    def __init__(self, plans: Sequence[BatchPlan], draws: Draws, limit: int | None = None, alike: bool = False) -> None:
        """The plans of the systems, and which of them each step takes; at most `limit` batches per epoch.

        `alike` says that the batches of all systems have one shape.
        """
        self.plans = list(plans)
        self._draws = draws
        self._alike = alike
        steps = sum(plan.steps_per_epoch for plan in plans)
        self.steps_per_epoch = steps if limit is None else min(limit, steps)
        self.num_samples = sum(plan.num_samples for plan in plans)
        self.batch_size = max(plan.batch_size for plan in plans)
        self.num_micro, self.num_shards = plans[0].num_micro, plans[0].num_shards

    @property
    def smallest(self) -> int:
        """Samples of the smallest batch of any system."""
        return min(plan.smallest for plan in self.plans)

    def limited(self, limit: int) -> "MixturePlan":
        """The same with at most `limit` batches per epoch."""
        return MixturePlan(self.plans, self._draws, limit, self._alike)

    def where(self, step: int) -> tuple[int, int]:
        """The system of a step, and how many of its batches came before."""
        system = self._draws.system(step)
        return system, int(self._draws.counts(step)[system])

    def size(self, step: int) -> int:
        """Number of samples of the batch of a step."""
        system, number = self.where(step)
        return self.plans[system].size(number)

    def samples_before(self, step: int) -> int:
        """Samples that the steps before this one have seen."""
        counts = self._draws.counts(step)
        return sum(plan.samples_before(int(count)) for plan, count in zip(self.plans, counts, strict=True))

    def share(self, size: int) -> Share:
        """What this rank takes of a batch of `size` rows."""
        return self.plans[0].share(size)

    def place(self, step: int) -> int:
        """How far training has come, in samples."""
        return self.samples_before(step)

    def kind(self, step: int) -> Hashable:
        """Steps of one kind have batches of one shape."""
        if self._alike:
            return self.batch_size
        system, number = self.where(step)
        return system, self.plans[system].size(number)

    def end_of_kind(self, step: int) -> int:
        """The first step after this one whose batch has another shape, as far as the epoch goes."""
        kind, epoch_end = self.kind(step), step - step % self.steps_per_epoch + self.steps_per_epoch
        if self._alike:
            return epoch_end
        end = step + 1
        while end < epoch_end and self.kind(end) == kind:
            end += 1
        return end


class DrawnOrder:
    """The samples of all steps of a mixture whose batches are alike, one after the other."""

    window = 1 << 15
    """Places that are worth evaluating at a time, on the host."""

    def __init__(self, draws: RandomDraws, orders: Sequence[Indices], starts: Sequence[int], batch_size: int) -> None:
        """The orders of the systems, the numbers of their first samples, and the batch that all of them have."""
        self.num_samples = sum(order.num_samples for order in orders)
        self._draws, self._orders, self._starts, self._batch_size = draws, list(orders), list(starts), batch_size

    def indices(self, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Sample indices for `count` places from `start`."""
        size = self._batch_size
        first, last = start // size, -(-(start + count) // size)
        systems, before = self._draws.systems(first, last - first), self._draws.counts(first)
        found = np.empty((last - first, size), dtype=np.int64)
        for number in np.unique(systems):
            mine = np.flatnonzero(systems == number)
            rows = self._orders[number].indices(int(before[number]) * size, len(mine) * size).numpy()
            found[mine] = rows.reshape(-1, size) + self._starts[number]
        return torch.from_numpy(found.reshape(-1)[start - first * size :][:count]).to(device)


class MixtureFeed:
    """Delivers the parts of each step from the feed of its system."""

    def __init__(self, mixture: Mixture, plan: MixturePlan, feeds: Sequence[Feed]) -> None:
        """One feed for each system, each counting the batches of its own."""
        self._starts = [int(start) for start in mixture.starts]
        self._plan = plan
        self._feeds = list(feeds)

    def parts(self, step: int) -> list[list[Part]]:
        """The parts of a step."""
        system, number = self._plan.where(step)
        return _numbered(self._feeds[system].parts(number), self._starts[system])

    def slot(self, step: int, num_steps: int) -> "MixtureSlot":
        """A slot for launches of steps of the kind of `step`."""
        system, number = self._plan.where(step)
        return MixtureSlot(self._plan, self._feeds[system].slot(number, num_steps), self._starts[system])

    def close(self) -> None:
        """Stop reading ahead."""
        for feed in self._feeds:
            feed.close()


class MixtureSlot:
    """The slot of one system."""

    def __init__(self, plan: MixturePlan, slot: Slot, start: int) -> None:
        """`start` is the number of the system's first sample in the mixture."""
        self._plan = plan
        self._slot = slot
        self._start = start

    def fill(self, step: int) -> None:
        """Bring the samples of the launch that begins at `step`."""
        self._slot.fill(self._plan.where(step)[1])

    def parts(self, offset: int) -> list[list[Part]]:
        """The parts of a step of the launch."""
        return _numbered(self._slot.parts(offset), self._start)


def _numbered(shards: list[list[Part]], start: int) -> list[list[Part]]:
    """Parts whose samples are numbered as the mixture numbers them: randomness is keyed by these numbers."""
    if start == 0:
        return shards
    return [[Part(part.batch, torch.add(part.samples, start)) for part in shard] for shard in shards]
