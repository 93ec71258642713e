"""Volumes: boxes of cells with fields, of which every crop is a sample.

Each place where a crop fits is a sample, and they are numbered through all boxes. So an order of samples is an order of
crops, and `data.samples_per_epoch` says how many an epoch has: they are the same on any number of ranks, in every
residency and after every restart, as the samples of other sources are.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.data.columns import as_tensor
from isoscale.data.formats.checks import check_not_cut
from isoscale.data.order import Order
from isoscale.data.sources import Subset
from isoscale.errors import UserError

SLAB_BYTES = 64 << 20
"""Of a box that are read at a time, at least."""


class Volume(NamedTuple):
    """A box: arrays (fields, cells, cells, cells) by the name that a batch has them under.

    An array is a tensor, an array of numpy, or a dataset of a file, which is read as it is sliced.
    """

    name: str
    arrays: Mapping[str, Any]
    fields: Mapping[str, Sequence[str]] = {}
    """The names of the fields of each array, where they have any."""
    cell_size: float | None = None
    """Length of a cell, in the units of whoever made the box."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Cells along each axis."""
        found = {tuple(array.shape[1:]) for array in self.arrays.values()}
        if len(found) != 1 or len(next(iter(found))) != 3:
            shapes = ", ".join(f"{key} {tuple(array.shape)}" for key, array in self.arrays.items())
            raise UserError(f"{self.name}: expected arrays (fields, cells, cells, cells) of one size, found {shapes}")
        first, second, third = found.pop()
        return first, second, third

    @property
    def num_cells(self) -> int:
        """Of the whole box."""
        return math.prod(self.size)


def places_of(sizes: Sequence[tuple[int, int, int]], crop: int, wrap: bool) -> list[tuple[int, ...]]:
    """Along each axis of each box, the places where a crop may begin."""
    return [size if wrap else tuple(count - crop + 1 for count in size) for size in sizes]


