"""Which convolutions of a task matrix products compute faster than the kernels that cuDNN's rules choose, by timing."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from isoscale.data.generators import kept_generators
from isoscale.engine.step.convolutions import (
    TRANSPOSED,
    Geometry,
    Sizes,
    as_autocast,
    convolution,
    is_eligible,
    is_last,
    is_supported,
    small_size,
    transposed_convolution,
)

MIN_GAIN = 1.5
MIN_FLOP = 2e8
"""Convolutions with fewer operations do not matter to a step."""
MAX_SECONDS = 3.0


class Call(NamedTuple):
    """What the time of a convolution depends on."""

    device: torch.device
    is_transposed: bool
    input_shape: Sizes
    weight_shape: Sizes
    has_bias: bool
    dtype: torch.dtype
    input_last: bool
    weight_last: bool
    by_input: bool
    geometry: Geometry
    output_padding: Sizes

    @property
    def flop(self) -> float:
        """The operations of a forward pass."""
        size = self.input_shape[2:]
        if not self.is_transposed:
            size = small_size(size, self.weight_shape[2:], self.geometry)
        return 2.0 * self.input_shape[0] * math.prod(size) * math.prod(self.weight_shape)


class Times(NamedTuple):
    """Milliseconds of a convolution's forward and backward pass."""

    torch: float
    products: float


def slow_convolutions(task: nn.Module, run: Callable[[], Any]) -> list[str]:
    """The names of convolutions that matrix products compute at least 1.5 times faster than torch, on this GPU."""
    return [name for name, (own, products) in measure(task, run).items() if own >= MIN_GAIN * products]


def measure(task: nn.Module, run: Callable[[], Any], max_seconds: float = MAX_SECONDS) -> dict[str, Times]:
    """The times of a task's convolutions, by name, as `run()`, which makes a forward pass, calls them.

    The largest are measured first, until `max_seconds` have gone; none that is small. The task, its gradients, its
    buffers and the generators are as before.
    """
    calls = record_calls(task, run)
    begin = time.perf_counter()
    times: dict[Call, Times | None] = {}
    for call in sorted(set(calls.values()), key=lambda call: -call.flop):
        if call.flop >= MIN_FLOP and time.perf_counter() - begin < max_seconds:
            times[call] = time_call(call)
    torch.cuda.empty_cache()
    return {name: found for name, call in calls.items() if (found := times.get(call)) is not None}


def record_calls(task: nn.Module, run: Callable[[], Any]) -> dict[str, Call]:
    """How a forward pass calls each convolution that products can compute; the last call of each."""
    calls: dict[str, Call] = {}

    def hook_of(name: str) -> Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]:
        def hook(module: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            given = inputs[0] if inputs else named["input"]
            input, weight, bias = as_autocast(given.detach(), module.weight.detach(), module.bias)
            input = input if input.dim() == weight.dim() else input[None]
            if not is_supported(input, weight, module.in_channels, (1,)):
                return
            geometry = Geometry(module.stride, module.padding, module.dilation)
            calls[name] = Call(
                input.device, isinstance(module, TRANSPOSED), tuple(input.shape), tuple(weight.shape), bias is not None,
                input.dtype, is_last(input), is_last(weight), given.requires_grad or not torch.is_grad_enabled(),
                geometry, module.output_padding,
            )  # fmt: skip

        return hook

    with ExitStack() as stack:
        stack.enter_context(kept_generators())
        devices = {each.device for each in task.parameters() if each.is_cuda}
        stack.enter_context(torch.random.fork_rng(devices))
        stack.callback(restore, [(each, each.grad) for each in task.parameters()], copies_of_buffers(task))
        for name, module in task.named_modules():
            if is_eligible(module):
                stack.callback(module.register_forward_pre_hook(hook_of(name), with_kwargs=True).remove)
        run()
    return calls


Buffers = list[tuple[nn.Module, str, Tensor | None, Tensor | None]]


def copies_of_buffers(task: nn.Module) -> Buffers:
    """The buffers of a task and their values: a forward pass may change both, as batch normalisation does."""
    return [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in task.modules()
        for name, buffer in module._buffers.items()
    ]


def restore(gradients: Sequence[tuple[nn.Parameter, Tensor | None]], buffers: Buffers) -> None:
    """Put gradients and buffers back."""
    for parameter, gradient in gradients:
        parameter.grad = gradient
    with torch.no_grad():
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)


def time_call(call: Call) -> Times | None:
    """Time a convolution in both ways on random values; None where the device's memory does not suffice."""
    generator = torch.Generator(call.device).manual_seed(0)

    def random(shape: Sizes, last: bool) -> Tensor:
        values = torch.randn(shape, dtype=call.dtype, device=call.device, generator=generator)
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        return values.contiguous(memory_format=formats[len(shape)]) if last else values

    num_dims = len(call.geometry.stride)
    plain: Any
    products: Any
    if call.is_transposed:
        plain = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[num_dims - 1]
        products, num_channels = transposed_convolution, call.weight_shape[1]
        arguments = {"output_padding": call.output_padding, **call.geometry._asdict()}
    else:
        plain = (functional.conv1d, functional.conv2d, functional.conv3d)[num_dims - 1]
        products, num_channels = convolution, call.weight_shape[0]
        arguments = call.geometry._asdict()
    try:
        input = random(call.input_shape, call.input_last).requires_grad_(call.by_input)
        weight = random(call.weight_shape, call.weight_last).requires_grad_()
        bias = random((num_channels,), False).requires_grad_() if call.has_bias else None
        wanted = [each for each in (input, weight, bias) if each is not None and each.requires_grad]
        with torch.enable_grad(), torch.autocast(call.device.type, enabled=False):
            gradient = torch.ones_like(products(input, weight, bias, **arguments))

            def milliseconds(compute: Callable[..., Tensor]) -> float:
                best = math.inf
                for attempt in range(5):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    torch.autograd.grad(compute(input, weight, bias, **arguments), wanted, gradient)
                    end.record()
                    end.synchronize()
                    best = min(best, begin.elapsed_time(end)) if attempt > 1 else best
                return best

            return Times(milliseconds(plain), milliseconds(products))
    except torch.cuda.OutOfMemoryError:
        return None
