"""The data of a stage: its source, the plan of its batches, and the feed that delivers them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from isoscale.data.batches import BatchPlan, Plan
from isoscale.data.combined import CombinedFeed, CombinedPlan, CombinedSource
from isoscale.data.config import Data, WindowShuffle
from isoscale.data.feeds.feed import Feed, Indices
from isoscale.data.feeds.host import Fetcher, HostFeed
from isoscale.data.feeds.residency import Place, Residency, choose, make_feed
from isoscale.data.feeds.workers import WorkerPool, count_workers, start_method, why_not_sent
from isoscale.data.hashing import derive_key
from isoscale.data.mixture import (
    DrawnOrder,
    Mixture,
    MixtureFeed,
    MixturePlan,
    OneAfterTheOther,
    RandomDraws,
    system_batch_sizes,
    system_probabilities,
)
from isoscale.data.order import Order
from isoscale.data.packing import PackedOrder, PackedPlan, Packing
from isoscale.data.ragged import is_ragged, work_of
from isoscale.data.samples import InProcess, is_dataset
from isoscale.data.sources import Source, Sources, Subset, as_source, has_splits
from isoscale.data.streams import StreamFeed, StreamPlan, StreamSource, num_rows
from isoscale.data.tiles import TiledCrops
from isoscale.data.window_order import WindowOrder
from isoscale.engine.config import Limit
from isoscale.engine.lightning.loaders import (
    Loaded,
    LoadedData,
    LoadedStream,
    SamplerOrder,
    SeveralLoaders,
    is_data_module,
    known_order,
)
from isoscale.engine.lightning.transfer import HostBatches, hooks_on_host
from isoscale.engine.settings import Settings
from isoscale.errors import UserError
from isoscale.parallel.collectives import ALONE, Ranks
from isoscale.system.devices import Accelerator
from isoscale.system.machine import total_memory, usable_cores
from isoscale.system.printing import echo


@dataclass
class Split:
    """What one stage reads."""

    source: Source
    plan: Plan
    residency: Place
    feed: Feed
    loaded: LoadedData | None = None
    """Where the loaders came from."""
    order: Indices | None = None
    """Of all its samples; None for a mixture, whose systems have orders of their own."""
    loader: Loaded | None = None
    """The one loader that is read."""
    seed: int = 0
    """Of what samples draw at random."""
    of_loaders: Sequence["Split"] = ()
    """The splits of several loaders that are read as one."""


@dataclass
class Wanted:
    """A split's source and how it wants to be read."""

    source: Source
    batch_size: int
    shuffle: bool | WindowShuffle
    drop_last: bool
    sampler: Any = None
    loader: Loaded | None = None


