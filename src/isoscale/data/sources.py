"""Random access to samples: `len(source)` and `source.fetch(indices)`, vectorised, in the stored dtype."""

import math
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from isoscale.data.batches import Batch, map_tensors, tensors_of
from isoscale.data.columns import MOST_LABEL_BYTES, Column, as_tensor, row_bytes
from isoscale.data.formats.views import place
from isoscale.data.order import Order
from isoscale.errors import UserError


@runtime_checkable
class Source(Protocol):
    """What the engine asks of data."""

    def __len__(self) -> int:
        """Number of samples."""

    def fetch(self, indices: Tensor) -> Batch:
        """The samples at `indices` (batch,), rows in the order asked, in the stored dtype."""


class TensorSource:
    """Samples held in memory, as tensors that share their first dimension."""

    is_rows = True

    def __init__(self, tensors: Batch, classes: Sequence[str] | None = None, name: str = "") -> None:
        """A dict, list or tuple of tensors or arrays, one row per sample.

        `classes` names what labels stand for, and `name` is the file that the rows were read from.
        """
        self.tensors = _as_tensors(tensors)
        self.classes = classes
        self.name = name
        lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(self.tensors)}
        if len(lengths) != 1:
            raise UserError(f"every tensor needs one row per sample, but the numbers of rows are {sorted(lengths)}")
        self._length = lengths.pop()

    def __len__(self) -> int:
        """Number of samples."""
        return self._length

    def fetch(self, indices: Tensor) -> Batch:
        """The rows at `indices`."""
        return map_tensors(self.tensors, lambda tensor: tensor.index_select(0, indices))

    def locate(self, index: int) -> str:
        """Where a sample is, for people."""
        return f"{self.name}, row {index}" if self.name else f"sample {index}"


class Subset:
    """Some of the samples of another source, in a given order."""

    def __init__(self, source: Source, indices: Tensor) -> None:
        """The samples of `source` at `indices`."""
        self.source = source
        self.indices = indices

    @property
    def classes(self) -> Sequence[str] | None:
        """What labels stand for, where the whole source says so."""
        return getattr(self.source, "classes", None)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.indices)

    def fetch(self, indices: Tensor) -> Batch:
        """The samples at `indices` of the subset."""
        return self.source.fetch(self.indices[indices])

    def locate(self, index: int) -> str:
        """Where a sample is, for people."""
        return locate(self.source, int(self.indices[index]))


class DatasetSource:
    """Any map-style `torch.utils.data.Dataset`, with its collate function."""

    is_vectorised = False

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Batch] | None = None) -> None:
        """Samples `dataset[i]`, put together by `collate` (torch's default one)."""
        self.dataset = dataset
        self.collate = collate or default_collate
        self._length = len(dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Number of samples."""
        return self._length

    def fetch(self, indices: Tensor) -> Batch:
        """The samples at `indices`, collated."""
        wanted = indices.tolist()
        if hasattr(self.dataset, "__getitems__"):
            return self.collate(self.dataset.__getitems__(wanted))
        return self.collate([self.dataset[index] for index in wanted])


def as_source(data: Any, collate: Callable[[list[Any]], Batch] | None = None) -> Source:
    """Make a source of what people have: a source, tensors, arrays, a `Dataset`.

    With a collate function, which is how a data loader reads, lists and arrays too are datasets of samples.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, TensorDataset) and collate in (None, default_collate):
        return TensorSource(tuple(data.tensors))
    if collate is None and isinstance(data, Tensor | np.ndarray | Mapping | tuple | list):
        return TensorSource(data)
    if hasattr(data, "to_numpy"):
        raise UserError(
            f"cannot read samples from a {type(data).__name__}: say which columns are what, and give arrays, such as "
            "{'input': table[NAMES].to_numpy(), 'target': table[[NAME]].to_numpy()}"
        )
    without_places = isinstance(data, str | bytes | IterableDataset)
    if not without_places and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSource(data, collate)
    raise UserError(
        f"cannot read samples from {type(data).__name__}: give a source (`__len__` and `fetch`), "
        "a map-style torch Dataset (with `__len__` and `__getitem__`), or a dict or tuple of tensors"
    )


