"""The layers of a model as a table: what they are, how many parameters they have, and what comes out of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from isoscale.data import rng
from isoscale.engine.metrics.torchmetrics import is_metric
from isoscale.observe.events import Layer
from isoscale.observe.figures import Network


@dataclass
class Model:
    """The network of a task, looked at."""

    module: nn.Module
    layers: tuple[Layer, ...]
    example: tuple[Tensor, ...] = field(default=(), repr=False)
    """What the network was called with, if it was seen at work and takes tensors."""

    def network(self) -> Network | None:
        """A copy on the CPU from which a graph can be drawn; None where there is no example."""
        if not self.example:
            return None
        module = deepcopy(self.module).cpu().float().eval()
        return Network(module, tuple(tensor[:1].cpu() for tensor in self.example))


def model_of(task: nn.Module) -> nn.Module:
    """The network that a task wraps, or the task itself."""
    inner = getattr(task, "model", None)
    return inner if isinstance(inner, nn.Module) else task


def look_at(task: nn.Module, predict: Callable[[], Any] | None) -> Model:
    """The table of a task's model; `predict` runs it once, to see shapes, and may fail: then there are none."""
    module = model_of(task)
    layers = tuple(_layers(module))
    if predict is None:
        return Model(module, layers)
    with _watched(module) as seen:
        try:
            predict()
        except Exception:  # a task need not be able to predict; what is wrong with it shows in training
            return Model(module, layers)
    return Model(module, tuple(replace(layer, shape=seen.shapes.get(layer.name)) for layer in layers), seen.example)


def _layers(module: nn.Module) -> Iterator[Layer]:
    for name, child in module.named_modules():
        if is_metric(child):
            continue
        parameters = list(child.parameters())
        yield Layer(
            name,
            type(child).__name__,
            depth=len(name.split(".")) if name else 0,
            num_parameters=sum(parameter.numel() for parameter in parameters),
            num_trainable=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            num_bytes=sum(tensor.nbytes for tensor in [*parameters, *child.buffers()]),
        )


@dataclass
class _Seen:
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    example: tuple[Tensor, ...] = ()


@contextmanager
def _watched(module: nn.Module) -> Iterator[_Seen]:
    """Note what goes into a module and what comes out of its layers, in evaluation mode and without a trace."""
    seen = _Seen()
    handles = [child.register_forward_hook(_noting(seen, name)) for name, child in module.named_modules()]
    handles.append(module.register_forward_pre_hook(lambda _, inputs: _note_example(seen, inputs)))
    modes = {child: child.training for child in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), rng.use(None):
            yield seen
    finally:
        for handle in handles:
            handle.remove()
        for child, mode in modes.items():
            child.training = mode


def _noting(seen: _Seen, name: str) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            seen.shapes[name] = tuple(output.shape)

    return hook


def _note_example(seen: _Seen, inputs: tuple[Any, ...]) -> None:
    if inputs and all(isinstance(value, Tensor) for value in inputs):
        seen.example = inputs
