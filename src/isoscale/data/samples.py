"""Datasets of single samples: each is read alike, whatever process reads it and whatever batch it is for.

Generators that samples draw from are seeded by (seed, epoch, index) before each of them is read, and torch has one
thread, because sums in a dataset would change their last bits with the number of threads. Which generators these are is
seen when the first batch is read; where a later one draws from another, its samples are read again.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from isoscale.data.batches import Batch, tensors_of
from isoscale.data.collate import collate
from isoscale.data.feeds.feed import Part
from isoscale.data.generators import GENERATORS, Generator, Watch
from isoscale.data.hashing import derive_key, fold
from isoscale.data.sources import DatasetSource, Source, Subset, own_copy, whole

MOST_NAMED = 8
"""Samples of a batch, in a message."""


class Request(NamedTuple):
    """Samples that are to be read as one part, and the epoch that each is read in."""

    samples: Tensor
    epochs: Tensor
    step: int = 0
    """That they are read for."""


IsWanted = Callable[[int], bool]
"""Asked before each sample whether somebody waits for it."""


class Unwanted(Exception):
    """What was being read is not wanted any more."""


def is_dataset(source: Source) -> bool:
    """Whether a source is read sample by sample."""
    return isinstance(whole(source), DatasetSource)


class SampleReader:
    """Reads the samples of a dataset one by one, or at once by `__getitems__`, and puts them together."""

    def __init__(self, source: Source, seed: int) -> None:
        """The dataset of `source`, which may be a subset of it, with random numbers that follow from `seed`."""
        self._subsets: list[Tensor] = []
        while isinstance(source, Subset):
            self._subsets.append(source.indices)
            source = source.source
        assert isinstance(source, DatasetSource)
        self._dataset: Any = source.dataset
        self._collate = collate if source.collate is default_collate else source.collate
        self._keys = np.array(derive_key(seed, "sample"))[:, None]
        self._drawn: set[Generator] | None = None
        """What samples, or the collate function, have drawn from so far; None before the first batch."""
        self._reads_at_once = False

    @property
    def name(self) -> str:
        """Of the dataset, for people."""
        return type(self._dataset).__name__

    def indices(self, samples: Tensor) -> Tensor:
        """The places of samples in the dataset itself."""
        for subset in self._subsets:
            samples = subset[samples]
        return samples

    def fetch(self, request: Request, is_wanted: IsWanted | None = None) -> Batch:
        """The samples asked for, collated; raises Unwanted before one of them once nobody waits for them.

        The generators of the process are where they were.
        """
        indices = self.indices(request.samples)
        if self._drawn is None:
            return self._first(indices, request.epochs, is_wanted)
        while True:
            try:
                with Watch(undo=True) as watch:
                    if self._reads_at_once and not self._drawn:
                        samples = self._at_once(indices, is_wanted)
                    else:
                        samples = self._one_by_one(indices, request.epochs, self._drawn, is_wanted)
                    batch = self._together(samples, indices)
            except Exception:
                if watch.drawn <= self._drawn:
                    raise
            if watch.drawn <= self._drawn:
                return batch
            self._drawn |= watch.drawn  # and read all of it again, because they were not seeded for each sample

    def _first(self, indices: Tensor, epochs: Tensor, is_wanted: IsWanted | None) -> Batch:
        """The first batch, with all generators seeded for each sample, to see which are drawn from."""
        drawn: set[Generator] = set()

        def read(index: int) -> Any:
            with Watch() as watch:
                sample = self._dataset[index]
            drawn.update(watch.drawn)
            return sample

        with Watch(undo=True):
            samples = self._one_by_one(indices, epochs, GENERATORS, is_wanted, read)
            with Watch() as watch:
                batch = self._together(samples, indices)
        self._drawn = drawn | watch.drawn
        if not self._drawn and hasattr(self._dataset, "__getitems__"):
            with suppress(Exception), Watch(undo=True):
                again = self._together(self._at_once(indices, is_wanted), indices)
                self._reads_at_once = _has_same_bits(batch, again)
        return batch

    def _one_by_one(
        self, indices: Tensor, epochs: Tensor, seeded: Collection[Generator], is_wanted: IsWanted | None,
        read: Callable[[int], Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        dataset, wanted = self._dataset, indices.tolist()
        seeds: list[tuple[Callable[[int], None], Sequence[int]]] = []
        if seeded:
            low, high = np.asarray(fold(fold(self._keys, epochs.numpy()), indices.numpy())).tolist()
            seeds = [(each.seed, each.seeds(low, high)) for each in seeded]
        samples: list[Any] = []
        try:
            for number, index in enumerate(wanted):
                if is_wanted is not None and not is_wanted(index):
                    raise Unwanted
                for seed, words in seeds:
                    seed(words[number])
                samples.append(dataset[index] if read is None else read(index))
        except Exception as error:
            error.add_note(f"while reading sample {wanted[len(samples)]} of {self.name}")
            raise
        return samples

    def _at_once(self, indices: Tensor, is_wanted: IsWanted | None) -> list[Any]:
        wanted = indices.tolist()
        if is_wanted is not None and not is_wanted(wanted[0]):
            raise Unwanted
        try:
            return list(self._dataset.__getitems__(wanted))
        except Exception as error:
            named = f"{', '.join(map(str, wanted[:MOST_NAMED]))}{' …' * (len(wanted) > MOST_NAMED)}"
            error.add_note(f"while reading samples {named} of {self.name}")
            raise

    def _together(self, samples: list[Any], indices: Tensor) -> Batch:
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(f"while putting samples together, the first of them {indices[0]}")
            raise


def _has_same_bits(one: Batch, other: Batch) -> bool:
    left, right = tensors_of(one), tensors_of(other)
    kinds = [[(each.dtype, each.shape) for each in side] for side in (left, right)]
    return bool(left) and kinds[0] == kinds[1] and all(map(torch.equal, map(_bytes, left), map(_bytes, right)))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


class InProcess:
    """Reads a dataset in the thread that asks, and leaves no trace in the generators."""

    num_ahead = 0

    def __init__(self, source: Source, seed: int = 0) -> None:
        """The dataset of `source`."""
        self._source = source
        self._reader = SampleReader(source, seed)

    def begin(self) -> None:
        """Nothing has to be made ready."""

    def read(self, requests: Iterator[Request]) -> Iterator[Part]:
        """The parts asked for, each read when it is needed."""
        for request in requests:
            with _one_thread():
                batch = self._reader.fetch(request)
            yield Part(own_copy(self._source, batch), request.samples)

    def interrupt(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
