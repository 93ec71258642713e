"""Many tensors in one piece of memory, so that they travel at once."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

_ALIGNMENT = 128
"""Bytes: where a tensor may begin, so that vector loads are whole."""


class Buffer:
    """Room for a list of tensors side by side, those of one dtype together."""

    def __init__(self, like: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
        """For tensors like these; all are kept in `dtype`, or each in its own. A complex one is two real ones."""
        self._is_complex = [tensor.is_complex() for tensor in like]
        like = _real(like)
        self._like = [torch.empty_like(tensor, device="meta") for tensor in like]
        self._dtype = dtype
        self._device = like[0].device
        kinds = [dtype or tensor.dtype for tensor in like]
        places: list[tuple[int, int]] = [(0, 0)] * len(like)
        bounds, position = [], 0
        for kind in dict.fromkeys(kinds):
            first = position
            for number in (number for number, each in enumerate(kinds) if each == kind):
                length = like[number].numel() * kind.itemsize
                places[number] = (position, position + length)
                position += -(-length // _ALIGNMENT) * _ALIGNMENT
            bounds.append((kind, first, position))
        self.bytes = torch.zeros(position, dtype=torch.uint8, device=self._device)
        self.sections = [self.bytes[first:last].view(kind) for kind, first, last in bounds]
        """All tensors of a dtype as one."""
        self._views = [
            self.bytes[first:last].view(kind).view(tensor.shape)
            for (first, last), kind, tensor in zip(places, kinds, like, strict=True)
        ]

    @cached_property
    def other(self) -> "Buffer":
        """Room for what another rank sends."""
        return Buffer([torch.empty_like(tensor, device=self._device) for tensor in self._like], self._dtype)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors in."""
        torch._foreach_copy_(self._views, _real(tensors))

    def clear(self) -> None:
        """Fill with what changes no sum: adding +0 would change the sign of a zero, adding -0 does not."""
        for section in self.sections:
            section.zero_().neg_()

    def tensors(self) -> list[Tensor]:
        """What is inside: views where the dtype is that of the buffer."""
        found = [view.to(tensor.dtype) for view, tensor in zip(self._views, self._like, strict=True)]
        pairs = zip(found, self._is_complex, strict=True)
        return [torch.view_as_complex(tensor) if is_complex else tensor for tensor, is_complex in pairs]


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]


class Buffers:
    """The buffers of the kinds of lists that a rank sends; they stay where they are from step to step."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        """Buffers in which all is kept in `dtype`, or each tensor in its own."""
        self._dtype = dtype
        self._buffers: dict[object, Buffer] = {}

    def filled(self, tensors: Sequence[Tensor]) -> Buffer:
        """A buffer with these tensors."""
        buffer = self._like(tensors)
        buffer.fill(tensors)
        return buffer

    def cleared(self, like: Sequence[Tensor]) -> Buffer:
        """A buffer for tensors like these that changes no sum."""
        buffer = self._like(like)
        buffer.clear()
        return buffer

    def _like(self, tensors: Sequence[Tensor]) -> Buffer:
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key not in self._buffers:
            self._buffers[key] = Buffer(tensors, self._dtype)
        return self._buffers[key]