class SplitMaker:
    """Makes the splits of a run from what the user gave as data."""

    def __init__(
        self, data: Any, settings: Settings, accelerator: Accelerator, ranks: Ranks = ALONE, num_shards: int = 1,
        loader_ranks: int = 1, say: Callable[[str], None] = lambda text: None, task: Any = None,
    ) -> None:  # fmt: skip
        """Data is `Sources`, a LightningDataModule or loader, or anything that `as_source` takes for training.

        Batches are cut into `num_shards` and shared out among the ranks. A loader's batch is that of one rank, and
        `loader_ranks` of them make a whole one. `say` takes what the user should know of the data. A `task` may
        have hooks that see batches on the host.
        """
        self._settings = settings
        self._loader_ranks = loader_ranks
        self._say = say
        self._num_shards, self._ranks = num_shards, ranks
        self._plan_of = partial(BatchPlan, num_shards=num_shards, rank=ranks.rank, world=ranks.world_size)
        self._accelerator = accelerator
        self._are_batches_ours = isinstance(data, IterableDataset)
        if isinstance(data, IterableDataset):
            size = settings.data.batch_size
            data = DataLoader(data, size if isinstance(size, int) else None, drop_last=settings.data.drop_last)
        self._loaded = data if isinstance(data, LoadedData) else None
        if is_data_module(data):
            self._loaded = LoadedData(data, ranks)
        self.hooks_on_host = hooks_on_host(task, self._loaded)
        """Of the task or the data module, before batches are on the device."""
        self._sources = None if self._loaded else data if has_splits(data) else Sources(train=data)

    @property
    def unused(self) -> list[str]:
        """Keys of the data section that say something, where loaders say it themselves."""
        section, plain = self._settings.data, Data()
        decide = self._loaded is not None and not self._are_batches_ours
        keys = ("batch_size", "shuffle", "drop_last") if decide else ()
        return [f"data.{key}" for key in keys if getattr(section, key) != getattr(plain, key)]

    @property
    def has_test(self) -> bool:
        """Whether there is test data, as far as can be told: loaders are not made to find out."""
        return self._loaded is not None or getattr(self._sources, "test", None) is not None

    def others(self, name: str) -> list[str]:
        """The other splits that there is data for."""
        splits = [split for split in ("train", "val", "test", "predict") if split != name]
        if self._loaded is not None:
            return [split for split in splits if self._loaded.offers(split)]
        return [split for split in splits if getattr(self._sources, split, None) is not None]

    def train(self, num_micro: int = 1, decided: Residency = "auto") -> Split:
        """The training data, in the order of the recipe; `decided` is where it lived at the first start."""
        limit, loaded = self._settings.train.limit_train_batches, self._loaders_of("train")
        if loaded is not None:
            return self._of_loaders(loaded, True, limit, num_micro=num_micro)
        wanted = self._wanted("train")
        if wanted is None:
            raise UserError("there is no training data")
        if isinstance(wanted.source, Mixture):
            return self._mixture(wanted.source, self._settings.seed, limit, num_micro, decided)
        return self._training(wanted, limit, num_micro, decided)

    def _training(
        self, wanted: Wanted, limit: Limit, num_micro: int, decided: Residency = "auto", seed: int | None = None
    ) -> Split:
        source = self._overfit(self._subset(wanted.source), wanted.batch_size)
        order = self._order(source, wanted, self._settings.seed if seed is None else seed)
        if self._settings.data.loader_batches > 1:
            self._join_batches(wanted, order.num_samples)
            num_micro *= self._settings.data.loader_batches
        plan = self._plan(source, wanted, order, limit, num_micro)
        if is_ragged(source):
            return self._packed(source, plan, order, decided, shuffled=bool(wanted.shuffle))
        return self._split(source, plan, order, decided, wanted.loader, seed)

    def evaluation(
        self, name: str, limit: Limit = None, by_row: bool = False, for_writing: bool = False
    ) -> Split | None:
        """Validation, test or prediction data, in the order of the source; None if there is none.

        With `by_row` people tell rows apart by their order, so that it must not be drawn at random; with `for_writing`
        the task makes something else of them than rows, for which the data may have other samples (`for_prediction`).
        """
        loaded = self._loaders_of(name)
        if loaded is not None and (name != "val" or self._settings.train.overfit_batches is None):
            return self._of_loaders(loaded, False, limit, by_row)
        wanted = self._wanted(name, for_writing)
        if wanted is not None and isinstance(wanted.source, Mixture):
            return self._mixture(wanted.source, None, limit)
        if name == "val" and self._settings.train.overfit_batches is not None:
            wanted = self._wanted("train")
            assert wanted is not None
            wanted.source = self._overfit(self._subset(wanted.source), wanted.batch_size)
            wanted.sampler = None
        return None if wanted is None else self._evaluated(wanted, name, limit, by_row)

    def _evaluated(self, wanted: Wanted, name: str, limit: Limit, by_row: bool, seed: int | None = None) -> Split:
        if not len(wanted.source):
            raise UserError(f"the {name} data has no samples: it needs at least one row")
        order: Indices = Order(len(wanted.source), 0, shuffle=False)
        if wanted.sampler is not None:
            sampler = known_order(wanted.sampler) if by_row else wanted.sampler
            order = SamplerOrder(sampler, self._settings.seed if seed is None else seed)
            # it may stand for a part of the dataset
        if not order.num_samples:
            raise UserError(f"the sampler of the {name} data gives no samples: it needs at least one")
        size = self._settings.data.eval_batch_size or max(wanted.batch_size, getattr(wanted.source, "rows_at_once", 0))
        size = min(size, order.num_samples)
        plan = limited(self._plan_of(order.num_samples, size), limit)
        if is_ragged(wanted.source):
            return self._packed(wanted.source, plan, order)
        return self._split(wanted.source, plan, order, "auto", wanted.loader, seed)

    def _packed(
        self, source: Source, plan: BatchPlan, order: Indices, decided: Residency = "auto", shuffled: bool = False
    ) -> Split:
        """Samples of many sizes, in batches of a few shapes; those that are shuffled are dealt out evenly besides."""
        if shuffled:
            order = PackedOrder(order, work_of(source), plan, self._settings.seed)
        packing = Packing(order, source, plan, repeats=not shuffled)
        if shuffled:
            self._say(packing.in_words())
        return self._split(source, PackedPlan(packing), order, decided)

    def _loaders_of(self, name: str) -> LoadedStream | SeveralLoaders | None:
        """The loader of a split that is a stream, or several loaders; None for one with places, or none at all."""
        loaded = self._loaded.split(name) if self._loaded is not None else None
        return loaded if isinstance(loaded, LoadedStream | SeveralLoaders) else None

    def _of_loaders(
        self, loaded: LoadedStream | SeveralLoaders, training: bool, limit: Limit, by_row: bool = False,
        num_micro: int = 1,
    ) -> Split:  # fmt: skip
        """Streams, and several loaders as one."""
        is_stream = isinstance(loaded, LoadedStream)
        self._refuse("one loader with places" if is_stream else "one loader", training, samples_too=not is_stream)
        if isinstance(loaded, LoadedStream):
            return self._stream(loaded, training, limit, num_micro)
        in_sequence = loaded.mode == "sequential"
        of_each = limit if in_sequence and not training else None  # as Lightning limits them
        splits = [
            self._of_one(each, number, training, of_each, by_row, num_micro)
            for number, each in enumerate(loaded.loaders)
        ]
        plan = CombinedPlan([split.plan for split in splits], loaded.mode)
        plan = limited(plan, None if of_each is not None else limit)
        plan.check_pieces(self._ranks.world_size)
        source = CombinedSource([split.source for split in splits])
        residency: Place = "device" if all(split.residency == "device" for split in splits) else "host"
        feed = CombinedFeed(source, plan, [split.feed for split in splits], loaded.form)
        return Split(source, plan, residency, feed, self._loaded, of_loaders=splits)

    def _of_one(
        self, loaded: Loaded | LoadedStream, number: int, training: bool, limit: Limit, by_row: bool, num_micro: int
    ) -> Split:
        """One of several loaders, with an order and random numbers of its own."""
        seed = derive_key(self._settings.seed, "loader", number)[0] if number else self._settings.seed
        if isinstance(loaded, LoadedStream):
            return self._stream(loaded, training, limit, num_micro, seed)
        wanted = self._as_wanted(loaded)
        if training:
            return self._training(wanted, limit, num_micro, seed=seed)
        return self._evaluated(wanted, f"loader {number}", limit, by_row, seed)

    def _stream(
        self, loaded: LoadedStream, training: bool, limit: Limit, num_micro: int, seed: int | None = None
    ) -> Split:
        """A loader that can only be read from its start, with as many steps as it, or the user, says."""
        source = StreamSource(loaded.loader, self._settings.seed if seed is None else seed, loaded.name)
        self._say(loaded.remark)
        size = loaded.batch_size or num_rows(source.first)
        drawn, steps = self._settings.data.samples_per_epoch if training else None, self._settings.train.steps
        length = loaded.length if drawn is None else -(-drawn // size)
        if length is None and isinstance(limit, float):
            raise UserError(
                f"{loaded.name} does not say how many batches it has, so that nobody knows what {limit} of them are; "
                "give its dataset a __len__, or a number of batches"
            )
        if length is None and limit is None and training and steps is not None:
            length = steps
        if length is None and limit is None:
            self._say(
                f"{loaded.name} does not say how many batches it has, so that it is read once to count them; "
                f"{'train.limit_train_batches' if training else 'train.limit_val_batches'} or a __len__ makes that "
                "unnecessary"
            )
            length = source.count()
        steps = num_batches(limit, length) if length is not None else int(limit or 0)
        if not steps:
            raise UserError(f"{loaded.name} gives no batches: it needs at least one")
        plan = StreamPlan(steps, size, num_micro, self._num_shards, self._ranks.rank, self._ranks.world_size)
        source.num_samples = plan.num_samples
        feed = self._on_host(StreamFeed(source, plan, self._feed_device, training, self._say))
        return Split(source, plan, "host", feed, self._loaded)

    def _mixture(
        self, mixture: Mixture, seed: int | None, limit: Limit, num_micro: int = 1, decided: Residency = "auto",
    ) -> Split:  # fmt: skip
        """Batches of several systems: drawn at random for a seed, else one system after the other."""
        section = self._settings.data
        training = seed is not None
        self._check_for_mixture()
        wanted = section.batch_size if training else section.eval_batch_size or section.batch_size
        if isinstance(wanted, list) and not training and len(wanted) != len(mixture.systems):
            wanted = max(wanted)  # the list is for the systems that are trained on
        sizes = system_batch_sizes(mixture, wanted)
        drop_last = section.drop_last and training
        plans = [
            self._plan_of(len(system), size, drop_last, num_micro=num_micro)
            for system, size in zip(mixture.systems, sizes, strict=True)
        ]
        num_batches_of = [plan.steps_per_epoch for plan in plans]
        orders = [self._system_order(number, system, seed) for number, system in enumerate(mixture.systems)]
        residency = self._residency(mixture, decided)
        if not training:
            plan = limited(MixturePlan(plans, OneAfterTheOther(num_batches_of)), limit)
            return Split(mixture, plan, residency, self._feed_of(mixture, plan, residency, orders), self._loaded)
        draws = RandomDraws(seed or 0, system_probabilities(mixture.probabilities, num_batches_of))
        is_whole = all(plan.num_samples % plan.batch_size == 0 for plan in plans) and len(set(sizes)) == 1
        plan = limited(MixturePlan(plans, draws, alike=is_whole and mixture.joined is not None), limit)
        if mixture.joined is None or not is_whole:
            return Split(mixture, plan, residency, self._feed_of(mixture, plan, residency, orders), self._loaded)
        order = DrawnOrder(draws, orders, mixture.starts.tolist(), sizes[0])
        feed = make_feed(residency, mixture.joined, order, plan, self._device)
        return Split(mixture, plan, residency, feed, self._loaded)

    def _feed_of(
        self, mixture: Mixture, plan: MixturePlan, residency: Place, orders: Sequence[Indices]
    ) -> MixtureFeed:  # fmt: skip
        feeds = [
            make_feed(residency, system, order, own, self._device)
            for system, order, own in zip(mixture.systems, orders, plan.plans, strict=True)
        ]
        return MixtureFeed(mixture, plan, feeds)

    def _check_for_mixture(self) -> None:
        """Refuse what is said about one source, rather than pass over it."""
        self._refuse("one source, not for a mixture of systems", training=True)

    def _refuse(self, what: str, training: bool, samples_too: bool = True) -> None:
        """Refuse keys of the recipe that are for something else than this data."""
        section = self._settings.data
        said = {
            "data.samples_per_epoch": section.samples_per_epoch is not None and samples_too,
            "data.loader_batches (accumulate_grad_batches)": section.loader_batches > 1,
            "data.shuffle with blocks and windows": not isinstance(section.shuffle, bool),
            "data.subset": section.subset is not None,
            "train.overfit_batches": self._settings.train.overfit_batches is not None,
        }
        for key in (key for key, is_said in said.items() if is_said and training):
            raise UserError(f"{key} is for {what}; leave it out")

    def _system_order(self, number: int, system: Source, seed: int | None) -> Indices:
        shuffled = seed is not None and bool(self._settings.data.shuffle)
        return Order(len(system), seed or 0, shuffled, purpose=f"order of system {number}")

    @property
    def _stays_on_host(self) -> bool:
        """Whether hooks bring batches to another device, themselves or after they have seen them."""
        return bool(self.hooks_on_host) and self._device.type != "cpu"

    @property
    def _feed_device(self) -> torch.device:
        return torch.device("cpu") if self._stays_on_host else self._device

    def _on_host(self, feed: Feed) -> Feed:
        return HostBatches(feed, self._device) if self._stays_on_host else feed

    @property
    def _device(self) -> torch.device:
        return self._accelerator.device

    def _residency(self, source: Source, decided: Residency, order: Indices | None = None) -> Place:
        wanted = self._settings.data.residency
        wanted = decided if wanted == "auto" else wanted
        return choose(source, wanted, self._accelerator.total_memory, total_memory(), order)

    def _wanted(self, split: str, for_writing: bool = False) -> Wanted | None:
        section: Data = self._settings.data
        if self._loaded is not None:
            loaded = self._loaded.split(split)
            return self._as_wanted(loaded) if isinstance(loaded, Loaded) else None
        chosen = getattr(self._sources, "for_prediction", None) if for_writing else None
        given = getattr(self._sources, split, None) if chosen is None else chosen(split)
        if given is None:
            return None
        source = as_source(given)
        return Wanted(source, _one_size(source, section.batch_size), section.shuffle, section.drop_last)

    def _join_batches(self, wanted: Wanted, num_samples: int) -> None:
        """Let several batches of the loader make one update, of which they are the micro-batches."""
        count = self._settings.data.loader_batches
        if self._loaded is None:
            raise UserError(
                "data.loader_batches (accumulate_grad_batches) is for DataLoaders: here data.batch_size is the batch "
                "of an update, and train.accumulate cuts it"
            )
        num_batches, whole = num_samples // wanted.batch_size, wanted.batch_size * count
        if wanted.drop_last and num_batches % count:
            raise UserError(
                f"the loader drops its last batch and has {num_batches} others, which accumulate_grad_batches={count} "
                "does not divide: leave out drop_last, or choose a number that does"
            )
        wanted.batch_size = min(whole, num_samples)

    def _as_wanted(self, loaded: Loaded) -> Wanted:
        size = loaded.batch_size * self._loader_ranks
        return Wanted(loaded.source, size, loaded.shuffle, loaded.drop_last, loaded.sampler, loaded)

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

    def _order(self, source: Source, wanted: Wanted, seed: int) -> Indices:
        if wanted.sampler is not None:
            if source is not wanted.source:
                raise UserError("the loader has a sampler of its own: data.subset and train.overfit_batches need none")
            return SamplerOrder(wanted.sampler, seed)
        if isinstance(source, TiledCrops):
            if wanted.shuffle is not True:
                raise UserError("data.tile has an order of its own, from tiles to tiles: leave data.shuffle out")
            return source.order(seed)
        if isinstance(wanted.shuffle, WindowShuffle):
            blocks = wanted.shuffle
            return WindowOrder(len(source), seed, blocks.samples_per_block, blocks.blocks_per_window)
        return Order(len(source), seed, wanted.shuffle)

    def _plan(self, source: Source, wanted: Wanted, order: Indices, limit: Limit, num_micro: int) -> BatchPlan:
        if wanted.batch_size > order.num_samples:
            raise UserError(
                f"data.batch_size is {wanted.batch_size}, but there are only {order.num_samples} training samples; "
                f"use data.batch_size={order.num_samples} or less"
            )
        drawn = self._settings.data.samples_per_epoch or order.num_samples
        if wanted.batch_size > drawn:
            raise UserError(
                f"data.samples_per_epoch is {drawn}, less than one batch (data.batch_size is {wanted.batch_size}); "
                f"use data.samples_per_epoch={wanted.batch_size} or more"
            )
        return limited(self._plan_of(drawn, wanted.batch_size, wanted.drop_last, num_micro=num_micro), limit)

    def _split(
        self, source: Source, plan: BatchPlan | PackedPlan, order: Indices, decided: Residency = "auto",
        loader: Loaded | None = None, seed: int | None = None,
    ) -> Split:  # fmt: skip
        residency = self._residency(source, "host" if self._stays_on_host else decided, order)
        feed = self._on_host(make_feed(residency, source, order, plan, self._feed_device))
        seed = self._settings.seed if seed is None else seed
        return Split(source, plan, residency, feed, self._loaded, order, loader, seed)


def _one_size(source: Source, wanted: Any) -> int:
    """The batch size of a source; a mixture has several and looks for itself."""
    if isinstance(wanted, int) or isinstance(source, Mixture):
        return wanted if isinstance(wanted, int) else 0
    raise UserError(f"data.batch_size is {wanted}, which is for a mixture of systems; give one number")


def num_batches(limit: Limit, total: int) -> int:
    """A limit as a number of batches: at least one, at most all."""
    if limit is None:
        return total
    wanted = limit if isinstance(limit, int) else round(limit * total)
    return max(1, min(total, wanted))


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def limited(plan: AnyPlan, limit: Limit) -> AnyPlan:
    """A plan with at most so many batches per epoch."""
    return plan.limited(num_batches(limit, plan.steps_per_epoch))


def read_dataset(
    split: Split, name: str, settings: Settings, device: torch.device, say: Callable[[str], None], ranks: Ranks
) -> None:
    """Let the dataset of a split be read by the worker processes that the recipe, or the loader, asks for."""
    for each in split.of_loaders:
        read_dataset(each, name, settings, device, say, ranks)
    feed = split.feed.feed if isinstance(split.feed, HostBatches) else split.feed
    if isinstance(feed, HostFeed) and is_dataset(split.source):
        cores = max(1, int(usable_cores() / ranks.num_here))
        warn = partial(_warn, say, ranks)
        feed.read_with(_fetcher(split, settings, device, say, cores, warn))
    elif name == "train" and not split.of_loaders and settings.data.workers not in ("auto", 0):
        say("data.workers is not used: worker processes are for a Dataset, which is read sample by sample")


def _fetcher(
    split: Split, settings: Settings, device: torch.device, say: Callable[[str], None], cores: int,
    warn: Callable[[str], None],
) -> Fetcher:  # fmt: skip
    source, loaded = split.source, split.loader
    asked, method = settings.data.workers, start_method(device)
    count = count_workers(asked, loaded.num_workers if loaded else None, cores)
    why = why_not_sent(source) if count and method == "spawn" else None
    if why is not None and asked != "auto":
        raise UserError(
            f"data.workers is {asked}, but the dataset cannot be sent to another process: {why}. Move it, its "
            "transforms and its collate function from the script or function into a module, or use data.workers=0"
        )
    if why is not None:
        say(f"the dataset is read in the training process, because it cannot be sent to another one: {why}")
    if why is not None or not count:
        return InProcess(source, split.seed)
    if loaded is not None and loaded.prepares_workers:
        say("the loader's worker_init_fn is not called: every sample has its own seeds")
    return WorkerPool(source, split.seed, count, method, warn)


def _warn(say: Callable[..., None], ranks: Ranks, text: str) -> None:
    """Tell the user; of a rank whose words are not shown, whoever keeps its stderr."""
    say(text, "warning")
    if not ranks.is_main:
        echo(f"{ranks.name(ranks.rank)}: {text}", err=True)
