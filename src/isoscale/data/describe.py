"""What is in a source, in numbers: samples, shapes, types, ranges of values, and how many of each class."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.data.sources import Source, is_rows

CHUNK = 4096
MOST_SAMPLES = 1000
"""How many samples are looked at where each has to be read by itself."""


def describe(source: Source) -> dict[str, Any]:
    """Samples, tensors (shape of one sample, type, smallest and largest value) and classes, as plain values."""
    samples = _samples(source)
    facts: dict[str, _Facts] = {}
    for rows in samples.split(CHUNK):
        for name, tensor in named_tensors(source.fetch(rows)):
            facts.setdefault(name, _Facts(tensor)).add(tensor)
    classes = getattr(source, "classes", None) or ()
    return {
        "samples": len(source),
        "looked_at": len(samples),
        "tensors": {name: fact.plain() for name, fact in facts.items()},
        "classes": {name: fact.counts(classes) for name, fact in facts.items() if classes and fact.is_label},
    }


def named_tensors(batch: Batch, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor of a batch with its place in it: `input`, or `0.positions`."""
    if isinstance(batch, Tensor):
        yield name or "samples", batch
        return
    entries = batch.items() if isinstance(batch, dict) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    for key, value in entries:
        yield from named_tensors(value, f"{name}.{key}" if name else str(key))


class _Facts:
    """What is known of one tensor after some of its rows."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = list(tensor.shape[1:])
        self.dtype = tensor.dtype
        self.is_label = tensor.dim() == 1 and not tensor.is_floating_point() and not tensor.is_complex()
        self._ranges: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        if tensor.numel() and not tensor.is_complex():
            self._ranges.append(torch.stack(tensor.aminmax()))
        if self.is_label:
            self._labels.append(tensor)

    def plain(self) -> dict[str, Any]:
        ranges = torch.stack(self._ranges) if self._ranges else None
        low, high = (None, None) if ranges is None else (ranges[:, 0].min().item(), ranges[:, 1].max().item())
        return {"shape": self.shape, "dtype": str(self.dtype).removeprefix("torch."), "min": low, "max": high}

    def counts(self, classes: Sequence[str]) -> dict[str, int]:
        labels = torch.cat(self._labels)
        known = labels[(labels >= 0) & (labels < len(classes))].long()
        return dict(zip(classes, torch.bincount(known, minlength=len(classes)).tolist(), strict=True))


def _samples(source: Source) -> Tensor:
    """All samples of tensors in memory, and an even choice of those that are read one by one."""
    if is_rows(source) or len(source) <= MOST_SAMPLES:
        return torch.arange(len(source))
    return torch.linspace(0, len(source) - 1, MOST_SAMPLES, dtype=torch.float64).long()
