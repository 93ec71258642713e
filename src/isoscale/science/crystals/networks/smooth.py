"""Activations whose second derivatives cost little: forces are slopes of the energy, and training differentiates them.

Torch writes the derivative of a derivative out in elementary operations, each of which is differentiated by itself.
Here the first derivative is one operation, and the second one few.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.jit._trace import is_tracing
from torch.nn import functional

_through_silu = torch.ops.aten.silu_backward
_through_softplus = torch.ops.aten.softplus_backward
_through_sigmoid = torch.ops.aten.sigmoid_backward


def silu(x: Tensor) -> Tensor:
    """x / (1 + e⁻ˣ)."""
    return functional.silu(x) if is_tracing() else _Silu.apply(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ)."""
    return functional.softplus(x) if is_tracing() else _Softplus.apply(x)


def shifted_softplus(x: Tensor) -> Tensor:
    """log((1 + eˣ)/2): 0 at 0."""
    return softplus(x) - math.log(2.0)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return functional.silu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _SiluSlope.apply(gradients[0], *ctx.saved_tensors)


class _SiluSlope(torch.autograd.Function):
    """gradient * f'(x)."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gradient, x)
        return _through_silu(gradient, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outer,), (gradient, x), (of_gradient, of_x) = gradients, ctx.saved_tensors, ctx.needs_input_grad
        found = None
        if of_x:
            s = torch.sigmoid(x)
            found = _through_sigmoid(outer * gradient, s) * torch.addcmul(2 + x, x, s, value=-2)
        return _SiluSlope.apply(outer, x) if of_gradient else None, found


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return functional.softplus(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _SoftplusSlope.apply(gradients[0], *ctx.saved_tensors)


class _SoftplusSlope(torch.autograd.Function):
    """gradient * f'(x)."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gradient, x)
        return _through_softplus(gradient, x, 1.0, 20.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (outer,), (gradient, x), (of_gradient, of_x) = gradients, ctx.saved_tensors, ctx.needs_input_grad
        found = _through_sigmoid(outer * gradient, torch.sigmoid(x)) if of_x else None
        return _SoftplusSlope.apply(outer, x) if of_gradient else None, found
