"""Where the bytes of a source live during training: chosen once, never seen in the result."""

from typing import Literal

import torch

from isoscale.data.batches import BatchPlan
from isoscale.data.device_feed import DeviceFeed
from isoscale.data.feed import Feed, Indices
from isoscale.data.host_feed import HostFeed, RowFeed
from isoscale.data.sources import Source, is_rows, is_vectorised, nbytes
from isoscale.errors import UserError

SHARE_OF_MEMORY = 0.25
"""Of the device's whole memory: data up to this size lives there."""

Residency = Literal["auto", "device", "host"]


def choose(source: Source, residency: Residency, device_memory: int) -> Literal["device", "host"]:
    """Decide `auto` by the size of the data against the whole of the device's memory."""
    if residency == "device" and not is_vectorised(source):
        raise UserError(
            "data.residency: device would read every sample of the dataset once and keep it, and random augmentation "
            "in it would stand still; use data.residency=host, or give tensors"
        )
    if residency != "auto":
        return residency
    if not is_vectorised(source):
        return "host"
    return "device" if nbytes(source) <= SHARE_OF_MEMORY * device_memory else "host"


def make_feed(
    residency: Literal["device", "host"], source: Source, order: Indices, plan: BatchPlan, device: torch.device
) -> Feed:
    """The feed for a residency."""
    if residency == "device":
        return DeviceFeed(source, order, plan, device)
    return (RowFeed if is_rows(source) else HostFeed)(source, order, plan, device)
