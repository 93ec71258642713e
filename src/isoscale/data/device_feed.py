"""Data that lives on the device: the step gathers its rows."""

import torch
from torch import Tensor

from isoscale.data.batches import Batch, BatchPlan, map_tensors
from isoscale.data.feed import Indices, Part, Window
from isoscale.data.sources import Source, TensorSource

WINDOW = 1 << 20
WINDOW_ON_CPU = 1 << 15


class DeviceFeed:
    """Rows gathered, in the step, from tensors that live on the device."""

    def __init__(self, source: Source, order: Indices, plan: BatchPlan, device: torch.device) -> None:
        """Bring all of `source` to `device`."""
        whole = source.tensors if isinstance(source, TensorSource) else source.fetch(torch.arange(len(source)))
        self._resident = map_tensors(whole, lambda tensor: tensor.to(device).contiguous())
        plain = isinstance(whole, dict) and all(isinstance(value, Tensor) for value in whole.values())
        self._single = self._resident if plain else None
        self._plan = plan
        self._device = device
        self._window = Window(order, device, WINDOW_ON_CPU if device.type == "cpu" else WINDOW)
        self._ranges: dict[int, list[list[tuple[int, int]]]] = {}

    def parts(self, step: int) -> list[list[Part]]:
        """The parts of a step."""
        size = self._plan.size(step)
        return self.cut(self._window.read(self._plan.place(step), size))

    def cut(self, samples: Tensor) -> list[list[Part]]:
        """Gather the rows of a step's samples, each part by itself."""
        size = samples.shape[0]
        ranges = self._ranges.get(size) or self._ranges.setdefault(size, self._plan.parts(size))
        if len(ranges) == 1 and len(ranges[0]) == 1:
            return [[Part(self._gather(samples), samples)]]
        return [[self._part(samples[start:stop]) for start, stop in shard] for shard in ranges]

    def _part(self, samples: Tensor) -> Part:
        return Part(self._gather(samples), samples)

    def _gather(self, samples: Tensor) -> Batch:
        if self._single is not None:
            return {key: tensor.index_select(0, samples) for key, tensor in self._single.items()}
        return map_tensors(self._resident, lambda tensor: tensor.index_select(0, samples))

    def read(self, step: int, num_steps: int) -> Tensor:
        """Sample indices of a launch of equal steps."""
        return self._window.read(self._plan.place(step), num_steps * self._plan.size(step))

    def slot(self, step: int, num_steps: int) -> "DeviceSlot":
        """A slot that holds sample indices."""
        return DeviceSlot(self, self._plan.size(step), num_steps, self._device)

    def close(self) -> None:
        """Nothing runs ahead."""


class DeviceSlot:
    """Sample indices at a fixed address; the rows are gathered inside the captured launch."""

    def __init__(self, feed: DeviceFeed, size: int, num_steps: int, device: torch.device) -> None:
        """Indices for `num_steps` batches of `size` samples."""
        self._feed = feed
        self._size = size
        self._num_steps = num_steps
        self._samples = torch.zeros(num_steps * size, dtype=torch.int64, device=device)

    def fill(self, step: int) -> None:
        """Copy the launch's indices from the window."""
        self._samples.copy_(self._feed.read(step, self._num_steps))

    def parts(self, offset: int) -> list[list[Part]]:
        """Gather the parts of a step."""
        return self._feed.cut(self._samples[offset * self._size : (offset + 1) * self._size])
