"""The data of a stage: its source, the plan of its batches, and the feed that delivers them."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from isoscale.data.batches import BatchPlan, tensors_of
from isoscale.data.config import Data
from isoscale.data.feed import Feed, Indices
from isoscale.data.order import Order
from isoscale.data.residency import choose, make_feed
from isoscale.data.sources import Source, Sources, Subset, as_source
from isoscale.engine.accelerator import Accelerator
from isoscale.engine.config import Limit
from isoscale.engine.loaders import LoadedData, SamplerOrder, is_data_module, seeded
from isoscale.engine.settings import Settings
from isoscale.errors import UserError


@dataclass
class Role:
    """What one stage reads."""

    source: Source
    plan: BatchPlan
    residency: str
    feed: Feed
    loaded: LoadedData | None = None
    """Where the loaders came from."""


@dataclass
class Wanted:
    """A role's source and how it wants to be read."""

    source: Source
    batch_size: int
    shuffle: bool
    drop_last: bool
    sampler: Any = None


class RoleMaker:
    """Makes the roles of a run from what the user gave as data."""

    def __init__(self, data: Any, settings: Settings, accelerator: Accelerator) -> None:
        """Data is `Sources`, a LightningDataModule or loader, or anything that `as_source` takes for training."""
        self._settings = settings
        self._accelerator = accelerator
        self._loaded = LoadedData(data) if is_data_module(data) else None
        roles = all(hasattr(data, role) for role in ("train", "val", "test"))
        self._sources = None if self._loaded else data if roles else Sources(train=data)

    @property
    def unused(self) -> list[str]:
        """Keys of the data section that say something, where loaders say it themselves."""
        section, plain = self._settings.data, Data()
        keys = ("batch_size", "shuffle", "drop_last") if self._loaded is not None else ()
        return [f"data.{key}" for key in keys if getattr(section, key) != getattr(plain, key)]

    def train(self, num_micro: int, num_shards: int) -> Role:
        """The training data, in the order of the recipe."""
        wanted = self._wanted("train")
        if wanted is None:
            raise UserError("there is no training data")
        source = self._overfit(self._subset(wanted.source), wanted.batch_size)
        order = self._order(source, wanted)
        plan = self._plan(source, wanted, order, self._settings.train.limit_train_batches, num_micro, num_shards)
        return self._role(source, plan, order)

    def evaluation(self, name: str, limit: Limit = None) -> Role | None:
        """Validation, test or prediction data, in the order of the source; None if there is none."""
        wanted = self._wanted(name)
        if name == "val" and self._settings.train.overfit_batches is not None:
            wanted = self._wanted("train")
            assert wanted is not None
            wanted.source = self._overfit(self._subset(wanted.source), wanted.batch_size)
        if wanted is None:
            return None
        order: Indices = Order(len(wanted.source), 0, shuffle=False)
        if wanted.sampler is not None and self._settings.train.overfit_batches is None:
            order = SamplerOrder(wanted.sampler, self._settings.seed)  # it may stand for a part of the dataset
        size = min(self._settings.data.eval_batch_size or wanted.batch_size, order.num_samples)
        return self._role(wanted.source, limited(BatchPlan(order.num_samples, size), limit), order)

    def _wanted(self, role: str) -> Wanted | None:
        section: Data = self._settings.data
        if self._loaded is not None:
            loaded = self._loaded.role(role)
            if loaded is None:
                return None
            return Wanted(loaded.source, loaded.batch_size, loaded.shuffle, loaded.drop_last, loaded.sampler)
        source = getattr(self._sources, role, None)
        return (
            None
            if source is None
            else Wanted(as_source(source), section.batch_size, section.shuffle, section.drop_last)
        )

    def _subset(self, source: Source) -> Source:
        subset = self._settings.data.subset
        if subset is None:
            return source
        count = subset if isinstance(subset, int) else max(1, round(subset * len(source)))
        if count > len(source):
            raise UserError(f"data.subset asks for {count} samples, but there are {len(source)}")
        return Subset(source, Order(len(source), 0, purpose="subset").indices(0, count))

    def _overfit(self, source: Source, batch_size: int) -> Source:
        limit = self._settings.train.overfit_batches
        if limit is None:
            return source
        batches = -(-len(source) // batch_size)
        count = min(len(source), batch_size * num_batches(limit, batches))
        return Subset(source, Order(len(source), self._settings.seed, purpose="overfit").indices(0, count))

    def _order(self, source: Source, wanted: Wanted) -> Indices:
        if wanted.sampler is not None:
            if source is not wanted.source:
                raise UserError("the loader has a sampler of its own: data.subset and train.overfit_batches need none")
            return SamplerOrder(wanted.sampler, self._settings.seed)
        return Order(len(source), self._settings.seed, wanted.shuffle)

    def _plan(
        self, source: Source, wanted: Wanted, order: Indices, limit: Limit, num_micro: int, num_shards: int
    ) -> BatchPlan:
        if wanted.batch_size > order.num_samples:
            raise UserError(
                f"data.batch_size is {wanted.batch_size}, but there are only {order.num_samples} training samples; "
                f"use data.batch_size={order.num_samples} or less"
            )
        plan = BatchPlan(order.num_samples, wanted.batch_size, wanted.drop_last, None, num_micro, num_shards)
        return limited(plan, limit)

    def _role(self, source: Source, plan: BatchPlan, order: Indices) -> Role:
        residency = choose(source, self._settings.data.residency, self._accelerator.total_memory)
        feed = make_feed(residency, source, order, plan, self._accelerator.device)
        return Role(source, plan, residency, feed, self._loaded)


def num_batches(limit: Limit, total: int) -> int:
    """A limit as a number of batches: at least one, at most all."""
    if limit is None:
        return total
    wanted = limit if isinstance(limit, int) else round(limit * total)
    return max(1, min(total, wanted))


def limited(plan: BatchPlan, limit: Limit) -> BatchPlan:
    """A plan with at most so many batches an epoch."""
    return BatchPlan(
        plan.num_samples, plan.batch_size, plan.drop_last, num_batches(limit, plan.steps_per_epoch),
        plan.num_micro, plan.num_shards,
    )  # fmt: skip


def fingerprint(source: Source, num_probes: int = 64) -> str:
    """A hash of a source's size, dtypes, shapes and some of its samples, cheap at any size."""
    probes = torch.linspace(0, len(source) - 1, min(num_probes, len(source)), dtype=torch.float64).long()
    digest = hashlib.sha256(str(len(source)).encode())
    with seeded(0):  # a dataset may augment at random
        samples = source.fetch(probes)
    for tensor in tensors_of(samples):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
