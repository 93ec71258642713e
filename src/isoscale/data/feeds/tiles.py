"""Tiles of boxes in memory: crops are gathered from those of a window while a thread reads those of the next one."""

import queue
import threading
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isoscale.data.batches import Plan
from isoscale.data.feeds.feed import Part, Window, as_part, cut_rows, owned
from isoscale.data.feeds.host import HostFeed, HostSlot, Reader, wait_for
from isoscale.data.tiles import NUM_WINDOWS, TiledCrops, TileOrder, TileWindow
from isoscale.data.volumes import Geometry
from isoscale.errors import UserError
from isoscale.system import devices

SLAB_BYTES = 32 << 20
"""Of a tile that are read at a time."""
MOST_SLABS = 2
"""On their way to the device."""


class Loaded(NamedTuple):
    """A window in one half of the buffers, there once `event` has passed."""

    window: TileWindow
    tiles: Tensor
    """Their numbers on the device, in the order in which they lie there."""
    first_slot: int
    event: Any


class TileFeed:
    """Crops gathered from tiles in the memory of a device: one half is trained on while the other one is read.

    Batches are gathered before a launch, not in it. So a launch may reach from window to window, however many of them.
    """

    def __init__(self, crops: TiledCrops, order: TileOrder, plan: Plan, device: torch.device) -> None:
        """Make room for the tiles of two windows on `device`; they are read when steps ask for them."""
        self._crops, self._order, self._plan, self._device = crops, order, plan, device
        self._accelerator = devices.of(device)
        _check_memory(crops, self._accelerator)
        tiling, edge = crops.tiling, crops.tiling.edge
        self._buffers = {
            key: torch.empty(
                NUM_WINDOWS * crops.tiles_at_once, *[edge] * 3, num, dtype=crops.dtypes[key], device=device
            )
            for key, num in crops.num_fields.items()
        }
        self._geometry = Geometry(crops.sizes, crops.crop, crops.wrap, device)
        self._stride, self._grid, self._first_tile = (
            torch.as_tensor(each, device=device) for each in (tiling.stride, tiling.grid, tiling.first_tile)
        )
        self._size = torch.full((1, 3), edge, device=device)
        self._samples = Window(order, device, order.window)
        self._stream = self._accelerator.new_stream()
        self._reader: Reader | None = None
        self._current: Loaded | None = None
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Halves that are free, each as an event after which nobody reads it any more."""
        self._closed = threading.Event()
        self._copies: deque[Any] = deque()
        """Of slabs on their way to the device, in the thread: for the memory that they come from."""

    def parts(self, step: int) -> list[list[Part]]:
        """The parts of a step; tiles are read afresh where it does not follow the last one."""
        place, size = self._plan.place(step), self._plan.size(step)
        share = self._plan.share(size)
        if not share.count:
            return [[] for _ in share.parts]
        samples = owned(self._samples.read(place, size), share)
        places = np.concatenate([np.arange(place + start, place + stop) for start, stop in share.rows])
        crop = self._crops.crop
        rows = {key: buffer.new_empty(share.count * crop**3, buffer.shape[-1]) for key, buffer in self._buffers.items()}
        done = 0
        while done < share.count:  # once, unless the batch reaches into further windows
            loaded = self._hold(int(places[done]))
            stop = int(np.searchsorted(places, loaded.window.stop))
            cells = self._cells(samples[done:stop], loaded).view(-1)
            for key, buffer in self._buffers.items():
                into = rows[key][done * crop**3 : stop * crop**3]
                torch.index_select(buffer.view(-1, buffer.shape[-1]), 0, cells, out=into)
            done = stop
        batch = {key: found.view(share.count, crop, crop, crop, -1).movedim(-1, 1) for key, found in rows.items()}
        return (cut_rows if share.only is None else as_part)(share, batch, samples)

    def _cells(self, samples: Tensor, loaded: Loaded) -> Tensor:
        """The numbers (batch, crop, crop, crop) of the cells of crops in the buffers."""
        box, corner = self._geometry.corners(samples)
        stride, grid = self._stride[box], self._grid[box]
        where = corner // stride
        tile = self._first_tile[box] + (where[:, 0] * grid[:, 1] + where[:, 1]) * grid[:, 2] + where[:, 2]
        slot = loaded.first_slot + (tile[:, None] == loaded.tiles).to(torch.uint8).argmax(1)
        cells = self._geometry.grid(corner - where * stride, self._size.expand(len(samples), 3))
        return cells + (slot * self._crops.tiling.edge**3)[:, None, None, None]

    def _hold(self, place: int) -> Loaded:
        """The window of a place of the order; the half of the one before it is free from then on."""
        before = self._current
        if before is not None and before.window.start <= place < before.window.stop:
            return before
        number = self._order.window_at(place).number
        try:
            if self._reader is None or before is None or number != before.window.number + 1:
                self.close()
                for _ in range(NUM_WINDOWS):
                    self._free.put(self._moment())
                self._reader = Reader(self._load_from(number, self._free, self._closed), 1)
                before = None
            loaded: Loaded = self._reader.get()
            wait_for(loaded.event, loaded.tiles, self._device)
        except BaseException:
            self.close()  # nothing more comes after an error: the next call reads afresh
            raise
        if before is not None:
            self._free.put(self._moment())
        self._current = loaded
        return loaded

    def _moment(self, **options: Any) -> Any:
        """Behind all that the running stream was given so far; None where nothing is put off."""
        return self._accelerator.recorded(**options) if isinstance(self._accelerator, devices.Cuda) else None

    def _load_from(self, first: int, free: "queue.SimpleQueue[Any]", closed: threading.Event) -> Iterator[Loaded]:
        """Read window after window, in a thread, each when a half is free."""
        before: dict[int, int] = {}
        for number in count(first):
            moment = free.get()
            if closed.is_set():
                return
            first_slot = (number - first) % NUM_WINDOWS * self._crops.tiles_at_once
            window = self._order.numbered(number)
            with self._accelerator.on(self._stream):
                if moment is not None:
                    self._stream.wait_event(moment)
                for slot, tile in enumerate(window.tiles, first_slot):
                    for _ in self._load(tile, slot, before.get(tile)):
                        if closed.is_set():
                            return
                tiles = self._accelerator.sent(torch.tensor(window.tiles))
                event = None if self._stream is None else self._stream.record_event()
            before = {tile: slot for slot, tile in enumerate(window.tiles, first_slot)}
            yield Loaded(window, tiles, first_slot, event)

    def _load(self, tile: int, slot: int, known: int | None) -> Iterator[None]:
        """Bring a tile to its place, slab by slab: from a file, unless the window before it has it too."""
        crops = self._crops
        size = (crops.tiling.extent[tile] + crops.crop - 1).tolist()
        for key, buffer in self._buffers.items():
            planes = max(1, SLAB_BYTES // (size[1] * size[2] * buffer[0, 0, 0, 0].nbytes))
            for start in range(0, size[0], planes):
                place = slice(start, min(start + planes, size[0])), slice(size[1]), slice(size[2])
                slab = buffer[slot][place]
                if known is not None:
                    slab.copy_(buffer[known][place])
                elif self._stream is None:
                    crops.fill(slab.movedim(-1, 0), key, tile, start)
                else:  # through page-locked memory, so that the device copies by itself
                    if len(self._copies) == MOST_SLABS:
                        self._copies.popleft().synchronize()
                    staged = torch.empty(slab.shape, dtype=slab.dtype, pin_memory=True)
                    crops.fill(staged.movedim(-1, 0), key, tile, start)
                    slab.copy_(staged, non_blocking=True)
                    self._copies.append(self._moment(blocking=True))
                yield

    def slot(self, step: int, num_steps: int) -> HostSlot:
        """A slot that holds whole batches."""
        return HostSlot(self, self.parts(step), num_steps)

    def close(self) -> None:
        """Stop the thread; the tiles have to be read again."""
        if self._reader is not None:
            self._closed.set()
            self._free.put(None)
            self._reader.close()
            if self._stream is not None:
                self._stream.synchronize()
        self._reader = self._current = None
        self._free, self._closed = queue.SimpleQueue(), threading.Event()


class HostTileFeed(HostFeed):
    """Crops gathered by a thread from tiles in the memory of the host, and copied to the device ahead of the step."""

    def __init__(self, crops: TiledCrops, order: TileOrder, plan: Plan, device: torch.device) -> None:
        """Make room for the tiles of two windows."""
        super().__init__(crops, order, plan, device)
        self._tiles = TileFeed(crops, order, plan, torch.device("cpu"))

    def _read_from(self, step: int) -> Iterator[tuple[list[list[Part]], Any]]:
        return (self._send(self._tiles.parts(number)) for number in count(step))

    def close(self) -> None:
        """Stop both threads."""
        super().close()
        self._tiles.close()


def _check_memory(crops: TiledCrops, accelerator: devices.Accelerator) -> None:
    """Refuse tiles that there is no room for, with a size that there is."""
    needed, free = crops.buffer_bytes, accelerator.available_memory
    if needed <= free:
        return
    fitting = int((free / 2 / (NUM_WINDOWS * crops.tiles_at_once * crops.cell_bytes)) ** (1 / 3))
    smaller = f"data.tile={fitting}, " if fitting >= crops.crop else ""
    raise UserError(
        f"{NUM_WINDOWS * crops.tiles_at_once} tiles of {crops.tiling.edge}³ cells take {needed / 2**30:.1f} GiB, but "
        f"{accelerator.description} has {free / 2**30:.1f} GiB left; use {smaller}a smaller data.tiles_at_once, "
        "data.dtype=bfloat16 or data.residency=disk"
    )
