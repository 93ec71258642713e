"""Networks that several sciences use."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from isoscale.errors import UserError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}


class MLP(nn.Module):
    """A feed-forward network: linear layers with an activation in between."""

    def __init__(
        self,
        widths: Sequence[int],
        activation: str | Sequence[str] = "relu",
        output_activation: str | None = None,
        dropout: float = 0.0,
    ) -> None:
        """`widths` from input to output, such as [784, 128, 256, 10]; dropout after each hidden activation.

        `activation` may be a list, one for each hidden layer.
        """
        super().__init__()
        if len(widths) < 2:
            raise UserError(f"an MLP needs at least an input and an output width, not {list(widths)}")
        check_fraction("dropout", dropout)
        self.widths = check_widths("widths", widths)
        hidden = [activation] * (len(widths) - 2) if isinstance(activation, str) else list(activation)
        if len(hidden) != len(widths) - 2:
            raise UserError(f"{len(hidden)} activations were given for {len(widths) - 2} hidden layers")
        layers: list[nn.Module] = []
        for number, (width_in, width_out) in enumerate(pairwise(widths)):
            layers.append(Linear(width_in, width_out))
            if number < len(widths) - 2:
                layers.append(_activation(hidden[number]))
                layers += [nn.Dropout(dropout)] if dropout else []
        layers += [_activation(output_activation)] if output_activation else []
        self.layers = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """From (batch, widths[0]) to (batch, widths[-1])."""
        check_floats(input)
        if not input.shape[-1]:
            raise UserError(f"the input has no values: a batch has the shape {tuple(input.shape)}; give it columns")
        if input.shape[-1] != self.widths[0]:
            raise UserError(
                f"this MLP takes {self.widths[0]} numbers per sample, but gets a batch of shape {tuple(input.shape)}: "
                f"set task.model.widths to begin with {math.prod(input.shape[1:])}"
                + (", and add flatten to data.transforms" if input.dim() > 2 else "")
            )
        return self.layers(input)


def check_widths(name: str, widths: Sequence[int]) -> list[int]:
    """Refuse widths that no network can have."""
    if not widths or any(isinstance(width, bool) or width < 1 for width in widths):
        raise UserError(f"{name} is {list(widths)}: expected whole numbers above 0")
    return list(widths)


def check_fraction(name: str, value: float) -> None:
    """Refuse a probability that leaves nothing over, or is none."""
    if not 0 <= value < 1:
        raise UserError(f"{name} is {value}; expected a fraction from 0 (none) to below 1, such as 0.1")


def check_floats(input: Tensor) -> None:
    """Refuse what no layer multiplies with weights: whole numbers, booleans, complex numbers."""
    if not input.is_floating_point():
        kind = str(input.dtype).removeprefix("torch.")
        remedy = (
            "give real and imaginary parts as columns of their own" if input.is_complex()
            else "convert it: data.columns={input: {path: FILE, dtype: float32}, …}, or data.transforms=[{class: "
            "divide, by: 1}]; in Python, x.float()"
        )  # fmt: skip
        raise UserError(f"the input is {kind}, but the network computes with floats; {remedy}")


class Linear(nn.Linear):
    """A linear layer that is as fast to differentiate as to compute.

    Torch adds up the gradient of a bias with a kernel that leaves most of a GPU idle: for 1,000 rows of 400 it takes as
    long as two matrix products. The product with a vector of ones takes a quarter of that.
    """

    def forward(self, input: Tensor) -> Tensor:
        """From (…, in_features) to (…, out_features)."""
        if input.is_cuda and self._is_plain(input):
            return _Affine.apply(input, self.weight, self.bias)
        return nn.functional.linear(input, self.weight, self.bias)

    def _is_plain(self, input: Tensor) -> bool:
        """Whether nobody changes the product on its way: autocast and compilers have their own."""
        is_changed = torch.is_autocast_enabled(input.device.type) or torch.compiler.is_compiling()
        return input.dim() == 2 and self.bias is not None and not is_changed


class _Affine(torch.autograd.Function):
    """`input @ weight.T + bias`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        (gradient,), (of_input, of_weight, of_bias) = gradients, ctx.needs_input_grad
        across = gradient.t()
        return (
            gradient @ weight if of_input else None,
            across @ input if of_weight else None,
            across.mv(gradient.new_ones(len(gradient))) if of_bias else None,
        )


def _activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise UserError(f"unknown activation {name!r}: use {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()
