"""Feeds of ragged samples: the parts of each step in the room that the plan has for them."""

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from isoscale.data.feeds.feed import Indices, Part, Window, owned
from isoscale.data.feeds.host import HostFeed
from isoscale.data.packing import PackedPlan
from isoscale.data.ragged import Packer, Room, packer
from isoscale.data.samples import Request
from isoscale.data.shards import Share
from isoscale.data.sources import Source


class PackedDeviceFeed:
    """Samples that live on the device, packed in the step."""

    def __init__(self, source: Source, order: Indices, plan: PackedPlan, device: torch.device) -> None:
        """Bring all of `source` to `device`."""
        self._pack = packer(source, device)
        self._plan, self._device = plan, device
        self._window = Window(order, device, getattr(order, "window", 1 << 15))

    def parts(self, step: int) -> list[list[Part]]:
        """The parts of a step."""
        share = self._plan.share(self._plan.size(step))
        return self.cut(share, self.read(step, 1)[0], self._plan.rooms(step))

    def read(self, step: int, num_steps: int) -> Tensor:
        """Sample indices (steps, share) of a launch of equal steps."""
        size = self._plan.size(step)
        samples = self._window.read(self._plan.place(step), num_steps * size)
        return owned(samples.view(num_steps, size), self._plan.share(size))

    def cut(self, share: Share, samples: Tensor, rooms: list[list[Room]]) -> list[list[Part]]:
        """Pack the samples of a share, each part by itself."""
        return [
            [
                Part(self._pack(samples[start:stop], room), samples[start:stop])
                for (start, stop), room in zip(*shard, strict=True)
            ]
            for shard in zip(share.parts, rooms, strict=True)
        ]

    def slot(self, step: int, num_steps: int) -> "PackedSlot":
        """A slot that holds sample indices, which are packed inside the captured launch."""
        return PackedSlot(self, self._plan, step, num_steps, self._device)

    def close(self) -> None:
        """Nothing runs ahead."""


class PackedSlot:
    """Sample indices at a fixed address, for launches of steps of one shape."""

    def __init__(
        self, feed: PackedDeviceFeed, plan: PackedPlan, step: int, num_steps: int, device: torch.device
    ) -> None:
        """Indices for `num_steps` steps like `step`."""
        self._feed, self._num_steps = feed, num_steps
        self._share, self._rooms = plan.share(plan.size(step)), plan.rooms(step)
        self._samples = torch.zeros(num_steps, self._share.count, dtype=torch.int64, device=device)

    def fill(self, step: int) -> None:
        """Copy the launch's indices from the window."""
        self._samples.copy_(self._feed.read(step, self._num_steps))

    def parts(self, offset: int) -> list[list[Part]]:
        """Pack the parts of a step."""
        return self._feed.cut(self._share, self._samples[offset], self._rooms)


class PackedHostFeed(HostFeed):
    """Samples in host memory or in files, packed by a thread and copied to the device ahead of the step."""

    def __init__(
        self, source: Source, order: Indices, plan: PackedPlan, device: torch.device, num_ahead: int = 8
    ) -> None:
        """Pack up to `num_ahead` steps ahead."""
        super().__init__(source, order, plan, device, num_ahead)
        self.read_with(PackedParts(packer(source), plan, num_ahead))


class PackedParts:
    """Packs the parts that a feed asks for."""

    def __init__(self, pack: Packer, plan: PackedPlan, num_ahead: int) -> None:
        """Parts of the rooms of a plan."""
        self._pack, self._plan, self.num_ahead = pack, plan, num_ahead

    def begin(self) -> None:
        """Nothing has to be made ready."""

    def read(self, requests: Iterator[Request]) -> Iterator[Part]:
        """The parts asked for, each packed when it is needed."""
        for step, parts in groupby(requests, lambda request: request.step):
            rooms = [room for shard in self._plan.rooms(step) for room in shard]
            for request, room in zip(parts, rooms, strict=True):
                yield Part(self._pack(request.samples, room), request.samples)

    def interrupt(self) -> None:
        """A part is soon packed: there is nothing to interrupt."""

    def close(self) -> None:
        """Nothing is open."""
