"""Convolutions as matrix products (im2col), for those to which cuDNN's heuristic gives kernels without tensor cores.

A convolution and its transpose join two tensors: a big one (the input of a convolution, the output of a transposed one)
and a small one, whose positions lie a stride apart in the big one. Three bilinear maps, `Gather` (big to small),
`Spread` (small to big) and `Correlate` (both to a weight), are the derivatives of each other, so that every pass of
both is one of them, second derivatives too. Each copies windows of its input into the rows of a matrix and multiplies:
no atomics, no waiting for the device, the same bits in every process. Inside, channels come last: (batch, …, channels).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import Function
from torch.nn import functional

from isoscale.errors import UserError

COLUMN_BYTES = 2**30
"""The most that the windows of a pass take at a time; more are made and multiplied in turns."""
TILE = 128
NUM_TILES = 128
"""About as many tiles of a product as a large GPU computes at once."""

Sizes = tuple[int, ...]


class Geometry(NamedTuple):
    """The stride, padding and dilation of a convolution in each dimension."""

    stride: Sizes
    padding: Sizes
    dilation: Sizes


def convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Tensor:
    """A convolution in 1, 2 or 3 dimensions as `functional.conv3d` and its siblings compute it, without groups."""
    num_dims = weight.dim() - 2
    given, geometry = input, Geometry(stride, padding, dilation)
    (input, weight, bias), unbatched = as_autocast(input, weight, bias), input.dim() == num_dims + 1
    input = input[None] if unbatched else input
    size = small_size(input.shape[2:], weight.shape[2:], geometry)
    if not is_supported(input, weight, weight.shape[1], size):
        plain = (functional.conv1d, functional.conv2d, functional.conv3d)[num_dims - 1]
        return plain(given, weight, bias, stride, padding, dilation)
    result: Tensor = Gather.apply(input, weight, bias, geometry, size)
    return result[0] if unbatched else result


def transposed_convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, output_padding: Sizes,
    dilation: Sizes,
) -> Tensor:  # fmt: skip
    """A transposed convolution as `functional.conv_transpose3d` and its siblings compute it, without groups."""
    num_dims = weight.dim() - 2
    given, geometry = input, Geometry(stride, padding, dilation)
    (input, weight, bias), unbatched = as_autocast(input, weight, bias), input.dim() == num_dims + 1
    input = input[None] if unbatched else input
    size = tuple(
        (have - 1) * step - 2 * pad + apart * (taps - 1) + extra + 1
        for have, taps, step, pad, apart, extra in zip(
            input.shape[2:], weight.shape[2:], *geometry, output_padding, strict=False
        )
    )
    allowed = all(extra < max(pair) for extra, *pair in zip(output_padding, stride, dilation, strict=True))
    if not allowed or not is_supported(input, weight, weight.shape[0], size):
        plain = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[num_dims - 1]
        return plain(given, weight, bias, stride, padding, output_padding, 1, dilation)
    result: Tensor = Spread.apply(input, weight, bias, geometry, size)
    return result[0] if unbatched else result


def as_autocast(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast what a convolution is given as autocast does, which leaves float64 alone."""
    device = input.device.type
    if not torch.is_autocast_enabled(device):
        return input, weight, bias
    low = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(low) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(input), cast(weight), None if bias is None else cast(bias)


def is_supported(input: Tensor, weight: Tensor, channels: int, size: Sizes) -> bool:
    """Whether products compute this; torch's own function does or refuses what they do not."""
    return (
        input.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and input.dtype == weight.dtype
        and input.dim() == weight.dim()
        and input.shape[1] == channels
        and input.numel() > 0
        and min(size) > 0
        # vmap and jvp have rules for torch's own
        and (torch.compiler.is_compiling() or not any(map(is_functorch_wrapped_tensor, (input, weight))))
    )


