"""Hooks around the transfer of a batch to the device, of modules and of data modules, in Lightning's order."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoscale.data.batches import Batch, to_device
from isoscale.data.feeds.feed import Feed, Part
from isoscale.data.feeds.host import HostSlot
from isoscale.engine.lightning.loaders import LoadedData
from isoscale.engine.lightning.overrides import overrides

ON_HOST = ("on_before_batch_transfer", "transfer_batch_to_device")
"""Hooks that see a batch before it is on the device."""

Transfer = Callable[[Batch, int], Batch]


def hooks_on_host(task: Any, data: Any) -> list[str]:
    """The hooks of a task, or of its data module, that a batch must be on the host for."""
    return [name for name in ON_HOST if _owner(name, task, data) is not None]


def transfer_of(task: Any, data: Any, device: torch.device) -> Transfer | None:
    """The hooks of a transfer, one after the other; None where there are none. A data module's own come first."""
    before, transfer, after = (
        None if owner is None else getattr(owner, name)
        for name in (*ON_HOST, "on_after_batch_transfer")
        for owner in (_owner(name, task, data),)
    )
    if before is None and transfer is None and after is None:
        return None

    def move(batch: Batch, dataloader_idx: int) -> Batch:
        if before is not None:
            batch = before(batch, dataloader_idx)
        batch = to_device(batch, device) if transfer is None else transfer(batch, device, dataloader_idx)
        return batch if after is None else after(batch, dataloader_idx)

    return move


def _owner(name: str, task: Any, data: Any) -> Any:
    owner = data.owner if isinstance(data, LoadedData) else data
    return next((each for each in (owner, task) if each is not None and overrides(each, name)), None)


class HostBatches:
    """A feed whose batches stay on the host until a hook has seen them; their sample numbers are on the device."""

    def __init__(self, feed: Feed, device: torch.device) -> None:
        """The batches of a feed that reads on the host."""
        self.feed = feed
        self._device = device

    def parts(self, step: int) -> list[list[Part]]:
        """The parts of a step."""
        return [[Part(part.batch, part.samples.to(self._device)) for part in shard] for shard in self.feed.parts(step)]

    def slot(self, step: int, num_steps: int) -> HostSlot:
        """A slot that holds whole batches, on the host."""
        return HostSlot(self, self.parts(step), num_steps)

    def close(self) -> None:
        """Stop reading ahead."""
        self.feed.close()


def check_transforms(names: Sequence[str], transforms: Sequence[Any], device: torch.device) -> str | None:
    """Why hooks on the host cannot be called; None if they can."""
    if not names or not transforms or device.type == "cpu":
        return None
    return (
        f"{names[0]} sees batches on the host, and the transforms of the recipe run on the device before it: use "
        "on_after_batch_transfer, or transform in the dataset"
    )
