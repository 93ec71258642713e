"""Where the bytes of a source live during training: chosen once, never seen in the result."""

from typing import Literal

import torch

from isoscale.data.batches import Plan
from isoscale.data.feeds.device import DeviceFeed
from isoscale.data.feeds.feed import Feed, Indices
from isoscale.data.feeds.host import HostFeed, RowFeed
from isoscale.data.feeds.packed import PackedDeviceFeed, PackedHostFeed
from isoscale.data.feeds.tiles import HostTileFeed, TileFeed
from isoscale.data.packing import PackedPlan
from isoscale.data.sources import Source, Subset, TensorSource, is_on_disk, is_rows, is_vectorised, nbytes, whole
from isoscale.data.tiles import TiledCrops, TileOrder
from isoscale.errors import UserError

SHARE_OF_DEVICE = 0.25
"""Of the device's whole memory: data up to this size lives there."""
SHARE_OF_HOST = 0.5
"""Of the host's whole memory: data in files up to this size is read into it."""

Residency = Literal["auto", "device", "host", "disk"]
Place = Literal["device", "host", "disk"]


def choose(
    source: Source, residency: Residency, device_memory: int, host_memory: int, order: Indices | None = None
) -> Place:
    """Decide `auto` by the size of the data against the whole of the device's and of the host's memory.

    Where the order goes from tiles to tiles, it is the size of those that are there at a time.
    """
    if residency == "device" and not is_vectorised(source):
        raise UserError(
            "data.residency: device would read every sample of the dataset once and keep it, and random augmentation "
            "in it would stand still; use data.residency=host, or give tensors"
        )
    if residency == "disk" and not is_on_disk(source):
        raise UserError("data.residency: disk is for data in files, and this data is in memory; use auto or host")
    is_tiled = isinstance(source, TiledCrops) and isinstance(order, TileOrder)
    if residency != "auto":
        if is_on_disk(source) and residency != "disk" and not is_tiled:
            _check_room(source, residency, device_memory if residency == "device" else host_memory)
        return residency
    if isinstance(source, TiledCrops) and is_tiled:
        size = source.buffer_bytes
    else:
        size = nbytes(source) if is_vectorised(source) or is_on_disk(source) else 0
    if is_vectorised(source) and size <= SHARE_OF_DEVICE * device_memory:
        return "device"
    return "disk" if is_on_disk(source) and size > SHARE_OF_HOST * host_memory else "host"


def _check_room(source: Source, residency: Place, memory: int) -> None:
    """Refuse to read files into memory that cannot hold them: the system would kill the process, without a word."""
    size = nbytes(source)
    if size > memory:
        raise UserError(
            f"data.residency: {residency} would read {size / 2**30:.1f} GiB into {memory / 2**30:.1f} GiB of memory; "
            "use data.residency=disk, or leave it out (auto)"
        )


def _in_memory(source: Source) -> Source:
    """The samples of files in the host's memory."""
    if isinstance(source, Subset) and hasattr(whole(source), "in_memory"):
        return Subset(_in_memory(source.source), source.indices)
    read = getattr(source, "in_memory", None)
    return TensorSource(source.fetch(torch.arange(len(source)))) if read is None else read()


def make_feed(residency: Place, source: Source, order: Indices, plan: Plan, device: torch.device) -> Feed:
    """The feed for a residency."""
    if isinstance(source, TiledCrops) and isinstance(order, TileOrder) and residency != "disk":
        return (TileFeed if residency == "device" else HostTileFeed)(source, order, plan, device)
    if residency == "device":
        feed = PackedDeviceFeed if isinstance(plan, PackedPlan) else DeviceFeed
        return feed(source, order, plan, device)  # type: ignore[arg-type]
    if residency == "host" and is_on_disk(source):
        source = _in_memory(source)
    if isinstance(plan, PackedPlan):
        return PackedHostFeed(source, order, plan, device)
    return (RowFeed if is_rows(source) else HostFeed)(source, order, plan, device)
