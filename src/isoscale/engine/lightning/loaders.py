"""Data loaders and LightningDataModules taken apart: dataset, collate function, batch size and order.

Loaders may be of any framework that gives a `torch.utils.data.DataLoader`. Evaluation counts every sample once, also
where the loader would drop a last, smaller batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from isoscale.data.combined import Mode, mode_of
from isoscale.data.generators import seeded
from isoscale.data.hashing import derive_key
from isoscale.data.sources import Source, as_source
from isoscale.engine.lightning.overrides import overrides
from isoscale.errors import UserError
from isoscale.parallel.collectives import ALONE, Ranks

_METHODS = {
    "train": "train_dataloader",
    "val": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


def is_data_module(data: Any) -> bool:
    """Whether this gives data loaders, as a LightningDataModule does."""
    return hasattr(data, "train_dataloader") or is_loader(data)


def is_loader(data: Any) -> bool:
    """Whether this is a loader, or several of them."""
    if isinstance(data, list | tuple | dict):
        leaves = tree_flatten(data)[0]
        return bool(leaves) and all(isinstance(leaf, DataLoader) for leaf in leaves)
    return isinstance(data, DataLoader) or _is_combined(data)


def _is_combined(loader: Any) -> bool:
    return any(cls.__name__ == "CombinedLoader" for cls in type(loader).__mro__)


class SamplerOrder:
    """The order of a custom sampler, drawn anew each epoch with a seed of its own, so that it can be drawn again."""

    def __init__(self, sampler: Any, seed: int) -> None:
        """The order that `sampler` gives; one that cannot be drawn again is refused."""
        self._sampler = sampler
        self._seed = seed
        self.num_samples = len(sampler)
        self._epoch, self._indices = 0, self._drawn(0)
        if not torch.equal(self._indices, self._drawn(0)):
            raise UserError(
                f"the sampler {type(sampler).__name__} gives another order each time, whatever the seeds of torch, "
                "numpy and random are, so that a restart could not go on; let it draw from torch's generator, or from "
                "the epoch that set_epoch(epoch) tells it"
            )

    def indices(self, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Sample indices for places from `start`, which may span epochs."""
        found = []
        while count > 0:
            epoch, position = divmod(start, self.num_samples)
            piece = self._of_epoch(epoch)[position : position + count]
            found.append(piece)
            start, count = start + len(piece), count - len(piece)
        return torch.cat(found).to(device)

    def _of_epoch(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            self._epoch, self._indices = epoch, self._drawn(epoch)
        return self._indices

    def _drawn(self, epoch: int) -> Tensor:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with seeded(derive_key(self._seed, "sampler", epoch)[0], getattr(self._sampler, "generator", None)):
            indices = torch.tensor(list(self._sampler), dtype=torch.int64)
        if len(indices) != self.num_samples:
            raise UserError(f"the sampler says it has {self.num_samples} samples and gave {len(indices)}")
        return indices


def known_order(sampler: Any) -> Any:
    """A sampler for rows that are told apart by their order: chosen samples come in the order they were chosen in."""
    if isinstance(sampler, RandomSampler | WeightedRandomSampler):
        raise UserError(
            f"the loader draws samples at random ({type(sampler).__name__}), so that nobody could tell predictions "
            "apart; give a loader without a sampler, or with one that has an order of its own"
        )
    return list(sampler.indices) if isinstance(sampler, SubsetRandomSampler) else sampler


class FlatSampler:
    """A batch sampler as a sampler: its batches one after the other, all of one size but perhaps the last."""

    def __init__(self, batches: Any) -> None:
        """Measure the batches of `batches`."""
        self._batches = batches
        sizes = [len(batch) for batch in batches]
        self.batch_size, self._length = max(sizes, default=0), sum(sizes)
        self.is_even = all(size == self.batch_size for size in sizes[:-1])

    def __len__(self) -> int:
        """Samples of an epoch."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        """The samples of every batch."""
        return (index for batch in self._batches for index in batch)

    def set_epoch(self, epoch: int) -> None:
        """Tell the batch sampler, and the sampler inside, which epoch it is."""
        for sampler in (self._batches, getattr(self._batches, "sampler", self._batches)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    @property
    def generator(self) -> Any:
        """The generator that the batches are drawn from, if they have one of their own."""
        own = getattr(self._batches, "generator", None)
        return own if own is not None else getattr(getattr(self._batches, "sampler", None), "generator", None)


class Loaded:
    """A data loader taken apart: its source, batch size and order."""

    def __init__(self, loader: Any) -> None:
        """Take a loader of a map-style dataset apart."""
        self.source: Source = as_source(loader.dataset, loader.collate_fn)
        self.num_workers = loader.num_workers
        self.prepares_workers = loader.num_workers > 0 and loader.worker_init_fn is not None
        self.drop_last = loader.drop_last
        self.shuffle = isinstance(loader.sampler, RandomSampler)
        if type(loader.batch_sampler) is BatchSampler:
            self.batch_size = int(loader.batch_sampler.batch_size)
            self.drop_last = loader.batch_sampler.drop_last
            sampler = loader.batch_sampler.sampler
            self.shuffle = isinstance(sampler, RandomSampler)
            plain = isinstance(sampler, SequentialSampler) or _is_plain_random(sampler)
            if isinstance(sampler, DistributedSampler):  # shares out the data set as isoscale does itself
                plain, self.shuffle = True, sampler.shuffle
            self.sampler: Any = None if plain else sampler
        else:
            self.sampler = FlatSampler(loader.batch_sampler)
            self.batch_size, self.drop_last, self.shuffle = self.sampler.batch_size, False, False


def _is_plain_random(sampler: Any) -> bool:
    return type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)


class LoadedStream:
    """A loader that can only be read from its start: of an IterableDataset, of ready batches, or no DataLoader."""

    def __init__(self, loader: Any, method: str, why: str) -> None:
        """What `loader` gives, batch by batch; `why` says what it is, for people."""
        if not hasattr(loader, "__iter__"):
            raise UserError(f"{method} gives a {type(loader).__name__}; isoscale takes a DataLoader, or an iterable")
        self.loader = loader
        self.name = f"{method} ({why})"
        self.batch_size: int | None = getattr(loader, "batch_size", None) if isinstance(loader, DataLoader) else None
        """None where only the batches tell."""
        try:
            self.length: int | None = len(loader)
        except (TypeError, NotImplementedError):
            self.length = None

    @property
    def remark(self) -> str:
        """Which laws it cannot keep."""
        return (
            f"{self.name} can only be read from its start: its order is its own, every rank reads all of it and "
            "computes its rows of each batch, and a restart in the middle of an epoch reads again what was seen"
        )


@dataclass
class SeveralLoaders:
    """Loaders that are read as one, and how."""

    loaders: list[Loaded | LoadedStream]
    mode: Mode
    form: TreeSpec
    """How their batches stand side by side."""


def taken_apart(loader: Any, method: str, training: bool) -> Loaded | LoadedStream | SeveralLoaders | None:
    """What a loader method gives: one loader, or several in a list, tuple, dict or CombinedLoader."""
    is_combined = _is_combined(loader)
    if not is_combined and not isinstance(loader, list | tuple | dict):
        return None if loader is None else _one_loader(loader, method)
    mode = mode_of(loader._mode) if is_combined else "max_size_cycle" if training else "sequential"
    leaves, form = tree_flatten(loader.iterables if is_combined else loader)
    if not leaves:
        return None
    several = len(leaves) > 1
    loaders = [_one_loader(each, f"loader {n} of {method}" if several else method) for n, each in enumerate(leaves)]
    if not several and mode == "sequential":
        return loaders[0]
    return SeveralLoaders(loaders, mode, form)


def _one_loader(loader: Any, method: str) -> Loaded | LoadedStream:
    if not isinstance(loader, DataLoader):
        return LoadedStream(loader, method, f"a {type(loader).__name__}, which is no DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        return LoadedStream(loader, method, "an IterableDataset")
    if loader.batch_sampler is None:
        return LoadedStream(loader, method, "batch_size=None")
    found = Loaded(loader)
    if isinstance(found.sampler, FlatSampler) and not found.sampler.is_even:
        SamplerOrder(found.sampler, 0)  # refuses what cannot be drawn again
        return LoadedStream(loader, method, "batches of different sizes")
    return found


AnyLoaded = Loaded | LoadedStream | SeveralLoaders


class LoadedData:
    """The loaders of a LightningDataModule, of a module's own methods, or given one by one.

    A data module is prepared once, and set up for a stage when a split of that stage is first asked for.
    """

    def __init__(self, data: Any, ranks: Ranks = ALONE, split: str = "train") -> None:
        """The loaders that `data` gives, or the one of `split` that it is."""
        self.owner = data
        self._ranks = ranks
        self._loaders: dict[str, AnyLoaded | None] = {}
        self._stages: list[str] = []
        if is_loader(data):
            self._loaders = {**dict.fromkeys(_METHODS), split: taken_apart(data, "the loader", split == "train")}

    def split(self, name: str) -> "AnyLoaded | None":
        """The loader of a split, if there is one."""
        if name not in self._loaders:
            self._loaders[name] = self._load(name)
        return self._loaders[name]

    def offers(self, name: str) -> bool:
        """Whether there is a loader of a split, as far as can be told without making it."""
        known = self._loaders.get(name)
        return known is not None or (name not in self._loaders and overrides(self.owner, _METHODS[name]))

    def _load(self, split: str) -> "AnyLoaded | None":
        """Call a loader method, unless it is the framework's own, which only raises."""
        method = _METHODS[split]
        if not overrides(self.owner, method):
            return None
        self._set_up(split)
        loader = getattr(self.owner, method)()
        return taken_apart(loader, method, split == "train")

    def _set_up(self, split: str) -> None:
        stage = {"train": "fit", "val": "fit" if "fit" in self._stages else "validate"}.get(split, split)
        if stage in self._stages:
            return
        if not self._stages:
            prepare_data(self.owner, self._ranks)
        _call(self.owner, "setup", stage)
        self._stages.append(stage)

    def teardown(self) -> None:
        """Let the data module clean up after every stage that it was set up for."""
        while self._stages:
            _call(self.owner, "teardown", self._stages.pop())


def prepare_data(owner: Any, ranks: Ranks) -> None:
    """Let a module or data module fetch its files: on one rank of each host, while the others wait."""
    if ranks.local_rank == 0:
        _call(owner, "prepare_data")
    ranks.any(False, "prepare_data on the first rank of each host")


def _call(owner: Any, name: str, *arguments: Any) -> None:
    method = getattr(owner, name, None)
    if callable(method):
        method(*arguments)