def small_size(big: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> Sizes:
    """The size of a convolution's output."""
    return tuple(
        (have + 2 * pad - apart * (taps - 1) - 1) // step + 1
        for have, taps, step, pad, apart in zip(big, kernel, *geometry, strict=False)
    )


class Gather(Function):
    """A convolution: the big tensor to the small one."""

    @staticmethod
    def forward(big: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, size: Sizes) -> Tensor:
        """Each small position is the product of its window of the big tensor with the weight."""
        num_small, num_big, *kernel = weight.shape
        values, matrix = big.movedim(1, -1), weight.movedim(1, -1).reshape(num_small, -1).t()
        result = values.new_empty(len(big), *size, num_small)
        for samples, first in blocks(len(big), size, math.prod(kernel) * num_big * big.itemsize):
            rows = columns_of_big(values[samples], kernel, geometry, (first, size))
            multiply(rows, matrix, bias, result[samples, first].view(-1, num_small))
        return channels_first(result, big, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the arguments; columns are made again rather than kept."""
        big, weight, _, ctx.geometry, _ = inputs
        ctx.save_for_backward(big, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The derivatives by the big tensor, the weight and the bias."""
        big, weight = ctx.saved_tensors
        by_big, by_weight, by_bias, *_ = ctx.needs_input_grad
        return (
            Spread.apply(gradient, weight, None, ctx.geometry, big.shape[2:]) if by_big else None,
            Correlate.apply(big, gradient, weight.shape[2:], ctx.geometry, is_last(weight)) if by_weight else None,
            sum_to_channels(gradient) if by_bias else None,
            None,
            None,
        )


class Spread(Function):
    """A transposed convolution, which is the input gradient of a convolution: the small tensor to the big one."""

    @staticmethod
    def forward(small: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, big_size: Sizes) -> Tensor:
        """Sub-pixel convolution: big positions with one remainder modulo the stride are a convolution of stride 1.

        The small position o and the tap t meet at o · stride + t · dilation = q · stride + remainder, counted from the
        start of the padding. So each q needs the window of small positions q - m, and all remainders need the same one:
        one product gives all of them, its columns being (remainders × channels), with zeros where there is no tap.
        """
        num_small, num_big, *kernel = weight.shape
        stride, padding, dilation = geometry
        num_dims, num_remainders = len(kernel), math.prod(stride)
        # how far apart the taps are among windows × remainders, how far apart the window's positions, and their number
        tap_step = [s if d % s == 0 else d for s, d in zip(stride, dilation, strict=True)]
        apart = tuple(d // s if d % s == 0 else 1 for s, d in zip(stride, dilation, strict=True))
        window = [((k - 1) * t) // s + 1 for k, t, s in zip(kernel, tap_step, stride, strict=True)]
        places = [m * s for m, s in zip(window, stride, strict=True)]
        slots = weight
        if any(t > 1 for t in tap_step) or places != kernel:
            slots = weight.new_zeros(num_small, num_big, *places)
            taps = (slice(0, (k - 1) * t + 1, t) for k, t in zip(kernel, tap_step, strict=True))
            slots[(slice(None), slice(None), *taps)] = weight
        slots = slots.view(num_small, num_big, *(each for pair in zip(window, stride, strict=True) for each in pair))
        axes = range(num_dims)
        slots = slots.permute(*(2 + 2 * axis for axis in axes), 0, *(3 + 2 * axis for axis in axes), 1)
        slots = slots.reshape(math.prod(window), -1).flip(0)  # a window begins with its largest m
        matrix = slots.reshape(math.prod(window) * num_small, num_remainders * num_big)
        bias = None if bias is None else bias.repeat(num_remainders)

        start = [p // s for p, s in zip(padding, stride, strict=True)]
        stop = [(p + b - 1) // s + 1 for p, b, s in zip(padding, big_size, stride, strict=True)]
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        before = [(m - 1) * d - a for m, d, a in zip(window, apart, start, strict=True)]
        values, one = small.movedim(1, -1), (1,) * num_dims
        result = values.new_empty(len(small), *big_size, num_big)
        per_position = (matrix.shape[0] + 2 * matrix.shape[1]) * small.itemsize
        for samples, first in blocks(len(small), size, per_position):
            here = (first.stop - first.start, *size[1:])
            lead = [before[0] - first.start, *before[1:]]
            rows = columns(values[samples], lead, window, one, apart, here)
            found = multiply(rows, matrix, bias, rows.new_empty(len(rows), matrix.shape[1]))
            found = found.view(-1, *here, *stride[:-1], stride[-1] * num_big)
            order = [each for axis in axes for each in (1 + axis, 1 + num_dims + axis)][:-1]
            found = copied(found.permute(0, *order, found.dim() - 1))
            found = found.view(len(found), *(h * s for h, s in zip(here, stride, strict=True)), num_big)
            # where the first of these positions lies in the big tensor, which the padding is not part of
            at = [a * s - p for a, s, p in zip((start[0] + first.start, *start[1:]), stride, padding, strict=True)]
            target = result[samples, max(at[0], 0) : at[0] + found.shape[1]]
            inside = (slice(max(-a, 0), max(-a, 0) + n) for a, n in zip(at, target.shape[1:-1], strict=True))
            target, found = as_words(target, found[(slice(None), *inside)])
            target.copy_(found)
        return channels_first(result, small, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the arguments; columns are made again rather than kept."""
        small, weight, _, ctx.geometry, _ = inputs
        ctx.save_for_backward(small, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The derivatives by the small tensor, the weight and the bias."""
        small, weight = ctx.saved_tensors
        by_small, by_weight, by_bias, *_ = ctx.needs_input_grad
        return (
            Gather.apply(gradient, weight, None, ctx.geometry, small.shape[2:]) if by_small else None,
            Correlate.apply(gradient, small, weight.shape[2:], ctx.geometry, is_last(weight)) if by_weight else None,
            sum_to_channels(gradient) if by_bias else None,
            None,
            None,
        )


class Correlate(Function):
    """The weight gradient of a convolution and of a transposed one: the big and the small tensor to a weight."""

    @staticmethod
    def forward(big: Tensor, small: Tensor, kernel: Sizes, geometry: Geometry, last: bool) -> Tensor:
        """The sum over samples and positions of a window of the big tensor times its place in the small one."""
        num_big, num_small, size = big.shape[1], small.shape[1], tuple(small.shape[2:])
        values, others = big.movedim(1, -1), small.movedim(1, -1)
        total: Tensor | None = None
        for samples, first in blocks(len(big), size, math.prod(kernel) * num_big * big.itemsize):
            rows = columns_of_big(values[samples], kernel, geometry, (first, size))
            part = sum_of_products(others[samples, first].reshape(-1, num_small), rows)
            total = part if total is None else total.add_(part)
        assert total is not None
        result = total.to(big.dtype).view(num_small, *kernel, num_big).movedim(-1, 1)
        return result if last else result.contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the arguments."""
        big, small, _, ctx.geometry, _ = inputs
        ctx.save_for_backward(big, small)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The derivatives by the big and the small tensor, for second derivatives of a convolution."""
        big, small = ctx.saved_tensors
        by_big, by_small, *_ = ctx.needs_input_grad
        return (
            Spread.apply(small, gradient, None, ctx.geometry, big.shape[2:]) if by_big else None,
            Gather.apply(big, gradient, None, ctx.geometry, small.shape[2:]) if by_small else None,
            None,
            None,
            None,
        )


def blocks(num_samples: int, size: Sizes, bytes_per_position: int) -> Iterator[tuple[slice, slice]]:
    """Samples and positions in the first dimension whose columns are made at a time; they follow from shapes alone."""
    per_row = math.prod(size[1:]) * bytes_per_position

    def evenly(count: int, bytes_each: int) -> int:
        num_parts = -(-count // max(1, COLUMN_BYTES // bytes_each))
        return -(-count // num_parts)

    per_part, per_piece = evenly(num_samples, size[0] * per_row), evenly(size[0], per_row)
    for sample in range(0, num_samples, per_part):
        for position in range(0, size[0], per_piece):
            yield slice(sample, sample + per_part), slice(position, min(position + per_piece, size[0]))


def columns_of_big(values: Tensor, kernel: Sequence[int], geometry: Geometry, where: tuple[slice, Sizes]) -> Tensor:
    """The windows of a convolution at some of its output positions: a block of the first dimension, all of the rest."""
    first, size = where
    before = [geometry.padding[0] - first.start * geometry.stride[0], *geometry.padding[1:]]
    here = (first.stop - first.start, *size[1:])
    return columns(values, before, kernel, geometry.stride, geometry.dilation, here)


def columns(
    values: Tensor, before: Sequence[int], kernel: Sequence[int], stride: Sizes, dilation: Sizes, size: Sizes
) -> Tensor:
    """Windows as the rows of a matrix (im2col), (batch × positions, taps × channels).

    The first window begins `before` positions ahead of the values; there are zeros around them.
    """
    num_samples, *have, channels = values.shape
    need = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(size, stride, kernel, dilation, strict=True)]
    begin = [min(max(b, 0), n) for b, n in zip(before, need, strict=True)]
    end = [min(max(b + h, 0), n) for b, h, n in zip(before, have, need, strict=True)]
    source = values[(slice(None), *(slice(a - b, e - b) for a, e, b in zip(begin, end, before, strict=True)))]
    if need != [e - a for a, e in zip(begin, end, strict=True)] or not values.is_contiguous():
        word = 16 // values.itemsize  # what is copied at a time where rows are multiples of it
        width = need[-1] + (-need[-1] % word if need[-1] * channels % word else 0)
        padded = values.new_zeros(num_samples, *need[:-1], width, channels)
        target, source = as_words(padded[(slice(None), *map(slice, begin, end))], source)
        target.copy_(source)
        source = padded
    per_sample, *per_position, _ = source.stride()
    shape = [num_samples, *size, *kernel, channels]
    strides = [per_sample, *(p * s for p, s in zip(per_position, stride, strict=True))]
    strides += [*(p * d for p, d in zip(per_position, dilation, strict=True)), 1]
    if dilation[-1] == 1:  # the last dimension's taps lie side by side
        shape[-2:], strides[-2:] = [kernel[-1] * channels], [1]
    return copied(source.as_strided(shape, strides)).view(num_samples * math.prod(size), -1)


def copied(view: Tensor) -> Tensor:
    """A contiguous copy of a strided view, or the view if it is contiguous."""
    return as_words(view)[0].contiguous().view(view.dtype)


def as_words(*tensors: Tensor) -> Sequence[Tensor]:
    """The memory of tensors of one dtype as the widest words that hold whole runs of all, which are copied faster."""
    for word in () if torch.compiler.is_compiling() else (torch.complex128, torch.int64, torch.int32):
        ratio = word.itemsize // tensors[0].itemsize
        if ratio > 1 and all(
            each.stride(-1) == 1
            and each.data_ptr() % word.itemsize == 0
            and not any(count % ratio for count in (each.shape[-1], each.storage_offset(), *each.stride()[:-1]))
            for each in tensors
        ):
            return [each.view(word) for each in tensors]
    return tensors


def multiply(rows: Tensor, matrix: Tensor, bias: Tensor | None, result: Tensor) -> Tensor:
    """A matrix product, plus a bias for each column, written to `result`, which no autocast changes."""
    if bias is None:
        return torch.mm(rows, matrix, out=result)
    return torch.addmm(bias, rows, matrix, out=result)


def sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """The product of `left` transposed, (rows, m), with `right`, (rows, n), in float32 for lower precisions.

    Many rows are split into some products that are added, so that a small result still keeps a GPU busy.
    """
    num_rows = len(left)
    num_tiles = -(-left.shape[1] // TILE) * -(-right.shape[1] // TILE)
    num_parts = max(count for count in range(1, max(1, NUM_TILES // num_tiles) + 1) if num_rows % count == 0)
    left = left.view(num_parts, -1, left.shape[1]).transpose(1, 2)
    right = right.view(num_parts, -1, right.shape[1])
    if left.dtype in (torch.bfloat16, torch.float16) and left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32).sum(0)
    dtype = torch.promote_types(left.dtype, torch.float32)
    with torch.autocast(left.device.type, enabled=False):
        return torch.bmm(left.to(dtype), right.to(dtype)).sum(0)


def sum_to_channels(gradient: Tensor) -> Tensor:
    """The bias gradient."""
    return gradient.sum([axis for axis in range(gradient.dim()) if axis != 1])


def is_last(tensor: Tensor) -> bool:
    """Whether a tensor is in the memory format channels_last or channels_last_3d; one-dimensional data has none."""
    return tensor.dim() > 3 and tensor.movedim(1, -1).is_contiguous() and not tensor.is_contiguous()


def channels_first(result: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """A result, whose channels are last, in the shape and memory format that torch's convolutions return."""
    result = result.movedim(-1, 1)
    return result if is_last(input) or is_last(weight) else result.contiguous()


def forward_as_products(self: Any, input: Tensor) -> Tensor:
    """The forward pass of nn.Conv1d, 2d and 3d."""
    return convolution(input, self.weight, self.bias, self.stride, self.padding, self.dilation)


def forward_transposed_as_products(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
    """The forward pass of nn.ConvTranspose1d, 2d and 3d."""
    output_padding = self._output_padding(
        input, output_size, self.stride, self.padding, self.kernel_size, len(self.stride), self.dilation
    )
    return transposed_convolution(
        input, self.weight, self.bias, self.stride, self.padding, tuple(output_padding), self.dilation
    )


# a bound method is pickled by its name and deep-copied with its object: a pickle has torch's forward pass again
forward_as_products.__name__ = forward_transposed_as_products.__name__ = "forward"

PLAIN: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[type[nn.Module], ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the forward pass of a module is that of a class, neither overridden nor replaced."""
    names = [name for name in ("forward", "_conv_forward") if hasattr(kind, name)]
    return all(getattr(getattr(module, name), "__func__", None) is getattr(kind, name) for name in names)


def is_eligible(module: Any) -> bool:
    """Whether a module is a convolution of torch that products can compute: zero padding in numbers, no groups."""
    return (
        any(isinstance(module, kind) and computes_as(module, kind) for kind in PLAIN + TRANSPOSED)
        and module.groups == 1
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


def as_products(task: nn.Module, names: Sequence[str]) -> Callable[[], None]:
    """Let the named convolutions of a task compute with matrix products; returns what takes this back."""
    modules = dict(task.named_modules())
    unfit = [name for name in names if name not in modules or not is_eligible(modules[name])]
    if unfit:
        raise UserError(
            f"{', '.join(unfit)}: no convolution of this model that can be computed as a matrix product; the run was "
            "begun with another model: begin a new one"
        )
    for name in names:
        forward = forward_transposed_as_products if isinstance(modules[name], TRANSPOSED) else forward_as_products
        modules[name].forward = MethodType(forward, modules[name])

    def undo() -> None:
        for name in names:
            modules[name].__dict__.pop("forward", None)

    return undo
