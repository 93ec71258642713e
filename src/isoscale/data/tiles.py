"""Tiles of volumes: boxes larger than memory, of which some parts at a time are there, and the order of their crops.

A grid of tiles lies over each box. Neighbours share as many cells as a crop has less one, so that each crop lies whole
in a tile, and it belongs to the one whose part of the places it begins in: every place belongs to exactly one tile.
Samples are numbered as those of `Crops` are; only their order is another one.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isoscale.data.order import Order
from isoscale.data.volumes import Crops, Volume, places_of
from isoscale.errors import UserError
from isoscale.system import devices

MOST_TILES = 1 << 20
MOST_PLACES = 1 << 14
TILES_AT_ONCE = 4
CROPS_PER_TILE = 4096
NUM_WINDOWS = 2
"""In memory: one that is trained on, and the next, which is read meanwhile."""


class Tiling:
    """A grid of tiles over boxes: where each of them lies, and which places for crops belong to it."""

    def __init__(self, sizes: Sequence[tuple[int, int, int]], crop: int, wrap: bool, tile: int) -> None:
        """Tiles of at most `tile` cells a side, as many as it takes, and then as equal as can be."""
        self.places = np.array(places_of(sizes, crop, wrap))
        """(boxes, 3), like the next two."""
        self.stride = -(-self.places // -(-self.places // (tile - crop + 1)))
        """Places from a tile to the next."""
        self.grid = -(-self.places // self.stride)
        """Tiles along each axis."""
        self.edge = int(self.stride.max()) + crop - 1
        """Cells of the largest tile along an axis."""
        per_box = self.grid.prod(1)
        self.first_tile = per_box.cumsum() - per_box
        """Of each box."""
        self.num_tiles = int(per_box.sum())
        if self.num_tiles > MOST_TILES:
            raise UserError(
                f"data.tile={tile} cuts the boxes into {self.num_tiles:,} tiles, because crops are nearly as large "
                f"({crop}); use data.tile={2 * crop} or more"
            )
        self.box = np.repeat(np.arange(len(per_box)), per_box)
        """The box of each tile."""
        number, grid = np.arange(self.num_tiles) - self.first_tile[self.box], self.grid[self.box]
        across = number // grid[:, 2]
        where = np.stack([across // grid[:, 1], across % grid[:, 1], number % grid[:, 2]], 1)
        self.start = where * self.stride[self.box]
        """The first place, and cell, of each tile (tiles, 3)."""
        self.extent = np.minimum(self.stride[self.box], self.places[self.box] - self.start)
        """Places that belong to it along each axis (tiles, 3)."""
        self.num_places = self.extent.prod(1)
        counts = self.places.prod(1)
        self._first_sample = counts.cumsum() - counts

    def samples(self, tiles: Any, within: Any) -> Any:
        """The numbers of samples, counted through all boxes, of places that are counted within tiles."""
        box, extent, start = self.box[tiles], self.extent[tiles], self.start[tiles]
        across = within // extent[:, 2]
        first, second = start[:, 0] + across // extent[:, 1], start[:, 1] + across % extent[:, 1]
        third = start[:, 2] + within % extent[:, 2]
        return self._first_sample[box] + (first * self.places[box, 1] + second) * self.places[box, 2] + third


class TileWindow(NamedTuple):
    """Tiles whose crops are mixed with each other, and the places of the order that they have."""

    number: int
    """Counted from the start of training, through all rounds and passes."""
    start: int
    stop: int
    tiles: tuple[int, ...]


class _Round(NamedTuple):
    tiles: Any
    """In the order in which they come."""
    taken: Any
    """Crops that earlier rounds of the pass took of each."""
    edges: Any
    """The place of the order at which the share of each begins, and that behind the last."""
    windows: Any
    """The same of each window."""


class TileOrder:
    """An order of crops that stays within a window of tiles at a time, addressed by `pass * num_samples + position`.

    A pass visits every crop once. It has several rounds, and each of them goes through all tiles, in a random order
    and a window at a time: it takes so many crops of each tile as are its share, which are mixed with those of the
    other tiles of the window. Shares are in proportion to the crops that tiles have, so that each round sees all parts
    of the boxes equally. Like `Order` it is a function of the seed alone.
    """

    def __init__(self, tiling: Tiling, seed: int, tiles_at_once: int, crops_per_tile: int) -> None:
        """Windows of `tiles_at_once` tiles; of the largest, at most `crops_per_tile` crops are taken in a round."""
        self.tiles_at_once = tiles_at_once
        self.num_samples = int(tiling.num_places.sum())
        self.num_rounds = -(-int(tiling.num_places.max()) // crops_per_tile)
        self.window = min(MOST_PLACES, -(-self.num_samples // self.num_rounds))
        """Places that are worth evaluating at a time."""
        self._tiling = tiling
        self._windows_per_round = -(-tiling.num_tiles // tiles_at_once)
        self._tiles = Order(tiling.num_tiles, seed, purpose="order of tiles")
        self._order = lru_cache(maxsize=64)(
            lambda size, what: Order(size, seed, purpose=f"order of the crops of a {what}")
        )
        self._round = lru_cache(maxsize=4)(self._find_round)

    def _taken(self, round_: int) -> Any:
        """Crops that the rounds of a pass before this one take of each tile."""
        return self._tiling.num_places * round_ // self.num_rounds

    def _find_round(self, number: int) -> _Round:
        """A round, counted through all passes."""
        pass_, round_ = divmod(number, self.num_rounds)
        num_tiles = self._tiling.num_tiles
        tiles = self._tiles.indices(number * num_tiles, num_tiles).numpy()
        taken = self._taken(round_)
        shares = (self._taken(round_ + 1) - taken)[tiles]
        edges = pass_ * self.num_samples + int(taken.sum()) + np.concatenate([[0], shares.cumsum()])
        return _Round(tiles, taken[tiles], edges, np.append(edges[: -1 : self.tiles_at_once], edges[-1]))

    def _round_at(self, place: int) -> int:
        """The number of the round that holds a place of the order."""
        pass_, position = divmod(place, self.num_samples)
        begins = range(self.num_rounds)
        return pass_ * self.num_rounds + bisect_right(begins, position, key=lambda each: self._taken(each).sum()) - 1

    def window_at(self, place: int) -> TileWindow:
        """The window that holds a place of the order."""
        number = self._round_at(place)
        within = int(np.searchsorted(self._round(number).windows, place, side="right")) - 1
        return self.numbered(number * self._windows_per_round + within)

    def numbered(self, number: int) -> TileWindow:
        """A window by its number."""
        which, within = divmod(number, self._windows_per_round)
        found, first = self._round(which), within * self.tiles_at_once
        start, stop = found.windows[within : within + 2].tolist()
        return TileWindow(number, start, stop, tuple(found.tiles[first : first + self.tiles_at_once].tolist()))

    def indices(self, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Sample indices (count,) for places `start` to `start + count`, which may span rounds and passes."""
        found = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            number = self._round_at(start + done)
            stop = min(start + count, int(self._round(number).edges[-1]))
            found[done : stop - start] = self._inside(number, np.arange(start + done, stop))
            done = stop - start
        return devices.of(torch.device(device)).sent(torch.from_numpy(found))

    def _inside(self, number: int, place: Any) -> Any:
        """The samples of places of a round."""
        found, tiling = self._round(number), self._tiling
        window = np.searchsorted(found.windows, place, side="right") - 1
        start, length = found.windows[window], np.diff(found.windows)[window]
        mixed = start + self._shuffled("window", length, number * self._windows_per_round + window, place - start)
        which = np.searchsorted(found.edges, mixed, side="right") - 1
        tiles, turn = found.tiles[which], found.taken[which] + mixed - found.edges[which]
        epochs = number // self.num_rounds * tiling.num_tiles + tiles  # each tile has orders of its own
        return tiling.samples(tiles, self._shuffled("tile", tiling.num_places[tiles], epochs, turn))

    def _shuffled(self, what: str, sizes: Any, epochs: Any, offsets: Any) -> Any:
        """Where offsets come to lie in windows or tiles of these sizes."""
        found = np.empty_like(offsets)
        for size in np.unique(sizes).tolist():
            mine = np.flatnonzero(sizes == size)
            found[mine] = self._order(size, what).at(epochs[mine] * size + offsets[mine])
        return found


