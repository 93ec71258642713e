"""Transforms that measure the training data before they change it, and their state."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from isoscale.data import rng
from isoscale.data.batches import Batch
from isoscale.data.combined import CombinedSource
from isoscale.data.generators import seeded
from isoscale.data.mixture import Mixture
from isoscale.data.sources import ColumnSource, Source, nbytes, own_copy

BLOCK_BYTES = 64 << 20
"""How much of the data is looked at at a time."""


def fitted(transforms: Sequence[Any]) -> list[tuple[int, Any]]:
    """The transforms that measure data, by their place in the list."""
    return [(place, each) for place, each in enumerate(transforms) if callable(getattr(each, "fit", None))]


def fit(transforms: Sequence[Any], source: Source, say: Callable[[str], None]) -> None:
    """Let each of them measure all samples, in the order of the source, as the transforms before it leave them.

    `say` takes what the user should know of the data.
    """
    for place, transform in fitted(transforms):
        transform.fit(_batches(*_needed(transform, source, transforms[:place])))
        for remark in getattr(transform, "remarks", ()):
            say(remark)


def _needed(transform: Any, source: Source, before: Sequence[Any]) -> tuple[Source, Sequence[Any]]:
    """The part of the data that a transform measures, and what comes before it there; others may look at all of it."""
    keys = [_only_key(each) for each in (*before, transform)]
    if None in keys or not isinstance(source, ColumnSource) or keys[-1] not in source.columns:
        return source, before
    own = ColumnSource({keys[-1]: source.columns[keys[-1]]})
    return own, [each for each in before if each.key == keys[-1]]


def _only_key(transform: Any) -> str | None:
    """The one entry of a batch that a transform looks at, where that is known."""
    own = type(transform).__module__.startswith("isoscale.data.")
    return getattr(transform, "key", None) if own else None


def _batches(source: Source, transforms: Sequence[Any]) -> Iterator[Batch]:
    if isinstance(source, Mixture | CombinedSource):
        for system in source.systems:
            yield from _batches(system, transforms)
        return
    size = max(1, BLOCK_BYTES // max(1, nbytes(source) // len(source)))
    for start in range(0, len(source), size):
        with seeded(0), rng.use(None):
            batch = own_copy(source, source.fetch(torch.arange(start, min(len(source), start + size))))
            for transform in transforms:
                batch = transform(batch)
        yield batch


class FittedStates:
    """What fitted transforms have measured, for a checkpoint."""

    def __init__(self, transforms: Sequence[Any]) -> None:
        """The state of those among `transforms` that measure."""
        self._fitted = fitted(transforms)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors as `place/name`."""
        tensors = {}
        for place, transform in self._fitted:
            tensors.update({f"{place}/{name}": tensor for name, tensor in transform.state().items()})
        return tensors, {}

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over a state."""
        for place, transform in self._fitted:
            own = f"{place}/"
            transform.load({key.removeprefix(own): t for key, t in tensors.items() if key.startswith(own)})
