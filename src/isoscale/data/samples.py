"""Datasets of single samples: each is read alike, whatever process reads it and whatever batch it is for.

Python's, numpy's and torch's generators are seeded by (seed, epoch, index) before a sample is read, and torch has one
thread, because sums in a dataset would change their last bits with the number of threads.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.data.feeds.feed import Part
from isoscale.data.hashing import derive_key, fold
from isoscale.data.sources import DatasetSource, Source, Subset, own_copy, whole


class Request(NamedTuple):
    """Samples that are to be read as one part, and the epoch that each is read in."""

    samples: Tensor
    epochs: Tensor


class Unwanted(Exception):
    """What was being read is not wanted any more."""


def is_dataset(source: Source) -> bool:
    """Whether a source is read sample by sample."""
    return isinstance(whole(source), DatasetSource)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put Python's, numpy's and torch's generators back to where they were, whatever is drawn in between."""
    states = torch.default_generator.get_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


class SampleReader:
    """Reads the samples of a dataset one by one, and puts them together."""

    def __init__(self, source: Source, seed: int) -> None:
        """The dataset of `source`, which may be a subset of it, with random numbers that follow from `seed`."""
        self._subsets: list[Tensor] = []
        while isinstance(source, Subset):
            self._subsets.append(source.indices)
            source = source.source
        assert isinstance(source, DatasetSource)
        self._dataset: Any = source.dataset
        self._collate = source.collate
        self._keys = derive_key(seed, "sample")

    @property
    def name(self) -> str:
        """Of the dataset, for people."""
        return type(self._dataset).__name__

    def indices(self, samples: Tensor) -> Tensor:
        """The places of samples in the dataset itself."""
        for subset in self._subsets:
            samples = subset[samples]
        return samples

    def fetch(self, request: Request, is_wanted: Callable[[int], bool] = lambda index: True) -> Batch:
        """The samples asked for, collated; raises Unwanted before one of them once nobody waits for them."""
        indices = self.indices(request.samples)
        samples = []
        words = np.asarray(fold(fold(np.array(self._keys)[:, None], request.epochs.numpy()), indices.numpy()))
        for index, low, high in zip(indices.tolist(), *words.tolist(), strict=True):
            if not is_wanted(index):
                raise Unwanted
            random.seed(high << 32 | low)
            np.random.seed(high)  # not the word of torch, or both would give the same stream
            torch.default_generator.manual_seed(low)
            with _noted(f"while reading sample {index} of {self.name}"):
                samples.append(self._dataset[index])
        with _noted(f"while putting samples together, the first of them {indices[0]}"):
            return self._collate(samples)


@contextmanager
def _noted(note: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


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
            with kept_generators(), _one_thread():
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
