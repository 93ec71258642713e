"""Data that lives on the device: the step gathers its rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isoscale.data.batches import Batch, Plan, copy_batch, map_tensors, tensors_of
from isoscale.data.feeds.feed import Indices, Part, Window, aligned_stride, as_part, cut_rows, owned
from isoscale.data.shards import Share
from isoscale.data.sources import Source, Subset, TensorSource, hands_out_copies, nbytes
from isoscale.system import devices

LAUNCH_BYTES = 1 << 30
LAUNCH_SHARE = 1 / 64
"""Of rows that are gathered ahead for the steps of a launch: so many, and at most this share of the device."""
BLOCK_BYTES = 256 << 20
"""Of samples that are on their way to the device."""
PREPARED_SHARE = 1 / 8
"""Of the device's whole memory: what tasks make of samples before training may take so much."""
WINDOW = 1 << 20
WINDOW_ON_CPU = 1 << 15


class DeviceFeed:
    """Rows gathered, in the step, from tensors that live on the device."""

    def __init__(self, source: Source, order: Indices, plan: Plan, device: torch.device) -> None:
        """Bring all of `source` to `device`."""
        self._fetch = _fetcher(source, device)
        self._resident: Batch = None
        self._single: dict[str, Tensor] | None = None
        self._is_own = False
        self._plan = plan
        self._device = device
        size = WINDOW_ON_CPU if device.type == "cpu" else WINDOW
        self._window = Window(order, device, getattr(order, "window", size))
        if self._fetch is None:
            self._bring(source)

    def _bring(self, source: Source) -> None:
        """Keep all samples as rows of tensors."""
        device = self._device
        self._resident = whole = _brought(source, device)
        plain = isinstance(whole, dict) and all(isinstance(value, Tensor) for value in whole.values())
        self._single = self._resident if plain else None
        shared = isinstance(source, TensorSource) or not hands_out_copies(source)
        self._is_own = not (shared and device.type == "cpu")
        """Whether nobody else holds these tensors."""

    def parts(self, step: int) -> list[list[Part]]:
        """The parts of a step."""
        size = self._plan.size(step)
        share = self._plan.share(size)
        return self.cut(share, owned(self._window.read(self._plan.place(step), size), share))

    def cut(self, share: Share, samples: Tensor) -> list[list[Part]]:
        """Gather the rows of a share's samples, each part by itself."""
        if share.only is not None:
            return as_part(share, self.gather(samples), samples)
        pieces = [[samples[start:stop] for start, stop in shard] for shard in share.parts]
        return [[Part(self.gather(piece), piece) for piece in shard] for shard in pieces]

    def gather(self, samples: Tensor) -> Batch:
        """The rows of samples."""
        if self._fetch is not None:
            return self._fetch(samples)
        if self._single is not None:
            return {key: tensor.index_select(0, samples) for key, tensor in self._single.items()}
        return map_tensors(self._resident, lambda tensor: tensor.index_select(0, samples))

    def settle(self, transforms: Sequence[Any]) -> list[Any]:
        """Apply now, to all samples, what a step would do to each of them alike; returns what is left for the step.

        A transform says of itself that it is `rowwise`: it changes one entry of a sample, by itself, and always in the
        same way. It must leave the entry's type as it is, and no transform before it may be left that touches it too.
        """
        left: list[Any] = []
        for transform in transforms:
            if self._is_settled(transform, left):
                # In place, block by block: there may be no room for a second tensor.
                tensor = self._resident[transform.key]
                for block in tensor.split(max(1, BLOCK_BYTES // max(1, tensor[0].nbytes))):
                    block.copy_(transform({transform.key: block})[transform.key])
            else:
                left.append(transform)
        return left

    def precompute(self, make: Callable[[Batch], Batch], memory: int) -> None:
        """Keep what `make` makes of samples, each by itself, instead of the samples, if it takes little of `memory`."""
        if self._fetch is not None:
            return
        count = len(tensors_of(self._resident)[0])
        with torch.no_grad():
            like = make(self.gather(torch.zeros(1, dtype=torch.int64, device=self._device)))
            row_bytes = sum(tensor.nbytes for tensor in tensors_of(like))
            if count * row_bytes > PREPARED_SHARE * memory:
                return
            whole = map_tensors(like, lambda tensor: tensor.new_empty(count, *tensor.shape[1:]))
            for rows in torch.arange(count, device=self._device).split(max(1, BLOCK_BYTES // max(1, row_bytes))):
                place = slice(int(rows[0]), int(rows[-1]) + 1)
                copy_batch(map_tensors(whole, lambda tensor: tensor[place]), make(self.gather(rows)))  # noqa: B023
        self._resident, self._single, self._is_own = whole, whole if isinstance(whole, dict) else None, True

    def _is_settled(self, transform: Any, left: Sequence[Any]) -> bool:
        touched = {getattr(each, "key", None) for each in left}
        if not (getattr(transform, "rowwise", False) and self._is_own and self._single) or None in touched:
            return False
        own = self._single.get(transform.key)
        if own is None or transform.key in touched or not len(own):
            return False
        changed = transform({transform.key: own[:1]})[transform.key]
        return changed.dtype == own.dtype and changed.shape[1:] == own.shape[1:]

    def read(self, step: int, num_steps: int) -> Tensor:
        """Sample indices (steps, share) of a launch of equal steps."""
        size = self._plan.size(step)
        samples = self._window.read(self._plan.place(step), num_steps * size)
        return owned(samples.view(num_steps, size), self._plan.share(size))

    def slot(self, step: int, num_steps: int) -> "DeviceSlot | LaunchSlot":
        """A slot that holds sample indices; where there is room, the rows of a launch are gathered all at once."""
        share = self._plan.share(self._plan.size(step))
        size = share.count
        if self._fetch is not None:
            return DeviceSlot(self, share, num_steps, self._device)
        tensors = [tensor for tensor in tensors_of(self._resident) if len(tensor)]
        stride = aligned_stride(size, [tensor[0].nbytes for tensor in tensors])
        needed = num_steps * stride * sum(tensor[0].nbytes for tensor in tensors)
        if num_steps > 1 and size and stride <= 2 * size and needed <= _launch_bytes(self._device):
            return LaunchSlot(self, share, stride, num_steps, self._device)
        return DeviceSlot(self, share, num_steps, self._device)

    def close(self) -> None:
        """Nothing runs ahead."""


def _fetcher(source: Source, device: torch.device) -> Callable[[Tensor], Batch] | None:
    """What a source of its own kind keeps on the device and fetches samples from there; None for rows of tensors."""
    if isinstance(source, Subset):
        inner, indices = _fetcher(source.source, device), source.indices.to(device)
        return None if inner is None else lambda samples: inner(indices[samples])
    resident = getattr(source, "resident", None)
    return None if resident is None else resident(device)


def _brought(source: Source, device: torch.device) -> Batch:
    """All samples on a device."""
    if getattr(source, "on_disk", False) and device.type != "cpu":
        return brought_in_blocks(source, device)
    whole = source.tensors if isinstance(source, TensorSource) else source.fetch(torch.arange(len(source)))
    return map_tensors(whole, lambda tensor: tensor.to(device).contiguous())


def brought_in_blocks(source: Source, device: torch.device) -> Batch:
    """All samples of files on a device, of which the host never holds more than a block."""
    size = max(1, BLOCK_BYTES // max(1, nbytes(source) // len(source)))
    blocks = torch.arange(len(source)).split(size)
    like = source.fetch(blocks[0][:1])
    whole = map_tensors(like, lambda tensor: tensor.new_empty(len(source), *tensor.shape[1:], device=device))
    for rows in blocks:
        place = slice(int(rows[0]), int(rows[-1]) + 1)
        copy_batch(map_tensors(whole, lambda tensor: tensor[place]), source.fetch(rows))  # noqa: B023
    return whole


def _launch_bytes(device: torch.device) -> float:
    found = devices.of(device)
    return min(LAUNCH_BYTES, LAUNCH_SHARE * found.total_memory) if found.can_capture else LAUNCH_BYTES


class DeviceSlot:
    """Sample indices at a fixed address; the rows are gathered inside the captured launch, step by step."""

    def __init__(self, feed: DeviceFeed, share: Share, num_steps: int, device: torch.device) -> None:
        """Indices for the shares of `num_steps` batches."""
        self._feed = feed
        self._share = share
        self._num_steps = num_steps
        self._samples = torch.zeros(num_steps, share.count, dtype=torch.int64, device=device)

    def fill(self, step: int) -> None:
        """Copy the launch's indices from the window."""
        self._samples.copy_(self._feed.read(step, self._num_steps))

    def parts(self, offset: int) -> list[list[Part]]:
        """Gather the parts of a step."""
        return self._feed.cut(self._share, self._samples[offset])


class LaunchSlot:
    """Sample indices of a launch, whose rows are gathered at its start in one go.

    A gather of one batch waits for memory most of the time; a gather of fifty keeps it busy. The rows of each step
    begin at an aligned address, as those of a batch gathered by itself do: matrix libraries choose kernels by that.
    """

    def __init__(self, feed: DeviceFeed, share: Share, stride: int, num_steps: int, device: torch.device) -> None:
        """Indices for the shares of `num_steps` batches, each in the first places of `stride`."""
        self._feed = feed
        self._share = share
        self._size = share.count
        self._num_steps = num_steps
        self._samples = torch.zeros(num_steps, stride, dtype=torch.int64, device=device)
        self._stride = stride
        self._rows: Batch = None

    def fill(self, step: int) -> None:
        """Copy the launch's indices from the window."""
        self._samples[:, : self._size].copy_(self._feed.read(step, self._num_steps))

    def parts(self, offset: int) -> list[list[Part]]:
        """The parts of a step; the first one gathers for all."""
        if offset == 0:
            self._rows = self._feed.gather(self._samples.view(-1))
        start = offset * self._stride
        batch = map_tensors(self._rows, lambda tensor: tensor[start : start + self._size])
        samples = self._samples[offset, : self._size]
        return (cut_rows if self._share.only is None else as_part)(self._share, batch, samples)
