"""Whole boxes by overlapping tiles: a network that learned from crops predicts a box of any size.

Tiles are crops at fixed places, and so samples like any other. Near its border a tile knows little of what is around
it, so that every cell is a weighted mean of the tiles over it, with little weight near borders. The mean grows tile by
tile in an order that belongs to the box, and batches are the same whoever computes them: a box has the same bits on any
number of ranks.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isoscale.data.files import short_names
from isoscale.data.formats.opening import SUFFIXES
from isoscale.data.sources import Subset
from isoscale.data.volumes import Crops, Volume
from isoscale.engine.dataset_metrics import EvaluatedDataset, Store
from isoscale.errors import UserError
from isoscale.science.cosmology.fields import FIELDS
from isoscale.system.devices import widest_float


class Piece(NamedTuple):
    """What a tile covers along one axis of a box; two pieces where it goes on at the other side."""

    tile: int
    cells: slice
    """Of the box."""
    inside: slice
    """The same cells, counted in the tile."""
    weight: Tensor
    """Of each cell; those of all pieces over a cell add up to 1."""
    before: Tensor
    """The sum of the weights of earlier pieces over each cell."""

    def to(self, device: torch.device) -> "Piece":
        """The same with its weights on a device."""
        weight, before = (each.to(device, widest_float(device)) for each in (self.weight, self.before))
        return self._replace(weight=weight, before=before)


def window(crop: int, overlap: int) -> Tensor:
    """The weights of a tile's cells along an axis: a cosine that rises over the overlap, 1 in the middle (Tukey)."""
    rise = max(1, min(overlap, crop // 2))
    place = torch.arange(crop, dtype=torch.float64) + 0.5
    nearest = torch.minimum(place, crop - place)  # to a border
    return torch.sin((nearest / rise).clamp(max=1) * math.pi / 2) ** 2 if overlap else torch.ones_like(place)


def used(size: int, crop: int, overlap: int, wrap: bool) -> tuple[int, int, int]:
    """How many cells of a tile are used along an axis, from which one on, and how many of them tiles share.

    In a periodic box that is smaller than a tile, a cell is there twice, and that in the middle of the tile counts.
    """
    length = min(crop, size) if wrap else crop
    return length, (crop - length) // 2, overlap * length // crop


def starts(size: int, crop: int, overlap: int, wrap: bool) -> list[int]:
    """The first cells of tiles along an axis, evenly spread, each at least `overlap` cells over the one before it."""
    length, _, overlap = used(size, crop, overlap, wrap)
    if wrap:
        count = -(-size // (length - overlap))
        return [number * size // count for number in range(count)]
    count = -(-(size - crop) // (crop - overlap)) + 1
    return [number * (size - crop) // max(1, count - 1) for number in range(count)]


def pieces(size: int, crop: int, overlap: int, wrap: bool, by_cell: bool = False) -> list[Piece]:
    """All pieces of an axis in the order in which they are added: that of tiles or, `by_cell`, of their first cells."""
    length, margin, shared = used(size, crop, overlap, wrap)
    found = []
    for tile, corner in enumerate(starts(size, crop, overlap, wrap)):
        start = corner + margin
        while start + length > 0:  # and once more where it goes on at the other side
            low, high = max(start, 0), min(start + length, size)
            if low < high:
                found.append((start, tile, low, high))
            start -= size if wrap else size + crop
    found.sort(key=lambda each: each[:2] if by_cell else (each[1], -each[0]))
    weights = window(length, shared)
    total = torch.zeros(size, dtype=torch.float64)
    for start, _, low, high in found:
        total[low:high] += weights[low - start : high - start]
    sums = torch.zeros_like(total)
    listed = []
    for start, tile, low, high in found:
        weight = weights[low - start : high - start] / total[low:high]
        inside = slice(low - start + margin, high - start + margin)
        listed.append(Piece(tile, slice(low, high), inside, weight, sums[low:high].clone()))
        sums[low:high] += weight
    return listed


class Tiles(Subset):
    """A source: the tiles of whole boxes, one box after the other, by their place along x, then y, then z."""

    writes_files = True

    def __init__(self, crops: Crops, overlap: int | None, dataset: str, fields: Sequence[str] | None) -> None:
        """Tiles that share `overlap` cells with their neighbours, half a crop by default.

        `dataset` is what the predicted array is called in a file, and `fields` names its fields where that is known.
        """
        overlap = crops.crop // 2 if overlap is None else overlap
        if not 0 <= overlap < crops.crop:
            raise UserError(
                f"data.overlap is {overlap}; expected 0 to {crops.crop - 1} cells, less than data.crop={crops.crop}"
            )
        self.volumes, self.dataset, self.fields = crops.volumes, dataset, fields
        self.boxes: list[Box] = []
        first_tile = first_sample = 0
        samples = []
        for size in crops.sizes:
            places = [count if crops.wrap else count - crops.crop + 1 for count in size]
            x, y, z = (torch.tensor(starts(count, crops.crop, overlap, crops.wrap)) for count in size)
            plane = x[:, None, None] * places[1] + y[:, None]
            samples.append(first_sample + (plane * places[2] + z).flatten())
            along = [pieces(count, crops.crop, overlap, crops.wrap, axis == 0) for axis, count in enumerate(size)]
            self.boxes.append(Box(size, crops.crop, first_tile, along[0], *map(_by_tile, along[1:])))
            first_sample += math.prod(places)
            first_tile += len(samples[-1])
        super().__init__(crops, torch.cat(samples))


def _by_tile(found: list[Piece]) -> list[list[Piece]]:
    return [list(group) for _, group in groupby(found, lambda piece: piece.tile)]


class Box(NamedTuple):
    """How the tiles of one box lie."""

    size: tuple[int, int, int]
    crop: int
    first: int
    """The number of its first tile in the source."""
    x: list[Piece]
    """In the order of their first cells, so that planes are finished one after the other."""
    y: list[list[Piece]]
    """Of each tile."""
    z: list[list[Piece]]

    def numbers(self, piece: Piece) -> range:
        """The tiles of a plane of tiles, which share their place along x."""
        count = len(self.y) * len(self.z)
        return range(self.first + piece.tile * count, self.first + (piece.tile + 1) * count)


def write_boxes(dataset: EvaluatedDataset, store: Store) -> None:
    """Predict whole boxes and write each to a file, in the layout and with the attributes of the box that it is of.

    Every rank predicts and writes a range of planes of each box, with all tiles over them.
    """
    tiles, ranks = dataset.source, store.ranks
    assert isinstance(tiles, Tiles)
    names = short_names([str(Path(volume.name).resolve()) for volume in tiles.volumes])
    stems = [str(Path(name).with_suffix("")) if Path(name).suffix.lower() in SUFFIXES else name for name in names]
    if len(set(stems)) == len(names):
        names = stems
    for box, volume, name in zip(tiles.boxes, tiles.volumes, names, strict=True):
        first, stop = (-(-box.size[0] * rank // ranks.world_size) for rank in (ranks.rank, ranks.rank + 1))
        planes = blend(dataset, box, range(first, stop))
        begin = next(planes, (0, torch.empty(0)))
        count = len(begin[1])
        target = store.planes(
            name, tiles.dataset, (count, *box.size), "float32", _attributes(volume),
            {"fields": _field_names(tiles, count)}, PREDICTED,
        )  # fmt: skip
        for place, values in chain([begin], planes):
            ranks.tick("the predictions of others")  # or there is nothing to go on for
            target.write(place, values.cpu().numpy())


def blend(dataset: EvaluatedDataset, box: Box, planes: range) -> Iterator[tuple[int, Tensor]]:
    """The predicted planes of a box: the first one's place and values (fields, planes, y, z), in order.

    No more planes are held than a tile is long. What is yielded is overwritten by the next step.
    """
    x_pieces = [piece for piece in box.x if piece.cells.stop > planes.start and piece.cells.start < planes.stop]
    tiles = _predicted(dataset, [number for piece in x_pieces for number in box.numbers(piece)])
    (along_x,), along_y, along_z = (
        [[piece.to(dataset.device) for piece in each] for each in axis] for axis in ([x_pieces], box.y, box.z)
    )
    buffer, done = torch.empty(0), along_x[0].cells.start if along_x else 0

    def finished(stop: int) -> Iterator[tuple[int, Tensor]]:
        """Hand on the planes before `stop`, and move those that are left to the beginning."""
        first, last = max(done, planes.start), min(stop, planes.stop)
        if first < last:
            yield first, buffer[:, first - done : last - done]
        for place in range(box.crop):
            source = place + stop - done
            buffer[:, place] = buffer[:, source] if source < box.crop else 0.0

    for x in along_x:
        if x.cells.start > done:
            yield from finished(x.cells.start)
            done = x.cells.start
        # not cut to `planes`: operations of one shape have the same bits on any number of ranks
        length = x.cells.stop - x.cells.start
        for y_pieces, z_pieces in product(along_y, along_z):
            tile = next(tiles)
            if not buffer.numel():
                if tile.shape[1:] != (box.crop,) * 3:
                    raise UserError(
                        f"the network makes fields of {'×'.join(map(str, tile.shape[1:]))} cells of a crop of "
                        f"{box.crop}³: whole boxes need a network whose output has the size of its input"
                    )
                buffer = tile.new_zeros(len(tile), box.crop, *box.size[1:])
            for y, z in product(y_pieces, z_pieces):
                mean = buffer[:, :length, y.cells, z.cells]
                mean.lerp_(tile[:, x.inside, y.inside, z.inside], share(x, y, z))
    if along_x:
        next(tiles, None)  # which ends the look at the data
        yield from finished(along_x[-1].cells.stop)


def _predicted(dataset: EvaluatedDataset, numbers: Sequence[int]) -> Iterator[Tensor]:
    """The predictions of tiles (fields, crop, crop, crop), in float32 and in the order asked.

    Batches are those of all tiles of the data, whichever of them are asked for.
    """
    size = dataset.data.plan.batch_size
    batches = [(step, [number % size for number in group]) for step, group in groupby(numbers, lambda n: n // size)]
    for (_, rows), seen in zip(batches, dataset.look([step for step, _ in batches]), strict=True):
        yield from (seen.output[row].float() for row in rows)


def share(x: Piece, y: Piece, z: Piece) -> Tensor:
    """Of a tile in the mean of itself and all tiles before it; so tiles that agree leave the mean as it is, exactly."""
    (x_weight, x_before), (y_weight, y_before) = (
        [each.view(shape) for each in (piece.weight, piece.before)] for piece, shape in ((x, (-1, 1, 1)), (y, (-1, 1)))
    )
    so_far = x_before + x_weight * (y_before + y_weight * (z.before + z.weight))
    return (x_weight * y_weight * z.weight / so_far).float()


def _field_names(tiles: Tiles, count: int) -> list[str]:
    """As the box or the recipe names them, else as the layout does, else numbers."""
    for names in (tiles.fields, FIELDS.get(tiles.dataset)):
        if names is not None and len(names) == count:
            return list(names)
    return [str(number) for number in range(count)]


def _attributes(volume: Volume) -> dict[str, Any]:
    """What the file of a box says of it, and that this one is predicted."""
    known = getattr(next(iter(volume.arrays.values())), "attributes", {})
    return {**{key: value for key, value in known.items() if key != "fields"}, PREDICTED: volume.name}


PREDICTED = "predicted_from"
"""The attribute by which a prediction is told from a simulation."""
