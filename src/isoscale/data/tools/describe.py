"""What is in a source or in files, in numbers: samples, shapes, types, ranges of values, how many of each class."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.data.columns import Array, Column, blocks
from isoscale.data.files import disk_bytes, find_files
from isoscale.data.formats.lmdb import LmdbSource
from isoscale.data.formats.opening import SUFFIXES, dataset_names, format_of, open_column
from isoscale.data.sources import Source, is_rows
from isoscale.errors import UserError

CHUNK = 4096
MOST_SAMPLES = 1000
"""How many samples are looked at where each has to be read by itself."""
ONLY = "values"
"""What an array without a name is called."""


def describe(source: Source) -> dict[str, Any]:
    """Samples, tensors (shape of one sample, type, smallest and largest value) and classes, as plain values.

    Of a source with `parts()`, also each of these by name, in numbers by their units.
    """
    samples = torch.arange(len(source))
    if len(source) > MOST_SAMPLES and not is_rows(source):  # an even choice of what is read one by one
        samples = torch.linspace(0, len(source) - 1, MOST_SAMPLES, dtype=torch.float64).long()
    facts: dict[str, _Facts] = {}
    for rows in samples.split(CHUNK):
        for name, tensor in named_tensors(source.fetch(rows)):
            facts.setdefault(name, _Facts(tensor)).add(tensor)
    classes = getattr(source, "classes", None) or ()
    parts = getattr(source, "parts", None)
    return {
        "samples": len(source),
        "looked_at": len(samples),
        "parts": parts() if parts is not None else {},
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


def describe_column(column: Column) -> dict[str, Any]:
    """Rows, shape of one, type, range, what is not finite, and a fingerprint; only a block of rows is in memory."""
    content = _Content(column.dtype, column.row_shape)
    with ThreadPoolExecutor(1) as hasher:
        for block in blocks(column):
            content.add(block, hasher)
    return content.plain()


def describe_records(source: Source) -> dict[str, dict[str, Any]]:
    """The same of each tensor of samples that may differ in size, read one by one; such a dimension is None."""
    contents: dict[str, _Content] = {}
    with ThreadPoolExecutor(1) as hasher:
        for index in range(len(source)):
            for name, tensor in named_tensors(source.fetch(torch.tensor([index]))):
                rows = tensor.numpy()
                contents.setdefault(name, _Content(rows.dtype, rows.shape[1:])).add(rows, hasher)
    return {name: content.plain() for name, content in contents.items()}


class _Content:
    """What is known of an array after some of its rows."""

    def __init__(self, dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self._digest = hashlib.sha256()
        self._rows = self._num_finite = self._num_nan = self._num_infinite = 0
        self._total = 0.0
        self._edges: list[Any] = []
        self._shape: list[int | None] = list(row_shape)
        self._last_shape: tuple[int, ...] | None = None
        self._see_shape(row_shape)

    def add(self, rows: Array, hasher: Executor) -> None:
        """Take more rows into account; hashing takes longest, and so has a thread of its own."""
        self._see_shape(rows.shape[1:])
        # What every machine and format agrees on: bytes in C order, the smallest first.
        canonical = np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
        hashing = hasher.submit(self._digest.update, canonical)
        self._count(rows.reshape(-1))
        self._rows += len(rows)
        hashing.result()

    def _see_shape(self, shape: tuple[int, ...]) -> None:
        """The fingerprint covers type and shape: where the shape of rows changes, that is a part of the content."""
        if shape == self._last_shape:
            return
        self._digest.update(f"{self.dtype.newbyteorder('<').str} {list(shape)}\n".encode())
        self._last_shape = shape
        self._shape = [old if old == new else None for old, new in zip_longest(self._shape, shape)]

    def _count(self, values: Array) -> None:
        if self.dtype.kind in "fc":
            self._num_nan += int(np.isnan(values).sum())
            finite = np.isfinite(values)
            self._num_infinite += int(np.isinf(values).sum()) if not finite.all() else 0
            values = values if finite.all() else values[finite]
        if self.dtype.kind == "b":
            values = values.view(np.uint8)
        if values.size and self.dtype.kind != "c":
            self._num_finite += values.size
            self._total += float(values.sum(dtype=np.float64))
            self._edges += [values.min().item(), values.max().item()]

    def plain(self) -> dict[str, Any]:
        """All of it, as plain values; range and mean are those of finite values."""
        return {
            "rows": self._rows,
            "shape": self._shape,
            "dtype": str(self.dtype),
            "min": min(self._edges, default=None),
            "max": max(self._edges, default=None),
            "mean": self._total / self._num_finite if self._num_finite else None,
            "nan": self._num_nan,
            "infinite": self._num_infinite,
            "fingerprint": self._digest.hexdigest(),
        }


def describe_files(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Number of files, bytes on disk, and rows, shape, type, values and fingerprint of each array.

    A pattern is one array in several files; `options` are those of a column (`dataset`, `columns`, `sample_dims`, …).
    """
    files = find_files(path, tuple(SUFFIXES))
    facts = {"files": len(files), "bytes": sum(map(disk_bytes, files))}
    if format_of(files[0]) == "lmdb":
        if len(files) > 1 or options:
            raise UserError(f"{files[0]} holds whole samples: give one such file alone, without options")
        return {**facts, "columns": describe_records(LmdbSource(files[0]))}
    names = dataset_names(files[0]) if "dataset" not in options else None
    chosen = [{}] if names is None else [{"dataset": name} for name in names]
    columns = {
        str({**options, **one}.get("dataset", ONLY)): open_column({"path": path, **options, **one}) for one in chosen
    }
    return {**facts, "columns": {name: describe_column(column) for name, column in columns.items()}}