def locate(source: Source, index: int) -> str:
    """Where a sample is, for people: file and row where the source knows, else its number there."""
    known = getattr(source, "locate", None)
    return str(known(index)) if known is not None else f"sample {index}"


def is_vectorised(source: Source) -> bool:
    """Whether all of a source can be fetched at once and kept: not so for datasets that may draw random numbers."""
    return bool(getattr(whole(source), "is_vectorised", True))


def is_rows(source: Source) -> bool:
    """Whether a sample is one row of each tensor, so that many samples can be fetched at once and cut apart."""
    return bool(getattr(whole(source), "is_rows", False))


def is_on_disk(source: Source) -> bool:
    """Whether the samples are read from files each time that they are asked for."""
    return bool(getattr(whole(source), "on_disk", False))


def hands_out_copies(source: Source) -> bool:
    """Whether what is fetched is nobody else's, so that a step may change it: a source of one's own may give views."""
    found = whole(source)
    if isinstance(found, DatasetSource):
        return found.collate is default_collate
    return type(found).__module__.startswith("isoscale.")


def own_copy(source: Source, batch: Batch) -> Batch:
    """A batch of a source that may be changed in place."""
    return batch if hands_out_copies(source) else map_tensors(batch, torch.clone)


def whole(source: Source) -> Source:
    """What a subset, or a subset of a subset, is taken from."""
    return whole(source.source) if isinstance(source, Subset) else source


def column(source: Source, key: str | int) -> Tensor | None:
    """One tensor of every sample, by its name or its place, where it is in memory or soon read: the labels, say."""
    if isinstance(source, Subset):
        whole = column(source.source, key)
        return None if whole is None else whole[source.indices]
    if isinstance(source, ColumnSource):
        stored = source.columns.get(str(key))
        if stored is None or len(source) * row_bytes(stored) > MOST_LABEL_BYTES:
            return None
        return as_tensor(stored.take(np.arange(len(source))))
    tensors = source.tensors if isinstance(source, TensorSource) else None
    if isinstance(tensors, tuple):
        tensors = dict(enumerate(tensors))
    found = tensors.get(key) if isinstance(tensors, dict) else None
    return found if isinstance(found, Tensor) else None


def nbytes(source: Source) -> int:
    """Bytes of all samples, estimated from one where they are not in memory."""
    if isinstance(source, TensorSource):
        return sum(tensor.nbytes for tensor in tensors_of(source.tensors))
    if hasattr(source, "nbytes"):
        return int(source.nbytes)
    if any(hasattr(whole(source), name) for name in ("resident", "pack")):  # some samples are held as all of them are
        return nbytes(whole(source))
    return len(source) * sum(tensor.nbytes for tensor in tensors_of(source.fetch(torch.zeros(1, dtype=torch.int64))))


