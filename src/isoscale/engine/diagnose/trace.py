"""Watches every operation of a step, forward and backward, for the first that makes something not finite.

Infinities may be meant: a mask of -inf before a softmax does no harm. So each value that is not finite is followed from
the operation that made it out of finite ones, and the one to blame is that which the loss or a gradient comes from.
"""

import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from isoscale.data.batches import Batch

Phase = Literal["transforms", "forward", "loss", "backward", "update"]
_AFTER: dict[str, Phase] = {"data": "forward", "forward": "loss", "backward": "update", "reduce": "update"}
"""By the phase of a step that is over, the one that begins."""
_UNSET = ("empty", "new_empty", "_empty", "resize")
"""Operations whose results hold whatever the memory held."""
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution_backward", "native_", "sum", "cudnn", "miopen")
"""Operations that mix the rows of a batch, in the backward pass."""
_CHECK = "_amp_foreach_non_finite_check_and_unscale_"
"""Where the gradients of a step are looked at."""
_PACKAGE = Path(__file__).parents[2]
_STEP = str(_PACKAGE / "engine" / "step" / "step.py")
_SCIENCE = str(_PACKAGE / "science")
_PASSED = (str(_PACKAGE), str(Path(torch.__file__).parent), sysconfig.get_path("stdlib") + os.sep)
"""Where lines are of no interest to people."""


class Where(NamedTuple):
    """The place of an operation."""

    operation: str
    layer: str
    """Path of the module inside the task; empty for the task itself."""
    line: str
    """`file:number: code` of the innermost line outside of torch; empty where none is known."""
    is_of_samples: bool = False
    """Whether the rows of its result are those of the samples."""

    @property
    def place(self) -> str:
        """The layer in words."""
        return f"layer {self.layer}" if self.layer else "the task itself"

    @property
    def layer_and_operation(self) -> str:
        """Both in words."""
        return f"{self.place} ({self.operation})"


@dataclass
class Origin:
    """How something that is not finite came into a step."""

    kind: Literal["operation", "data", "weights", "elsewhere"]
    value: str
    """NaN or infinity."""
    phase: Phase
    where: Where
    backward_of: str = ""
    """The operation whose backward pass it was."""
    part: int = 0
    """Which part of the batch was computed."""
    rows: list[int] | None = None
    """Rows of the part that are not finite, where rows are samples."""
    name: str = ""
    """Of the tensor: a key of the batch, or a parameter."""
    entered: Where | None = None
    """Where bad data first met the model."""
    became_nan: Where | None = None
    """Where an infinity became NaN, which is further on."""

    def __str__(self) -> str:
        if self.kind == "data":
            meets = f"; it meets the model in {self.entered.layer_and_operation}" if self.entered else ""
            return f"the data itself holds {self.value}, in {self.name or 'the input'}{meets}"
        if self.kind == "weights":
            return f"{self.name} was {self.value} already"
        if self.kind == "elsewhere":
            return f"a tensor from outside of the step holds {self.value}; it was met in {self.where.place}"
        if self.phase == "update":
            return f"the update ({self.where.operation}) made {self.name or 'a weight'} {self.value}"
        backward = f" in the backward pass of {self.backward_of}" if self.backward_of else ""
        during = ", in a transform" if self.phase == "transforms" else f", in {self.where.place}"
        line = f" ({self.where.line})" if self.where.line else ""
        further = f"; it became NaN in {self.became_nan.layer_and_operation}" if self.became_nan else ""
        return f"{self.where.operation}{backward} made {self.value} out of finite numbers{during}{line}{further}"


@dataclass
class Part:
    """A part of the batch as the task got it."""

    samples: Tensor
    batch: Batch = None
    batch_idx: int = 0


