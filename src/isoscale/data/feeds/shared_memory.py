"""Objects handed from process to process: tensors are copied once, into memory that both have, and the rest is pickled.

The memory is a file without a name, of which the descriptor is handed over: /dev/shm, which is small in containers, is
not used, and nothing is left behind when a process is killed.
"""

import io
import mmap
import os
import pickle
import sys
import tempfile
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64
"""Of tensors in shared memory, as torch's own: matrix libraries change bits with it."""


class Packed(NamedTuple):
    """An object in shared memory: tensors first, and from `start` on what holds them."""

    file: int
    """Descriptor, to be closed by who has it."""
    start: int
    size: int


class _Place(NamedTuple):
    """Where in shared memory a tensor is, and how it lies there."""

    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, memory: Tensor) -> Tensor:
        flat = memory[self.offset : self.offset + self.num_bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class _Packer(pickle.Pickler):
    """Pickles anything, but leaves the bytes of tensors to be copied."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.placed: list[tuple[_Place, Tensor]] = []
        self.size = 0

    def persistent_id(self, item: Any) -> tuple[Any, ...] | None:
        if type(item) is not Tensor or item.layout != torch.strided or item.device.type != "cpu" or item.is_quantized:
            return None
        stride = torch.empty_like(item, device="meta").stride()  # memory formats are kept: kernels depend on them
        num_bytes = item.numel() * item.element_size()
        place = _Place(self.size, num_bytes, item.dtype, tuple(item.shape), stride)
        self.placed.append((place, item))
        self.size += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return tuple(place)


class _Unpacker(pickle.Unpickler):
    """Reads what a packer wrote, with tensors that are views of `memory`."""

    def __init__(self, file: io.BytesIO, memory: Tensor) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, place: Any) -> Tensor:
        return _Place(*place).view(self._memory)


def pack(item: Any) -> Packed:
    """Copy an object into shared memory."""
    pickled = io.BytesIO()
    packer = _Packer(pickled)
    packer.dump(item)
    size = packer.size + pickled.tell()
    if sys.platform == "linux":
        file = os.memfd_create("isoscale")
    else:
        with tempfile.TemporaryFile() as named:
            file = os.dup(named.fileno())
    os.ftruncate(file, size)
    shared = mmap.mmap(file, size)
    memory = torch.frombuffer(shared, dtype=torch.uint8)
    for place, tensor in packer.placed:
        place.view(memory).copy_(tensor.detach())
    shared[packer.size :] = pickled.getvalue()
    return Packed(file, packer.size, size)


def unpack(packed: Packed) -> Any:
    """The object; its tensors keep the memory for as long as they live."""
    shared = mmap.mmap(packed.file, packed.size)
    memory = torch.frombuffer(shared, dtype=torch.uint8)
    return _Unpacker(io.BytesIO(shared[packed.start :]), memory).load()
