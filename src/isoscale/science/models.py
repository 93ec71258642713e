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
        self.widths = list(widths)
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
        if input.shape[-1] != self.widths[0]:
            raise UserError(
                f"this MLP takes {self.widths[0]} numbers a sample, but gets a batch of shape {tuple(input.shape)}: "
                f"set task.model.widths to begin with {math.prod(input.shape[1:])}"
                + (", and add flatten to data.transforms" if input.dim() > 2 else "")
            )
        return self.layers(input)


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
        is_changed = torch.is_autocast_enabled("cuda") or torch.compiler.is_compiling()
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
