"""What a captured step holds as constants, and how it is noticed that it does.

A replay issues what was issued at the capture: values of attributes, modes, settings, the number of a batch, the time
of day. What of it changes between launches asks for a new capture, and what changes in every step for none.
"""

import builtins
import linecache
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isoscale import errors
from isoscale.data.batches import Batch
from isoscale.engine.optim.optimizers import listeners
from isoscale.engine.state.module_state import ModuleSnapshot
from isoscale.engine.step.step import Step

MOST_COMPARED = 1000
"""Entries of a list that are compared between launches: what is longer is a vocabulary, say, and no setting."""
_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, errors.__file__))
_SCALARS = (int, float, complex, bool, type(None))


class Conditions:
    """What a captured step holds as constants: where tensors are, modes, attributes, settings of the optimizers."""

    def __init__(
        self, task: Any, epoch: int | None, optimizers: Sequence[Optimizer] = (), fed: Sequence[str] = ()
    ) -> None:
        """As they are now; the epoch is None where the step does not ask for it.

        `fed` are the settings of the optimizers that are no constants.
        """
        self.read: set[str] | None = None
        """The attributes of the task that the step makes use of; all where it is None. Others may change."""
        self.epoch = epoch
        self._task = task
        self._module = ModuleSnapshot(self._task, optimizers, MOST_COMPARED)
        self._places = [
            (name, id(tensor), tensor.data_ptr(), tuple(tensor.shape))
            for name, tensor in (*self._task.named_parameters(), *self._task.named_buffers())
        ]
        self._buffers = [(module, dict(module._buffers)) for module in task.modules()]
        self._settings = [
            [
                (key, id(value) if isinstance(value, Tensor) else value)
                for key, value in group.items()
                if key not in ("params", *fed)
            ]
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        self._listeners = [listeners(optimizer) for optimizer in optimizers]

    @classmethod
    def of(cls, step: Step, epoch: int | None) -> "Conditions":
        """Of a training step."""
        fed = ("lr",) if step.own_update is None else step.own_update.fed
        return cls(step.forward.task, epoch, step.optimizers, fed)

    def difference(self, other: "Conditions") -> str | None:
        """What is not as it was, in words."""
        one, two = self._module, other._module
        for path in two.changed(one):
            if path[0] or self.read is None or path[1] in self.read:
                return ".".join(["self", *filter(None, path)])
        for words, before, after in (
            ("the training mode of modules", one.modes, two.modes),
            ("which parameters require gradients", one.trainable, two.trainable),
            ("which parameters and buffers there are", self._places, other._places),
            ("settings of the optimizer", self._settings, other._settings),
            ("hooks on the optimizer", self._listeners, other._listeners),
            ("what depends on self.current_epoch", self.epoch, other.epoch),
        ):
            if before != after:
                return words
        return None

    def put_back(self) -> None:
        """Undo what running the Python code of a step has done to the task."""
        for module, buffers in self._buffers:
            if any(module._buffers.get(name) is not buffer for name, buffer in buffers.items()):
                module._buffers.update(buffers)
        self._module.restore(self._task)


class WatchedIndex(int):
    """The number of a batch, which notes that somebody makes use of it."""

    _seen: set[str]

    def __new__(cls, value: int, seen: set[str]) -> "WatchedIndex":
        """A number whose use is noted in `seen`."""
        index = super().__new__(cls, value)
        index._seen = seen
        return index


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: WatchedIndex, *others: Any) -> Any:
        self._seen.add("batch_idx")
        return plain(self, *others)

    return method


for _name in (
    "eq", "ne", "lt", "le", "gt", "ge", "mod", "rmod", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv",
    "rtruediv", "floordiv", "rfloordiv", "divmod", "pow", "bool", "index", "int", "float", "hash", "and", "format",
):  # fmt: skip
    setattr(WatchedIndex, f"__{_name}__", _noting(f"__{_name}__"))


def signature(batch: Batch) -> Hashable:
    """What a captured step takes for granted of a batch: its structure, and the shape and kind of every tensor.

    Texts are left out: nothing that a device computes depends on them.
    """
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype, batch.stride()
    if isinstance(batch, dict):
        return tuple((key, signature(value)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return tuple(map(signature, batch))
    return batch if isinstance(batch, _SCALARS) else type(batch).__name__


def shapes_in_words(batch: Batch) -> str:
    """The shapes of a batch's tensors."""
    if isinstance(batch, Tensor):
        return "×".join(map(str, batch.shape)) or "one number"
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return ", ".join(filter(None, map(shapes_in_words, values)))


@contextmanager
def noted_reads(task: Any) -> Iterator[set[str]]:
    """The names of the task's attributes that are read meanwhile."""
    cls: Any = type(task)
    seen: set[str] = set()

    def reading(self: Any, name: str) -> Any:
        seen.add(name)
        return cls.__getattribute__(self, name)

    task.__class__ = type(cls.__name__, (cls,), {"__getattribute__": reading, "__module__": cls.__module__})
    try:
        yield seen
    finally:
        task.__class__ = cls


@contextmanager
def noted_prints(seen: set[str]) -> Iterator[None]:
    """Note it where this thread prints, which a replay would not do again."""
    plain, thread = builtins.print, threading.get_ident()

    def noting(*arguments: Any, **options: Any) -> None:
        if threading.get_ident() == thread:
            seen.add("print")
        plain(*arguments, **options)

    builtins.print = noting
    try:
        yield
    finally:
        builtins.print = plain


def in_words(error: BaseException) -> str:
    """Why a step cannot be captured, from the error that trying it has raised: with the line of the user's code."""
    while error.__context__ is not None:  # the end of a capture that has failed is an error as well
        error = error.__context__
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    where = _place(error.__traceback__)
    if "captur" in text.lower():
        needs = "the step needs a value of the device on the host, for which a captured step does not wait"
        advice = "use torch.where instead of if, shapes that are fixed, and self.log(name, tensor) instead of print"
        return f"{needs}{where}; {advice}"
    return f"{type(error).__name__}: {text}{where}"


def _place(trace: TracebackType | None) -> str:
    """The last line of somebody's own code in a traceback, in words."""
    frames = [each for each in traceback.extract_tb(trace) if not each.filename.startswith((*_LIBRARIES, "<frozen"))]
    frames = [each for each in frames if "site-packages" not in each.filename] or frames
    if not frames:
        return ""
    last = frames[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return f", in {Path(last.filename).name}, line {last.lineno}" + (f": {line}" if line else "")