@dataclass
class Tracer:
    """Follows what is not finite through the operations of a step."""

    task: nn.Module
    parts: list[Part] = field(default_factory=list)
    blamed: Origin | None = None
    """Where the first loss or gradient comes from that is not finite."""

    def __post_init__(self) -> None:
        self._names = {id(module): name for name, module in self.task.named_modules()}
        self._layers: list[str] = []
        self._phase: Phase = "transforms"
        self._origins: dict[tuple[torch.device, int], Origin] = {}
        self._made: dict[int, Where] = {}
        """By the number of a node of the backward graph, the operation that it belongs to."""
        self._of_samples: set[tuple[torch.device, int]] = set()
        """Memory of tensors that were computed from the batch, row by row."""
        self._parameters = {_storage(tensor): name for name, tensor in _state(self.task)}

    def __enter__(self) -> "Tracer":
        """Tracer from here on."""
        with ExitStack() as stack:
            stack.enter_context(_Mode(self))
            hooks = (
                register_module_forward_pre_hook(self._enter_layer),
                register_module_forward_hook(self._leave_layer, always_call=True),
            )
            for hook in hooks:
                stack.callback(hook.remove)
            self._stack = stack.pop_all()
        for name, tensor in _state(self.task):
            if not _is_finite(tensor):
                self._origins[_storage(tensor)] = Origin(
                    "weights", _value(tensor), "forward", Where("", "", ""), name=name
                )
        return self

    def __exit__(self, *error: Any) -> None:
        """Tracer no more."""
        self._stack.close()

    def mark(self, phase: str) -> None:
        """A phase of the step is over."""
        self._phase = _AFTER.get(phase, "update")

    def begin(self, batch: Batch, samples: Tensor) -> None:
        """A part of the batch is computed next."""
        self._phase = "transforms"
        self.parts.append(Part(samples))
        where = Where("", "", "")
        for name, tensor in named_tensors(batch):
            if self._counts_samples(tensor):
                self._of_samples.add(_storage(tensor))
            if not _is_finite(tensor):
                origin = Origin("data", _value(tensor), "transforms", where, part=len(self.parts) - 1, name=name)
                origin.rows = self._rows(tensor)
                self._origins[_storage(tensor)] = origin

    def computing(self, compute: Callable[[Batch, int], Any]) -> Callable[[Batch, int], Any]:
        """A task's step method that keeps what it is given."""

        def kept(batch: Batch, batch_idx: int) -> Any:
            self.parts[-1].batch, self.parts[-1].batch_idx = batch, batch_idx
            return compute(batch, batch_idx)

        return kept

    def look_at(self, tensors: Iterable[Tensor | None]) -> None:
        """These are losses or gradients: whatever the first one that is not finite comes from is to blame."""
        if self.blamed is None:
            bad = [tensor for tensor in tensors if tensor is not None and not _is_finite(tensor)]
            found = [self._origin(tensor) for tensor in bad]
            self.blamed = next(iter(found), None)

    def look_at_weights(self) -> None:
        """The step is over; if nothing was to blame before, an update may be."""
        self.look_at(tensor for _, tensor in _state(self.task))

    def _enter_layer(self, module: nn.Module, arguments: Any) -> None:
        self._layers.append(self._names.get(id(module), type(module).__name__))

    def _leave_layer(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._layers:
            self._layers.pop()

    def see(self, name: str, is_mutable: bool, inputs: list[Tensor], bad: list[Tensor], outputs: list[Tensor]) -> None:
        """An operation has turned `inputs`, of which some were `bad`, into `outputs`."""
        node = torch._C._current_autograd_node()
        known = {_storage(tensor) for tensor in inputs}
        new = [output for output in outputs if is_mutable or _storage(output) not in known]  # views are no news
        self._mark_rows(known, new)
        where = self._where(name, node, any(_storage(output) in self._of_samples for output in new))
        for output in new:
            key = _storage(output)
            if not name.startswith(_UNSET) and not _is_finite(output):
                self._origins[key] = self._follow(output, bad, where) if bad else self._new(output, where, node)
            elif output.nbytes == output.untyped_storage().nbytes():  # nothing is left of what was there
                self._origins.pop(key, None)

    def _mark_rows(self, inputs: set[tuple[torch.device, int]], outputs: list[Tensor]) -> None:
        from_samples = bool(inputs & self._of_samples)
        for output in outputs:
            mark = self._of_samples.add if from_samples and self._counts_samples(output) else self._of_samples.discard
            mark(_storage(output))

    def _counts_samples(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and bool(self.parts) and tensor.shape[0] == self.parts[-1].samples.shape[0]

    def _follow(self, output: Tensor, bad: list[Tensor], where: Where) -> Origin:
        """The origin of what was passed on; that of a NaN, where there is one."""
        is_nan = _value(output) == "NaN"
        nans = [tensor for tensor in bad if _value(tensor) == "NaN"]
        origin = self._origin((nans or bad)[0])
        if is_nan and not nans and origin.became_nan is None:
            origin.became_nan = where
        if origin.kind == "data" and origin.entered is None and self._phase != "transforms":
            origin.entered = where
        return origin

    def _origin(self, tensor: Tensor) -> Origin:
        found = self._origins.get(_storage(tensor))
        if found is None:
            found = Origin("elsewhere", _value(tensor), self._phase, self._where("", None))
            self._origins[_storage(tensor)] = found
        return found

    def _new(self, output: Tensor, where: Where, node: Any) -> Origin:
        phase: Phase = "backward" if node is not None else self._phase
        made = self._made.get(node._sequence_nr()) if node is not None else None
        name = self._parameters.get(_storage(output), "")
        if name and phase == "update":
            where = where._replace(layer=name.rpartition(".")[0])
        of = made.operation if made else node.name() if node is not None else ""
        part = max(0, len(self.parts) - 1)
        rows = self._rows(output) if _storage(output) in self._of_samples and _keeps_rows(where, made) else None
        return Origin("operation", _value(output), phase, where, of, part, rows, name)

    def _where(self, name: str, node: Any, is_of_samples: bool = False) -> Where:
        """The place of the operation that is running."""
        if node is not None:
            made = self._made.get(node._sequence_nr())
            return Where(name, made.layer if made else "", made.line if made else "")
        layer = self._layers[-1] if self._layers else ""
        where = Where(name, layer, _line(), is_of_samples)
        if torch.is_grad_enabled():
            # torch makes the node of an operation before it starts it; operations without a node come later
            self._made.setdefault(torch.autograd._get_sequence_nr() - 1, where)  # type: ignore[attr-defined]
        return where

    def _rows(self, tensor: Tensor) -> list[int] | None:
        """The rows that are not finite, where each is a sample."""
        if not self._counts_samples(tensor):
            return None
        bad = torch.isfinite(tensor.detach()).logical_not()
        return bad.reshape(tensor.shape[0], -1).any(1).nonzero().flatten().tolist()


class _Mode(TorchDispatchMode):
    """Shows operations to a watch."""

    def __init__(self, watch: Tracer) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, is_mutable = func._schema.name.removeprefix("aten::"), func._schema.is_mutable
        inputs = list(_tensors((args, kwargs)))
        if name == _CHECK:
            self._watch.look_at(args[0])
        bad = [tensor for tensor in inputs if not _is_finite(tensor)] if is_mutable else []
        lists = [argument for argument in args if isinstance(argument, list | tuple) and argument]
        result = func(*args, **kwargs)
        if is_mutable and lists and all(isinstance(entry, Tensor) for entry in lists[0]):
            self._see_each(name, lists, bad)
            return result
        outputs = list(_tensors(result)) + (_written(func, args, kwargs) if is_mutable else [])
        if not is_mutable and not all(_is_finite(tensor) for tensor in outputs):
            bad = [tensor for tensor in inputs if not _is_finite(tensor)]
        self._watch.see(name, is_mutable, inputs, bad, outputs)
        return result

    def _see_each(self, name: str, lists: list[Any], bad: list[Tensor]) -> None:
        """An operation on lists is one on each of their entries."""
        is_bad = {id(tensor) for tensor in bad}
        for number, output in enumerate(lists[0]):
            mine = [
                entries[number] for entries in lists if number < len(entries) and isinstance(entries[number], Tensor)
            ]
            self._watch.see(name, True, mine, [tensor for tensor in mine if id(tensor) in is_bad], [output])


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += list(_tensors(args[index] if index < len(args) else kwargs.get(argument.name)))
    return found


def _keeps_rows(where: Where, made: Where | None) -> bool:
    """Whether the rows of a gradient are samples; those of a weight's, which matrix products give, are not."""
    return made is None or (made.is_of_samples and not where.operation.startswith(_PRODUCTS))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def named_tensors(batch: Batch, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch by key, nested ones as `a.b`."""
    if isinstance(batch, Tensor):
        yield path, batch
        return
    entries = batch.items() if isinstance(batch, dict) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    for key, value in entries:
        yield from named_tensors(value, f"{path}.{key}".lstrip("."))


def _state(task: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers that are numbers with a point."""
    for name, tensor in [*task.named_parameters(), *task.named_buffers()]:
        if tensor.is_floating_point() or tensor.is_complex():
            yield name, tensor


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    try:
        return bool(torch.isfinite(tensor.detach()).all())
    except (RuntimeError, NotImplementedError):  # a kind of tensor that torch cannot look into
        return True


def _value(tensor: Tensor) -> str:
    return "NaN" if bool(torch.isnan(tensor.detach()).any()) else "infinity"


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    try:
        return tensor.device, tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return tensor.device, id(tensor)


def _line() -> str:
    """The innermost line that belongs neither to Python, nor to torch, nor to the engine."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _STEP and frame.f_code.co_name != "<module>":
        path = frame.f_code.co_filename
        if path.startswith(_SCIENCE) or not path.startswith((*_PASSED, "<")):
            return f"{path}:{frame.f_lineno}: {linecache.getline(path, frame.f_lineno).strip()}"
        frame = frame.f_back
    return ""
