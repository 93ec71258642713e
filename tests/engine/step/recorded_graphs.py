"""Graphs on a CPU: operations are recorded while a step is issued, undone, and run again at every replay.

What CUDA does with a captured step, so that the way there (what is captured, proven, fed, refused, dropped) can be
tested without a GPU. That real graphs give the bits of eager steps is tested on real ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isoscale.engine.step import cuda_graph, graphed_evaluation
from isoscale.system import devices

WAITS = ("_local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.masked_select", "aten.unique")
"""Operations for which the host waits for the device."""


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Recording(TorchDispatchMode):
    """Notes operations, and what the tensors were that they write to."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.written: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, schema = kwargs or {}, str(function), function._schema
        if any(each in name for each in WAITS):
            raise RuntimeError("operation not permitted when stream is capturing")
        given = {**dict(zip((each.name for each in schema.arguments), args, strict=False)), **kwargs}
        writes = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        statistics = args[3:5] if "batch_norm" in name and "backward" not in name else ()  # which its schema hides
        for tensor in (*_tensors([given.get(each) for each in writes]), *_tensors(list(statistics))):
            whole = tensor if tensor._base is None else tensor._base
            self.written.setdefault(id(whole), (whole, whole.detach().clone()))
        found = function(*args, **kwargs)
        is_view = not writes and bool(schema.returns) and schema.returns[0].alias_info is not None
        if not is_view:
            self.operations.append((function, args, kwargs, [] if writes else _tensors(found)))
        return found


class RecordedGraph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def pool(self) -> tuple[int, int]:
        return 0, 1

    @torch.no_grad()
    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            for function, args, kwargs, outputs in self.operations:
                found = _tensors(function(*args, **kwargs))
                for output, value in zip(outputs, found, strict=False):
                    if output.data_ptr() != value.data_ptr():
                        output.detach().copy_(value)


@contextmanager
def capture(graph: RecordedGraph, *options: Any, **others: Any) -> Iterator[None]:
    """In the place of torch.cuda.graph: nothing has been computed when it is over."""
    recording = Recording()
    try:
        with recording:
            yield
        graph.operations = recording.operations
    finally:
        with torch.no_grad():
            for tensor, value in recording.written.values():
                tensor.detach().copy_(value)


class NoGenerator:
    """A device's generator that nobody draws from."""

    device = torch.device("cpu")

    def get_offset(self) -> int:
        return 0


@pytest.fixture
def recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CPUs capture steps."""
    monkeypatch.setattr(devices.Accelerator, "can_capture", True)
    for name, value in {
        "CUDAGraph": RecordedGraph, "graph": capture, "synchronize": lambda *options: None,
        "current_stream": lambda *options: None, "default_generators": (NoGenerator(),),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (cuda_graph, graphed_evaluation):
        monkeypatch.setattr(module, "end_broken_capture", lambda generator: None)