class TiledCrops(Crops):
    """A source: all crops of boxes of which some tiles at a time are in memory.

    A part of it, such as `draw` gives, has no tiles: it is read as other crops are.
    """

    def __init__(
        self, volumes: Sequence[Volume], crop: int, tile: int, tiles_at_once: int | None = None,
        crops_per_tile: int = CROPS_PER_TILE, wrap: bool = False, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """Tiles of at most `tile` cells a side; crops of `tiles_at_once` of them (4) are mixed with each other.

        At most `crops_per_tile` crops are taken of a tile before others follow. All three decide about the order of
        samples, and so about the result.
        """
        super().__init__(volumes, crop, wrap, dtype, on_disk=True)
        for key, value in (("tiles_at_once", tiles_at_once), ("crops_per_tile", crops_per_tile)):
            if value is not None and value < 1:
                raise UserError(f"data.{key} is {value}: it has to be at least 1")
        if tile < crop:
            raise UserError(f"a tile of {tile}³ cells is too small for a crop of {crop}³; use data.tile={4 * crop}")
        for volume in volumes:
            if min(volume.size) < tile:
                raise UserError(
                    f"{volume.name} has {'×'.join(map(str, volume.size))} cells, fewer than a tile of {tile}³; use "
                    f"data.tile={max(crop, min(volume.size) // 2)}, or leave data.tile out if the boxes fit into memory"
                )
        self.tiling = Tiling(self.sizes, crop, wrap, tile)
        if tiles_at_once is not None and tiles_at_once > self.tiling.num_tiles:
            raise UserError(
                f"data.tiles_at_once is {tiles_at_once}, but the boxes have {self.tiling.num_tiles} tiles; use "
                f"data.tiles_at_once={self.tiling.num_tiles} or less, or leave data.tile out"
            )
        self.tiles_at_once = min(tiles_at_once or TILES_AT_ONCE, self.tiling.num_tiles)
        self.crops_per_tile = crops_per_tile

    @property
    def cell_bytes(self) -> int:
        """Of all fields of a cell."""
        return sum(count * self.dtypes[key].itemsize for key, count in self.num_fields.items())

    @property
    def buffer_bytes(self) -> int:
        """Of the tiles that are in memory at a time."""
        return NUM_WINDOWS * self.tiles_at_once * self.tiling.edge**3 * self.cell_bytes

    def order(self, seed: int) -> TileOrder:
        """The order of crops for a seed."""
        return TileOrder(self.tiling, seed, self.tiles_at_once, self.crops_per_tile)

    def fill(self, part: Tensor, key: str, tile: int, first: int) -> None:
        """Read planes of a tile, from `first` on, into a tensor (fields, planes, cells, cells)."""
        corner = self.tiling.start[tile] + np.array([first, 0, 0])
        self.read_into(part, self.volumes[self.tiling.box[tile]], key, corner.tolist())

    def describe(self) -> str:
        """The tiles in words."""
        tiling, crops = self.tiling, min(self.crops_per_tile, int(self.tiling.num_places.max()))
        return (
            f"{tiling.num_tiles:,} of up to {tiling.edge}³ cells, {self.tiles_at_once} at once, {crops:,} crops of each"
        )
