"""Copies of a live state in host memory that is used again from save to save, so that training can go on at once."""

import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isoscale.system import devices
from isoscale.system.devices import Cuda

_ALIGNMENT = 64
"""Bytes; any dtype can be looked at from such a place."""

Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


@dataclass
class Snapshot:
    """A state as it was at one moment; nothing of the live state is read any more."""

    tensors: dict[str, dict[str, Tensor]]
    """On the host, contiguous, no two of them in the same memory; theirs only until the next one."""
    values: str
    """JSON."""
    _arrival: Any = None
    """The event behind the last copy."""
    _clone: Tensor | None = None
    """Kept until the host has it all: the device's memory would be given to others."""

    def wait(self) -> None:
        """Wait until the tensors have arrived from the device."""
        if self._arrival is not None:
            self._arrival.synchronize()
        self._arrival = self._clone = None


class HostSnapshot:
    """Takes one state at a time: the last one must be written before the next."""

    def __init__(self) -> None:
        """Memory is taken at the first one, and again only when a shape has changed."""
        self._layouts: tuple[Layout, Layout] | None = None
        self._stream: Any = None
        self._unlock: Callable[[], object] = lambda: None

    def take(self, tensors: Mapping[str, Mapping[str, Tensor]], values: Mapping[str, Any]) -> Snapshot:
        """Copy a state, behind the work that the device was given so far, without waiting for it."""
        text = json.dumps(values, indent=1)  # a metric may be NaN, which Python reads back
        live = {f"{part}/{name}": tensor.detach() for part, group in tensors.items() for name, tensor in group.items()}
        remote = {name: tensor for name, tensor in live.items() if devices.of(tensor.device).copies_beside}
        local = {name: tensor for name, tensor in live.items() if name not in remote}
        self._make_room((_layout(remote), _layout(local)), _device(remote.values()))
        for name, tensor in local.items():
            self._views[name].copy_(tensor)
        device = _device(remote.values())
        arrival, clone = self._fetch(list(remote.items()), device) if device else (None, None)
        copies = {part: {name: self._views[f"{part}/{name}"] for name in group} for part, group in tensors.items()}
        return Snapshot(copies, text, arrival, clone)

    def _make_room(self, layouts: tuple[Layout, Layout], device: Cuda | None) -> None:
        if layouts == self._layouts:
            return
        self._unlock()
        remote, local = (torch.empty(_num_bytes(layout), dtype=torch.uint8) for layout in layouts)
        self._remote, self._layouts = remote, layouts
        self._views = {**_views(remote, layouts[0]), **_views(local, layouts[1])}
        if device is not None:
            unlock = weakref.finalize(self, device.page_lock(remote))
            unlock.atexit = False
            self._unlock = unlock

    def _fetch(self, remote: list[tuple[str, Tensor]], device: Cuda) -> tuple[Any, Tensor | None]:
        """Clone on the device and copy from there beside the training; without room for it, copy in its way."""
        clone = _clone(remote, self._layouts[0], device) if self._layouts else None
        if clone is None:
            for name, tensor in remote:
                self._views[name].copy_(tensor, non_blocking=True)
            return device.recorded(blocking=True), None
        self._stream = self._stream or device.new_stream()
        self._stream.wait_stream(device.running_stream())
        with device.on(self._stream):
            self._remote.copy_(clone, non_blocking=True)
            return device.recorded(blocking=True), clone


def _device(tensors: Iterable[Tensor]) -> Cuda | None:
    """The device of tensors that are to be copied beside the training; None where there are none."""
    found = next((devices.of(tensor.device) for tensor in tensors), None)
    assert found is None or isinstance(found, Cuda)
    return found


def _clone(live: list[tuple[str, Tensor]], layout: Layout, device: Cuda) -> Tensor | None:
    """Copies on the device in one piece of memory; None unless there is room for the training to grow besides."""
    num_bytes = _num_bytes(layout)
    if device.free_memory < 2 * num_bytes:
        return None
    try:
        clone = torch.empty(num_bytes, dtype=torch.uint8, device=device.device)
    except torch.OutOfMemoryError:
        return None
    views = _views(clone, layout)
    for dtype in {tensor.dtype for _, tensor in live}:
        chosen = [(views[name], tensor) for name, tensor in live if tensor.dtype == dtype]
        torch._foreach_copy_([view for view, _ in chosen], [tensor for _, tensor in chosen])
    return clone


def _layout(tensors: Mapping[str, Tensor]) -> Layout:
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _num_bytes(layout: Layout) -> int:
    return sum(_aligned(_size(dtype, shape)) for _, dtype, shape in layout)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: Tensor, layout: Layout) -> dict[str, Tensor]:
    """A buffer as tensors, one behind the other."""
    views, begin = {}, 0
    for name, dtype, shape in layout:
        size = _size(dtype, shape)
        views[name] = buffer[begin : begin + size].view(dtype).view(shape)
        begin += _aligned(size)
    return views
