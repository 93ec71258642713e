"""Pickles of arrays and plain containers, read without running anything that they ask for.

By hand, because records of LMDB files and batches of CIFAR are bare pickles: `torch.load(weights_only=True)` reads
torch's own files alone, and numpy either refuses pickles or runs them.
"""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import torch

_KINDS = "biufcSU"


def loads(content: bytes | memoryview, encoding: str = "ASCII") -> Any:
    """What a pickle holds: arrays of numpy and torch, numbers, text and plain containers; the rest is refused by name.

    Nothing of numpy or torch is called as the pickle likes: arrays are put together here, from their checked parts.
    """
    found = _Restricted(BytesIO(content), encoding=encoding).load()
    return _finished(found)


class _Unfinished:
    """Stands for an array, or its type, until the end of the pickle; what a pickle says comes as `__setstate__`."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __setstate__(self, state: Any) -> None:
        self.parts = (*self.parts, state)

    def finished(self) -> Any:
        raise NotImplementedError


class _Dtype(_Unfinished):
    """`dtype(code, align, copy)`, then its state, of which the byte order is all that a plain type needs."""

    __slots__ = ()

    def finished(self) -> np.dtype[Any]:
        code = _text(self.parts[0])
        order = _text(self.parts[3][1]) if len(self.parts) > 3 else "="
        dtype = np.dtype(code) if code[:1] in _KINDS and code[1:].isdigit() else None
        if dtype is None:
            raise pickle.UnpicklingError(f"it holds an array of type {code!r}, which is neither of numbers nor of text")
        return dtype.newbyteorder("=" if order == "|" else order)  # type: ignore[arg-type]


class _Array(_Unfinished):
    """`_reconstruct(...)`, then its state: version, shape, type, whether in Fortran's order, content."""

    __slots__ = ()

    def finished(self) -> Any:
        _, shape, dtype, is_fortran, content = self.parts[-1]
        return _array(content, dtype, shape, "F" if is_fortran else "C")


class _Buffer(_Unfinished):
    """`_frombuffer(content, type, shape, order)`, the newer way."""

    __slots__ = ()

    def finished(self) -> Any:
        return _array(*self.parts[:4])


class _Scalar(_Unfinished):
    """`scalar(type, content)`."""

    __slots__ = ()

    def finished(self) -> Any:
        return _array(self.parts[1], self.parts[0], (), "C")[()]


class _Storage(_Unfinished):
    """`_load_from_bytes(content)`: the memory of a tensor, as torch saves it."""

    __slots__ = ()

    def finished(self) -> Any:
        return torch.load(BytesIO(_raw(self.parts[0])), map_location="cpu", weights_only=True)


class _Tensor(_Unfinished):
    """`_rebuild_tensor_v2(storage, offset, size, stride, ...)`; whether it had a gradient does not matter."""

    __slots__ = ()

    def finished(self) -> torch.Tensor:
        storage, offset, size, stride = self.parts[:4]
        memory = storage.finished()
        flat = torch.empty(0, dtype=memory.dtype).set_(memory._untyped_storage)
        # as_strided checks that the tensor lies inside of its memory; a copy, so that it holds no more than itself.
        return flat.as_strided(size, stride, offset).clone()


class _Encode(_Unfinished):
    """`encode(text, "latin1")`: how Python 3 writes bytes for Python 2."""

    __slots__ = ()

    def finished(self) -> bytes:
        return self.parts[0].encode("latin1")


class _Name(_Unfinished):
    """A class that is only named, as an argument."""

    __slots__ = ()


class _Restricted(pickle.Unpickler):
    allowed: dict[str, Callable[..., Any]] = {
        "__builtin__.bytes": bytes,
        "__builtin__.frozenset": frozenset,
        "__builtin__.set": set,
        "_codecs.encode": _Encode,
        "builtins.frozenset": frozenset,
        "builtins.set": set,
        "collections.OrderedDict": OrderedDict,
        "numpy.core.multiarray._reconstruct": _Array,
        "numpy._core.multiarray._reconstruct": _Array,
        "numpy.core.multiarray.scalar": _Scalar,
        "numpy._core.multiarray.scalar": _Scalar,
        "numpy.core.numeric._frombuffer": _Buffer,
        "numpy._core.numeric._frombuffer": _Buffer,
        "numpy.ndarray": _Name,
        "numpy.dtype": _Dtype,
        "torch._utils._rebuild_tensor_v2": _Tensor,
        "torch.storage._load_from_bytes": _Storage,
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {name}, which no array needs, so that nothing of it was run")
        return self.allowed[name]


def _array(content: Any, dtype: _Dtype, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    """An array of its own, in memory that may be written to."""
    return np.frombuffer(_raw(content), dtype.finished()).reshape(shape, order=_text(order)).copy()  # type: ignore[call-overload]


def _raw(content: Any) -> Any:
    """Bytes, whichever version of Python wrote them."""
    raw = content.finished() if isinstance(content, _Encode) else content
    return raw.encode("latin1") if isinstance(raw, str) else raw


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _finished(value: Any) -> Any:
    """The value with every array in it put together."""
    if isinstance(value, _Unfinished):
        return value.finished()
    if isinstance(value, dict):
        return {_finished(key): _finished(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(map(_finished, value))
    return value