class Geometry:
    """Where the crops of boxes lie, as tensors on a device."""

    def __init__(self, sizes: Sequence[tuple[int, int, int]], crop: int, wrap: bool, device: torch.device) -> None:
        """Crops of `crop` cells a side; with `wrap` a box goes on at its other side."""
        self.crop = crop
        places = places_of(sizes, crop, wrap)
        self.num_samples = sum(math.prod(place) for place in places)

        def sent(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self._sizes, self._places = sent(sizes), sent(places)
        counts, cells = ([0, *map(math.prod, each)] for each in (places, sizes))
        self._first_sample, self._first_cell = sent(counts).cumsum(0), sent(cells).cumsum(0)
        self._offsets = torch.arange(crop, device=device)

    def corners(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the box of each sample, and the corner of its crop (batch, 3)."""
        box = torch.searchsorted(self._first_sample, samples, right=True) - 1
        rest, places = samples - self._first_sample[box], self._places[box]
        first, rest = rest // (places[:, 1] * places[:, 2]), rest % (places[:, 1] * places[:, 2])
        return box, torch.stack([first, rest // places[:, 2], rest % places[:, 2]], 1)

    def cells(self, samples: Tensor) -> Tensor:
        """The numbers (batch, crop, crop, crop) of the cells of crops, counted through all boxes."""
        box, corner = self.corners(samples)
        size = self._sizes[box]
        return self.grid(corner, size) + self._first_cell[box][:, None, None, None]

    def grid(self, corner: Tensor, size: Tensor) -> Tensor:
        """The numbers of the cells of crops with these corners, each in a box of its own of that size (batch, 3)."""
        along = (corner[:, :, None] + self._offsets) % size[:, :, None]
        plane = along[:, 0, :, None] * size[:, 1, None, None] + along[:, 1, None, :]
        return plane[..., None] * size[:, 2, None, None, None] + along[:, 2, None, None, :]


class Crops:
    """A source: all crops of some boxes."""

    def __init__(
        self, volumes: Sequence[Volume], crop: int, wrap: bool = False, dtype: torch.dtype | None = None,
        on_disk: bool = False,
    ) -> None:  # fmt: skip
        """Crops of `crop` cells a side, in `dtype` (as stored where it is None).

        With `wrap` the boxes are periodic, and crops may reach over their borders. With `on_disk` they are read from
        files each time, until somebody asks for them in memory.
        """
        if not volumes:
            raise UserError("there are no boxes")
        self.volumes, self.crop, self.wrap, self.on_disk = list(volumes), crop, wrap, on_disk
        self.sizes = [volume.size for volume in self.volumes]
        self.num_fields = {key: int(array.shape[0]) for key, array in self.volumes[0].arrays.items()}
        self._check()
        kinds = {key: as_tensor(np.empty(0, _numpy(array))).dtype for key, array in self.volumes[0].arrays.items()}
        self._dtype = dtype
        self.dtypes = {key: dtype or kind for key, kind in kinds.items()}
        self._geometry = Geometry(self.sizes, crop, wrap, torch.device("cpu"))
        self._resident: Resident | None = None

    def _check(self) -> None:
        for volume in self.volumes:
            found = {key: int(array.shape[0]) for key, array in volume.arrays.items()}
            if found != self.num_fields:
                raise UserError(
                    f"{volume.name} has the fields {found}, but {self.volumes[0].name} has {self.num_fields}; give "
                    "boxes with the same fields"
                )
            if min(volume.size) < self.crop and not self.wrap:
                raise UserError(
                    f"{volume.name} has {'×'.join(map(str, volume.size))} cells, too few for a crop of {self.crop}³; "
                    f"use data.crop={min(volume.size)} or less, or data.wrap=true if the box is periodic"
                )

    def __len__(self) -> int:
        """The number of places where a crop fits."""
        return self._geometry.num_samples

    @property
    def nbytes(self) -> int:
        """Of the boxes, not of all their crops."""
        cells = sum(volume.num_cells for volume in self.volumes)
        return cells * sum(count * self.dtypes[key].itemsize for key, count in self.num_fields.items())

    def fetch(self, indices: Tensor) -> Batch:
        """The crops at `indices`."""
        if not self.on_disk:
            self._resident = self._resident or self.resident(torch.device("cpu"))
            return self._resident(indices)
        boxes, corners = self._geometry.corners(indices)
        found: Batch = {}
        for key, count in self.num_fields.items():
            batch = torch.empty(len(indices), *[self.crop] * 3, count, dtype=self.dtypes[key]).movedim(-1, 1)
            for crop, box, corner in zip(batch, boxes.tolist(), corners.tolist(), strict=True):
                self.read_into(crop, self.volumes[box], key, corner)
            found[key] = batch
        return found

    def read_into(self, part: Tensor, volume: Volume, key: str, corner: list[int]) -> None:
        """Fill a part (fields, cells, cells, cells) from a file, in pieces where it reaches over the borders."""
        pieces = [_pieces(*along) for along in zip(corner, part.shape[1:], volume.size, strict=True)]
        for first in pieces[0]:
            for second in pieces[1]:
                for third in pieces[2]:
                    (a, to_a), (b, to_b), (c, to_c) = first, second, third
                    part[:, to_a, to_b, to_c] = self.read(volume, key, (a, b, c))

    def read(self, volume: Volume, key: str, place: tuple[slice, slice, slice]) -> Tensor:
        """A part of a box, in the dtype of the crops."""
        array = volume.arrays[key]
        if isinstance(array, np.memmap):  # to touch what was cut off would end the process
            check_not_cut(str(array.filename), os.stat(str(array.filename)).st_size, array.offset + array.nbytes)
        found = array[(slice(None), *place)]
        # of a mapped file this is a copy: torch warns of memory that cannot be written to
        tensor = found if isinstance(found, Tensor) else as_tensor(np.require(found, _numpy(array), ["C", "W"]))
        if tensor.is_floating_point() and not tensor.isfinite().all():
            field, *cell = (~tensor.isfinite()).nonzero()[0].tolist()
            value = float(tensor[(field, *cell)])
            names = volume.fields.get(key, range(self.num_fields[key]))
            at = ", ".join(str(offset + (part.start or 0)) for offset, part in zip(cell, place, strict=True))
            raise UserError(f"{volume.name}: {key}, field {names[field]}, is {value} at the cell ({at}): mend the box")
        return tensor.to(self.dtypes[key])

    def resident(self, device: torch.device) -> "Resident":
        """All boxes in the memory of a device."""
        return Resident(self, device)

    def in_memory(self) -> "Crops":
        """The same crops, of boxes that are read into the host's memory once."""
        return Crops(self.volumes, self.crop, self.wrap, self._dtype)

    def draw(self, count: int, seed: int = 0) -> Subset:
        """Some crops, drawn once: for validation, say."""
        if count > len(self):
            raise UserError(f"{count} crops were asked for, and there are {len(self)} places for one")
        return Subset(self, Order(len(self), seed, purpose="drawn crops").indices(0, count))

    def locate(self, index: int) -> str:
        """The box and the cells of a sample, for people."""
        box, corner = self._geometry.corners(torch.tensor([index]))
        cells = ", ".join(f"{start}:{start + self.crop}" for start in corner[0].tolist())
        return f"{self.volumes[int(box)].name}, cells {cells}"


class Resident:
    """Boxes in the memory of a device, one row of fields for each cell; called with samples, it gives their crops."""

    def __init__(self, crops: Crops, device: torch.device) -> None:
        """Bring all boxes of `crops` there, some planes at a time."""
        self._geometry = Geometry(crops.sizes, crops.crop, crops.wrap, device)
        total = sum(volume.num_cells for volume in crops.volumes)
        self._rows = {
            key: torch.empty(total, count, dtype=crops.dtypes[key], device=device)
            for key, count in crops.num_fields.items()
        }
        start = 0
        for volume in crops.volumes:
            per_plane = volume.num_cells // volume.size[0]
            for key, rows in self._rows.items():
                of_box = rows[start : start + volume.num_cells]
                for planes in slabs(volume.arrays[key]):
                    slab = crops.read(volume, key, (planes, slice(None), slice(None))).to(device)
                    of_box[planes.start * per_plane : planes.stop * per_plane].copy_(slab.flatten(1).t())
            start += volume.num_cells

    def __call__(self, samples: Tensor) -> Batch:
        """The crops (batch, fields, crop, crop, crop), stored channels last."""
        cells, crop = self._geometry.cells(samples).view(-1), self._geometry.crop
        return {
            key: rows.index_select(0, cells).view(len(samples), crop, crop, crop, -1).movedim(-1, 1)
            for key, rows in self._rows.items()
        }


def slabs(array: Any) -> Iterator[slice]:
    """Planes of an array (fields, cells, cells, cells) that are read at a time: whole chunks, which are read once."""
    num_fields, num_planes, *plane = array.shape
    chunk = (getattr(array, "chunks", None) or (1, 1))[1]
    at_once = max(1, SLAB_BYTES // (num_fields * math.prod(plane) * array.dtype.itemsize * chunk)) * chunk
    for first in range(0, num_planes, at_once):
        yield slice(first, min(first + at_once, num_planes))


def _pieces(start: int, count: int, size: int) -> list[tuple[slice, slice]]:
    """Cells `start` to `start + count` of an axis that goes on at its beginning: (where they are, where they go)."""
    found = []
    done = 0
    while done < count:
        begin = (start + done) % size
        length = min(count - done, size - begin)
        found.append((slice(begin, begin + length), slice(done, done + length)))
        done += length
    return found


def _numpy(array: Any) -> np.dtype[Any]:
    """The dtype of an array, in the byte order of this machine."""
    dtype: np.dtype[Any] = array[:0].numpy().dtype if isinstance(array, Tensor) else array.dtype
    return dtype.newbyteorder("=")
