"""Samples of many sizes: graphs of atoms and edges, say. Some of them make a batch of one shape, with room to spare.

A sample has rows at several levels (atoms, edges), stored one sample after the other. A batch puts the rows of its
samples behind each other, as PyTorch Geometric does, so that nothing is padded inside a sample; what is left of the
room at the end is padding. All of it is gathered by index, on the device where the arrays are: a step that does so can
be captured.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoscale.data.sources import Source, Subset, whole
from isoscale.errors import UserError

Room = tuple[int, ...]
"""Rows of a batch at each level."""


@dataclass(frozen=True)
class Level:
    """Rows of which each sample has a number of its own."""

    counts: Any
    """Rows of each sample (samples,)."""
    columns: Mapping[str, Any]
    """Arrays of the rows of all samples, one sample after the other."""


class RaggedSource:
    """Samples with rows at several levels; arrays may be memory-mapped files."""

    def __init__(
        self,
        rows: Mapping[str, Any],
        levels: Mapping[str, Level],
        numbers: Mapping[str, str] | None = None,
        members: Mapping[str, str] | None = None,
        locate: Callable[[int], str] | None = None,
        on_disk: bool = False,
    ) -> None:
        """`rows` have one row per sample, `levels` the others.

        `numbers` are columns that number rows of a level inside their sample, such as the ends of edges, and in a batch
        the rows of that level there; in padding they number its last row, or themselves where they number rows of their
        own level. `members` names for a level the column that says to which sample of the batch each row belongs; in
        padding it is the number of samples.
        """
        self.rows = {name: _tensor(array) for name, array in rows.items()}
        self.numbers, self.members = dict(numbers or {}), dict(members or {})
        self.on_disk = on_disk
        self._locate = locate
        self.levels = tuple(levels)
        """Names of the levels; rooms and sizes are in this order."""
        self._columns = [{name: _tensor(array) for name, array in level.columns.items()} for level in levels.values()]
        self._counts = [_tensor(np.asarray(level.counts, dtype=np.int64)) for level in levels.values()]
        self._starts = [counts.cumsum(0) - counts for counts in self._counts]
        self._check()

    def _check(self) -> None:
        for name, counts, columns in zip(self.levels, self._counts, self._columns, strict=True):
            total = int(counts.sum())
            for column, values in columns.items():
                if len(values) != total:
                    raise UserError(f"{column} has {len(values):,} rows, but the samples have {total:,} {name} in all")
        lengths = {len(counts) for counts in self._counts} | {len(values) for values in self.rows.values()}
        if len(lengths) != 1:
            raise UserError(f"every array needs one row per sample, but the numbers of rows are {sorted(lengths)}")

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._counts[0])

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Rows (samples, levels) of every sample."""
        return torch.stack(self._counts, 1).cpu().numpy()

    @property
    def nbytes(self) -> int:
        """Bytes of all samples."""
        return sum(tensor.nbytes for columns in (self.rows, *self._columns) for tensor in columns.values())

    @property
    def referred(self) -> list[bool]:
        """Of each level, whether rows of another number its rows: padding needs one of them to point to."""
        home = {column: name for name, columns in zip(self.levels, self._columns, strict=True) for column in columns}
        return [any(at == level != home[column] for column, at in self.numbers.items()) for level in self.levels]

    def column(self, name: str) -> Tensor:
        """All rows of a column, one sample after the other."""
        return next(columns[name] for columns in (self.rows, *self._columns) if name in columns)

    def fetch(self, indices: Tensor) -> dict[str, Tensor]:
        """The samples at `indices`, without padding."""
        return self.pack(indices, tuple(int(counts[indices].sum()) for counts in self._counts))

    def pack(self, indices: Tensor, room: Room) -> dict[str, Tensor]:
        """The samples at `indices` in a batch with this room, which must suffice."""
        batch = {name: values.index_select(0, indices) for name, values in self.rows.items()}
        laid = [self._lay(level, indices, size) for level, size in enumerate(room)]
        before = {name: each.before for name, each in zip(self.levels, laid, strict=True)}
        last = dict(zip(self.levels, (size - 1 for size in room), strict=True))
        for name, columns, each in zip(self.levels, self._columns, laid, strict=True):
            for column, values in columns.items():
                level = self.numbers.get(column)
                if not len(values):  # no sample has any: there is no row to stand for padding
                    values = values.new_zeros(1, *values.shape[1:])
                found = values.index_select(0, each.rows)
                if level is not None:
                    found = found.long() + before[level].index_select(0, each.inside)
                is_real = each.is_real.view(-1, *[1] * (found.dim() - 1))
                padding = each.places if level == name else 0 if level is None else last[level]
                batch[column] = torch.where(is_real, found, padding)
            if name in self.members:
                batch[self.members[name]] = each.member
        return batch

    def _lay(self, level: int, indices: Tensor, size: int) -> "_Laid":
        """Where the rows of a level come from."""
        counts, starts = self._counts[level].index_select(0, indices), self._starts[level].index_select(0, indices)
        ends = counts.cumsum(0)
        places = torch.arange(size, device=indices.device)
        member = torch.searchsorted(ends, places, right=True)
        is_real = member < len(indices)
        inside = member.clamp_max(len(indices) - 1)
        before = ends - counts
        rows = (starts - before).index_select(0, inside) + places
        return _Laid(places, torch.where(is_real, rows, 0), member, inside, is_real, before)

    def on(self, device: torch.device) -> "RaggedSource":
        """The same with all arrays on a device."""
        moved = object.__new__(RaggedSource)
        moved.__dict__.update(self.__dict__)
        moved.rows = {name: tensor.to(device) for name, tensor in self.rows.items()}
        moved._columns = [{name: tensor.to(device) for name, tensor in each.items()} for each in self._columns]
        moved._counts, moved._starts = ([tensor.to(device) for tensor in each] for each in (self._counts, self._starts))
        moved.on_disk = False
        return moved

    def in_memory(self) -> "RaggedSource":
        """The same with no array in a file."""
        copied = self.on(torch.device("cpu"))
        copied.rows = {name: tensor.clone() for name, tensor in self.rows.items()}
        copied._columns = [{name: tensor.clone() for name, tensor in each.items()} for each in self._columns]
        return copied

    def locate(self, index: int) -> str:
        """Where a sample is, for people."""
        return f"sample {index}" if self._locate is None else self._locate(index)