def _as_tensors(data: Any) -> Batch:
    if isinstance(data, Tensor):
        if data.layout != torch.strided or data.is_meta:
            kind = "has no values (it is on the meta device)" if data.is_meta else "is sparse: give data.to_dense()"
            raise UserError(f"samples must be rows of a dense tensor, but one of shape {tuple(data.shape)} {kind}")
        return data.detach()
    if isinstance(data, np.ma.MaskedArray) and np.ma.getmaskarray(data).any():
        raise UserError(
            f"{int(np.ma.getmaskarray(data).sum())} values of an array are masked, and a network would see what lies "
            "below; fill them (data.filled(0.0)), or leave their rows out"
        )
    if isinstance(data, np.ndarray) and data.dtype.kind in "biufc":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # and never will be written
            return as_tensor(np.ascontiguousarray(data, dtype=data.dtype.newbyteorder("=")))
    if isinstance(data, Mapping):
        return {key: _as_tensors(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return tuple(_as_tensors(value) for value in data)
    found = f"an array of {data.dtype}" if isinstance(data, np.ndarray) else f"{type(data).__name__} {data!r:.40}"
    raise UserError(
        f"samples must be tensors or arrays of numbers, one row per sample, not {found}: make one of them, such as "
        "torch.tensor(rows, dtype=torch.float32)"
    )


class Sources:
    """The sources of a run by split; a split that is None is not there."""

    def __init__(self, train: Any = None, val: Any = None, test: Any = None, predict: Any = None) -> None:
        """Anything that `as_source` takes, for each split."""
        self.train = None if train is None else as_source(train)
        self.val = None if val is None else as_source(val)
        self.test = None if test is None else as_source(test)
        self.predict = None if predict is None else as_source(predict)


SPLITS = ("train", "val", "test")


def has_splits(data: Any) -> bool:
    """Whether data comes in parts by split, as `Sources` does; `train` alone may be a word of a Dataset's own."""
    return all(hasattr(data, split) for split in SPLITS)


def split_source(source: Source, parts: Mapping[str, float | int], seed: int = 0) -> Sources:
    """Cut a source at random, but the same way every time, into splits: fractions of it or numbers of samples."""
    unknown = set(parts) - set(SPLITS)
    if unknown:
        raise UserError(f"split has unknown parts {sorted(unknown)}: use {', '.join(SPLITS)}")
    if not len(source):
        raise UserError("the data has no samples, and so cannot be split: it needs at least one row")
    counts = _counts(len(source), parts)
    shuffled = Order(len(source), seed, purpose="split").indices(0, len(source))
    pieces = torch.split(shuffled[: sum(counts.values())], list(counts.values()))
    return Sources(**{split: Subset(source, piece) for split, piece in zip(counts, pieces, strict=True) if len(piece)})


def _counts(length: int, parts: Mapping[str, float | int]) -> dict[str, int]:
    edges, taken, fraction = {}, 0, 0.0
    for split, part in parts.items():
        if isinstance(part, bool) or not 0 <= part < math.inf:
            raise UserError(f"split.{split} is {part}; expected a fraction such as 0.8, or a number of samples")
        if isinstance(part, int):
            edges[split] = part
        else:
            before, fraction = fraction, fraction + part
            edges[split] = round(fraction * length) - round(before * length)
        if part > 0 and edges[split] == 0:
            raise UserError(
                f"split.{split} is {part}, which is less than one sample of {length}; make it larger, or 0 for none"
            )
        taken += edges[split]
    if taken > length:
        raise UserError(f"split asks for {taken} samples ({dict(parts)}), but there are {length}")
    return edges


class Arrays(Sources):
    """Named arrays of one `.npz` file, one row per sample, split at random into train, val and test."""

    def __init__(self, path: str, split: dict[str, float | int] | None = None, split_seed: int = 0) -> None:
        """Read `path`; the task decides which array is what (`input`, `target` by default)."""
        whole = TensorSource(_read_npz(Path(path)), name=path)
        parts = split_source(whole, split or {"train": 0.8, "val": 0.1, "test": 0.1}, split_seed)
        super().__init__(parts.train, parts.val, parts.test, whole)


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise ValueError("it holds one array without a name; use np.savez(path, input=..., target=...)")
        with file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: set data.path to an .npz file with one row per sample") from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"cannot read {path} as an .npz file of plain arrays: {error}") from None


class ColumnSource:
    """Samples in files: one row of each column."""

    on_disk = True
    is_rows = True

    def __init__(self, columns: Mapping[str, Column]) -> None:
        """Columns by name, all of the same number of rows."""
        self.columns = dict(columns)
        lengths = {name: column.num_rows for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            found = ", ".join(f"{name} has {count:,} ({columns[name].name})" for name, count in lengths.items())
            raise UserError(f"every column needs one row per sample, but {found}")
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        """Number of samples."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of all samples, as stored."""
        return self._length * sum(row_bytes(column) for column in self.columns.values())

    def fetch(self, indices: Tensor) -> Batch:
        """The samples at `indices`, read from the files."""
        rows = indices.numpy()
        return {name: as_tensor(column.take(rows)) for name, column in self.columns.items()}

    def locate(self, index: int) -> str:
        """The files that a sample is in, and its row there."""
        places = (place(column, index) for column in self.columns.values())
        return " and ".join(dict.fromkeys(f"{file}, row {row}" for file, row in places))
