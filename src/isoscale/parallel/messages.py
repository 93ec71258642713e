"""Values that ranks send each other: JSON and the bytes of tensors, which can hold no code, unlike a pickle.

What a message says is signed by its sender. The bytes of its tensors are not: like all tensors that ranks exchange,
they are numbers, whose shapes and types are signed.
"""

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoscale.errors import UserError
from isoscale.parallel.secret import Key
from isoscale.parallel.serialize import NotPlain, put_together, take_apart

_SIZE = struct.Struct(">Q")
_SIGNATURE = 32
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


class Forged(UserError):
    """A message that no rank of this training has sent."""

    def __init__(self, what: str) -> None:
        """What it was to be."""
        super().__init__(f"{what} was not written by a rank of this training: another program speaks to its ranks")


def pack(value: Any, what: str, key: Key) -> Tensor:
    """A value as bytes on the host: plain data, tensors, arrays, paths and data types."""
    tensors: dict[str, Tensor] = {}
    try:
        structure = take_apart(value, "", tensors, _special, sys.maxsize)
    except NotPlain as error:
        raise TypeError(f"ranks cannot tell each other {what}: {error}") from None
    dense = {name: _bytes(tensor) for name, tensor in tensors.items()}
    about = {name: [_name(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    words = json.dumps([structure, about]).encode()
    head = key.sign(what.encode(), words) + _SIZE.pack(len(words)) + words
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *dense.values()])


def unpack(packed: Tensor, what: str, key: Key) -> Any:
    """The value that was packed; Forged where that was not done with the same key and for the same purpose."""
    start = _SIGNATURE + _SIZE.size
    head = packed[:start].numpy().tobytes()
    length = _SIZE.unpack(head[_SIGNATURE:])[0] if len(head) == start else 0
    words = packed[start : start + min(length, len(packed))].numpy().tobytes()
    if not key.has_signed(head[:_SIGNATURE], what.encode(), words):
        raise Forged(what)
    structure, about = json.loads(words)
    tensors, place = {}, start + length
    for name, (dtype, shape) in about.items():
        size = math.prod(shape) * _DTYPES[dtype].itemsize
        if place + size > len(packed):
            raise Forged(what)
        tensors[name] = packed[place : place + size].clone().view(_DTYPES[dtype]).reshape(shape)
        place += size
    return put_together(structure, tensors, special=_known)


def _bytes(tensor: Tensor) -> Tensor:
    on_host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return on_host.reshape(-1).view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _special(value: Any, name: str) -> Any:
    if isinstance(value, torch.dtype):
        return {"torch type": _name(value)}
    if isinstance(value, Path):
        return {"path": str(value)}
    return {"tuple": list(value)} if isinstance(value, torch.Size) else None


def _known(structure: dict[str, Any], live: Any) -> Any:
    if "torch type" in structure:
        return _DTYPES[structure["torch type"]]
    return Path(structure["path"]) if "path" in structure else NotImplemented