@dataclass(frozen=True)
class _Laid:
    """How the rows of a level of a batch are laid out."""

    places: Tensor
    rows: Tensor
    """Of the stored columns; 0 in padding."""
    member: Tensor
    inside: Tensor
    """The member, or in padding the last one."""
    is_real: Tensor
    before: Tensor
    """Rows of the samples before each (samples,)."""


def _tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # and never will be written
        return torch.from_numpy(array if isinstance(array, np.memmap) else np.ascontiguousarray(array))


def is_ragged(source: Source) -> bool:
    """Whether the samples of a source have sizes of their own, so that a batch needs a room."""
    return hasattr(whole(source), "pack")


def sizes_of(source: Any) -> NDArray[np.int64]:
    """Rows (samples, levels) of every sample of a ragged source, or of a part of one."""
    if isinstance(source, Subset):
        return sizes_of(source.source)[source.indices.numpy()]
    return np.asarray(source.sizes)


Packer = Callable[[Tensor, Room], Any]


def packer(source: Any, device: torch.device | None = None) -> Packer:
    """What packs samples of a ragged source, or of a part of one; on a device, where one is given."""
    if isinstance(source, Subset):
        inner = packer(source.source, device)
        indices = source.indices if device is None else source.indices.to(device)
        return lambda samples, room: inner(indices.index_select(0, samples), room)
    found: RaggedSource = source if device is None else source.on(device)
    return found.pack


def work_of(source: Any) -> NDArray[np.float64]:
    """How much there is to do for each sample: all of its rows."""
    return sizes_of(source).sum(1).astype(np.float64)


def levels_of(source: Any) -> Sequence[str]:
    """The names of the levels of a ragged source, or of a part of one."""
    return levels_of(source.source) if isinstance(source, Subset) else source.levels


def spare_rows(source: Any) -> list[int]:
    """Rows of each level that a batch must have besides those of its samples, for padding to point to."""
    return spare_rows(source.source) if isinstance(source, Subset) else [int(each) for each in source.referred]
