"""Plain Python data as JSON with its tensors aside: what checkpoints hold and ranks send of what people keep."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCALARS = (bool, int, float, str, type(None))
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset,
}  # fmt: skip
_DICTS: dict[str, Callable[[dict[Any, Any]], Any]] = {"Counter": Counter, "OrderedDict": OrderedDict}
MOST_ENTRIES = 100_000


class NotPlain(Exception):
    """A value that JSON and tensors cannot hold, or not within reason."""


def take_apart(
    value: Any, name: str, tensors: dict[str, Tensor], special: Callable[[Any, str], Any] = lambda value, name: None,
    most_entries: int = MOST_ENTRIES,
) -> Any:  # fmt: skip
    """The structure of a value as JSON; its tensors go into `tensors`, under names that begin with `name`.

    `special` may give the structure of what it knows better, and None for the rest. What is not plain then raises
    NotPlain, and so does a list or dict with more than `most_entries`.
    """
    if type(value) in SCALARS:
        return value
    known = special(value, name)
    if known is not None:
        return known
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise NotPlain("it is a tensor that is not dense")
        tensors[name] = value
        return {"tensor": name, "at": value.device.type}
    if isinstance(value, np.generic):
        return {"number": value.item(), "dtype": value.dtype.str} if value.dtype.kind in "biuf" else _refused(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        native = np.ascontiguousarray(value, value.dtype.newbyteorder("="))
        tensors[name] = torch.from_numpy(native if native.flags.writeable else native.copy())
        return {"array": name}
    entries = value.items() if isinstance(value, Mapping) else value
    if isinstance(value, dict | list | tuple | set | frozenset | deque) and len(value) > most_entries:
        raise NotPlain(f"it has {len(value):,} entries")

    def inside(entry: Any, number: object) -> Any:
        return take_apart(entry, f"{name}.{number}", tensors, special, most_entries)

    if isinstance(value, dict):
        pairs = [[inside(key, f"{n}.key"), inside(entry, _place(key, n))] for n, (key, entry) in enumerate(entries)]
        return {"dict": pairs, **({"type": type(value).__name__} if type(value) in _DICTS.values() else {})}
    if isinstance(value, deque):
        return {"deque": [inside(entry, n) for n, entry in enumerate(value)], "maxlen": value.maxlen}
    if type(value).__name__ in _SEQUENCES and type(value).__module__ == "builtins":
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return {type(value).__name__: [inside(entry, n) for n, entry in enumerate(ordered)]}
    return _refused(value)


def _place(key: Any, number: int) -> object:
    """A name for an entry of a dict: its key, where that is a word, which no number and no nested name can be."""
    return key if isinstance(key, str) and key.isidentifier() else number


def _refused(value: Any) -> Any:
    raise NotPlain(f"it is a {type(value).__name__}")


Special = Callable[[dict[str, Any], Any], Any]


def put_together(
    structure: Any, tensors: Mapping[str, Tensor], live: Any = None, device: Any = None,
    special: Special = lambda structure, live: NotImplemented,
) -> Any:  # fmt: skip
    """The value of a structure. A dict or list that is there already, `live`, is filled, so that it stays the same one.

    Tensors that were not on the host come to `device`. `special` may give the value of structures that it knows.
    """
    if not isinstance(structure, dict):
        return structure
    known = special(structure, live)
    if known is not NotImplemented:
        return known
    if "tensor" in structure:
        return _same_tensor(live, tensors[structure["tensor"]], None if structure.get("at") == "cpu" else device)
    if "array" in structure:
        array = tensors[structure["array"]].cpu().numpy().copy()
        fits = isinstance(live, np.ndarray) and (live.shape, live.dtype) == (array.shape, array.dtype)
        if fits and live.flags.writeable:
            live[...] = array
            return live
        return array
    if "number" in structure:
        return np.dtype(structure["dtype"]).type(structure["number"])

    def inside(entry: Any, existing: Any = None) -> Any:
        return put_together(entry, tensors, existing, device, special)

    if "dict" in structure:
        content = structure["dict"]
        pairs = content.items() if isinstance(content, dict) else content
        found = {}
        for key, entry in pairs:
            own = inside(key)
            found[own] = inside(entry, live.get(own) if isinstance(live, dict) else None)
        if isinstance(live, dict):
            live.clear()
            live.update(found)
            return live
        return _DICTS.get(structure.get("type", ""), dict)(found)
    if "deque" in structure:
        same = isinstance(live, deque) and live.maxlen == structure["maxlen"]
        there = list(live) if same else []
        content = enumerate(structure["deque"])
        values = [inside(entry, there[number] if number < len(there) else None) for number, entry in content]
        if same:
            live.clear()
            live.extend(values)
            return live
        return deque(values, structure["maxlen"])
    for kind, make in _SEQUENCES.items():
        if kind in structure:
            content = structure[kind]
            there = list(live) if isinstance(live, list | tuple) else []
            values = [
                inside(entry, there[number] if number < len(there) else None) for number, entry in enumerate(content)
            ]
            if kind == "list" and isinstance(live, list):
                live[:] = values
                return live
            if kind == "set" and isinstance(live, set):
                live.clear()
                live.update(values)
                return live
            return make(values)
    return structure.get("value")  # as reproducers of earlier versions have it


def _same_tensor(live: Any, tensor: Tensor, device: Any) -> Tensor:
    """A tensor that is there already with new values, so that others who hold it see them; else the new one."""
    if isinstance(live, Tensor) and (live.shape, live.dtype, live.layout) == (
        tensor.shape,
        tensor.dtype,
        torch.strided,
    ):
        if live is tensor:
            return live
        with suppress(RuntimeError):  # of a tensor that shares its memory with itself, say
            live.data.copy_(tensor)
            return live
    return tensor if device is None else tensor.to(device)


def names_of(structure: Any) -> Iterator[str]:
    """The names of the tensors in a structure."""
    if isinstance(structure, dict):
        name = structure.get("tensor") or structure.get("array")
        if isinstance(name, str):
            yield name
            return
        structure = list(structure.values())
    if isinstance(structure, list):
        for entry in structure:
            yield from names_of(entry)
