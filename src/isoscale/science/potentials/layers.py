"""The networks of Deep Potentials: values together with derivatives, so that training needs one backward pass.

Forces are derivatives of the energy, and training differentiates them again. Here the first derivative is written out
and part of the forward pass: what is left is an ordinary step, which is captured and compiled like any other.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_through_tanh = torch.ops.aten.tanh_backward
"""gradient * (1 - value²), in one operation."""


class Layer(nn.Module):
    """tanh(input @ weight + bias), plus the input where widths allow it; there, tanh may be times a learned `dt`."""

    def __init__(self, width_in: int, width_out: int, has_dt: bool) -> None:
        """Weights as Deep Potentials begin with."""
        super().__init__()
        self.weight, self.bias = _initial(width_in, width_out)
        self.repeats = width_out // width_in if width_out in (width_in, 2 * width_in) else 0
        """How often the input is added to the output, side by side."""
        self.dt = nn.Parameter(0.1 + 0.001 * torch.randn(width_out)) if has_dt and self.repeats else None


def _initial(width_in: int, width_out: int) -> tuple[nn.Parameter, nn.Parameter]:
    weight = torch.randn(width_in, width_out) / math.sqrt(width_in + width_out)
    return nn.Parameter(weight), nn.Parameter(torch.randn(width_out))


class Curve(nn.Module):
    """A network from one number to many, with the derivatives of all of them."""

    def __init__(self, widths: Sequence[int], has_dt: bool) -> None:
        """Layers by their widths."""
        super().__init__()
        self.layers = nn.ModuleList(Layer(*pair, has_dt) for pair in pairwise([1, *widths]))

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Values and slopes (n, width) at numbers (n), in their dtype; these are data: no gradient goes to them."""
        layers: list[Any] = list(self.layers)
        learned = [each for layer in layers for each in (layer.weight, layer.bias, layer.dt)]
        cast = [each if each is None else each.to(numbers.dtype) for each in learned]
        return _Curve.apply(numbers, tuple(layer.repeats for layer in layers), *cast)

    def values(self, numbers: Tensor) -> Tensor:
        """The values alone, in plain operations that can be differentiated as often as one likes."""
        x = numbers.unsqueeze(1)
        layers: list[Any] = list(self.layers)
        for layer in layers:
            y = torch.addmm(layer.bias, x, layer.weight).tanh()
            y = y if layer.dt is None else y * layer.dt
            x = y + x.repeat(1, layer.repeats) if layer.repeats else y
        return x


class _Curve(torch.autograd.Function):
    """Values and slopes of a network of one number: both go through the layers together."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, repeats: tuple[int, ...], *learned: Any) -> tuple[Tensor, Tensor]:
        x, slope = numbers.unsqueeze(1), torch.ones_like(numbers).unsqueeze(1)
        kept: list[Tensor | None] = []
        for place, times in enumerate(repeats):
            weight, bias, dt = learned[3 * place : 3 * place + 3]
            t = torch.addmm(bias, x, weight).tanh_()
            rise = slope @ weight
            kept += [x, slope, t, rise, weight, dt]
            steep = _through_tanh(rise, t)
            y, steep = (t, steep) if dt is None else (t * dt, steep * dt)
            x, slope = _with_input(y, x, times), _with_input(steep, slope, times)
        ctx.save_for_backward(*kept)
        ctx.repeats = repeats
        return x, slope

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_slope = gradients
        saved = ctx.saved_tensors  # once: where they are computed again, torch gives them once
        found: list[Tensor | None] = []
        last, ones = len(ctx.repeats) - 1, of_x.new_ones(len(of_x))
        for place in reversed(range(last + 1)):
            x, slope, t, rise, weight, dt = saved[6 * place : 6 * place + 6]
            of_t, of_steep, of_dt = of_x, of_slope, None
            if dt is not None:
                of_dt = (of_x * t).addcmul_(of_slope, _through_tanh(rise, t)).sum(0)
                of_t, of_steep = of_x * dt, of_slope * dt
            of_rise = _through_tanh(of_steep, t)
            of_sum = _through_tanh(torch.addcmul(of_t, t * rise, of_steep, value=-2), t)
            found += [of_dt, _column_sums(of_sum, ones), (x.t() @ of_sum).addmm_(slope.t(), of_rise)]
            if place:
                times, is_own = ctx.repeats[place], place < last
                of_x = _before(of_sum, weight, of_x, times, is_own)
                of_slope = _before(of_rise, weight, of_slope, times, is_own)
        return None, None, *reversed(found)


def _with_input(y: Tensor, x: Tensor, times: int) -> Tensor:
    """A layer's output with its input added `times`, side by side."""
    return (y.view(len(y), times, x.shape[1]) + x.unsqueeze(1)).view(y.shape) if times else y


def _before(of_sum: Tensor, weight: Tensor, of_output: Tensor, times: int, is_own: bool = False) -> Tensor:
    """The gradient of a layer's input: through its product, and past it; `of_output` may go where it `is_own`."""
    if not times:
        return of_sum @ weight.t()
    if times == 1 and not is_own:
        return torch.addmm(of_output, of_sum, weight.t())
    past = of_output if times == 1 else torch.add(*of_output.chunk(2, 1))
    return past.addmm_(of_sum, weight.t())


def _column_sums(tensor: Tensor, ones: Tensor) -> Tensor:
    """On a GPU as a product: torch's own sum leaves most of it idle."""
    return tensor.t().mv(ones) if tensor.is_cuda else tensor.sum(0)


class Scored(NamedTuple):
    """What a network makes of features."""

    values: Tensor
    """One number for each row."""
    slopes: Tensor
    """Its derivatives with the features of the row."""


class Score(nn.Module):
    """A network from features to one number, with its derivatives."""

    def __init__(self, num_features: int, widths: Sequence[int], has_dt: bool) -> None:
        """Hidden layers by their widths."""
        super().__init__()
        self.layers = nn.ModuleList(Layer(*pair, has_dt) for pair in pairwise([num_features, *widths]))
        self.weight, self.bias = _initial(widths[-1] if widths else num_features, 1)

    def forward(self, features: Tensor) -> Scored:
        """Of features (n, num_features)."""
        layers: list[Any] = list(self.layers)
        learned = [each for layer in layers for each in (layer.weight, layer.bias, layer.dt)]
        repeats = tuple(layer.repeats for layer in layers)
        return Scored(*_Score.apply(features, repeats, self.weight, self.bias, *learned))


class _Score(torch.autograd.Function):
    """Value and slopes of a network with one output.

    The value goes through the layers, and its slope back through them; the gradients of both take the opposite ways.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, repeats: tuple[int, ...], weight: Tensor, bias: Tensor, *learned: Any
    ) -> tuple[Tensor, Tensor]:
        inputs, turns = [features], []
        for place, times in enumerate(repeats):
            of_layer, of_bias, dt = learned[3 * place : 3 * place + 3]
            t = torch.addmm(of_bias, inputs[-1], of_layer).tanh_()
            turns.append(t)
            inputs.append(_with_input(t if dt is None else t * dt, inputs[-1], times))
        value = torch.addmm(bias, inputs[-1], weight)
        slopes = [weight.t().expand(len(features), -1)]
        rises = []
        for place in reversed(range(len(repeats))):
            of_layer, _, dt = learned[3 * place : 3 * place + 3]
            rises.append(_through_tanh(slopes[-1] if dt is None else slopes[-1] * dt, turns[place]))
            slopes.append(_before(rises[-1], of_layer, slopes[-1], repeats[place]))
        ctx.save_for_backward(weight, *inputs, *turns, *reversed(rises), *reversed(slopes[:-1]), *learned)
        ctx.repeats = repeats
        return value.squeeze(1), slopes[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_value, along = gradients
        repeats, (weight, *saved) = ctx.repeats, ctx.saved_tensors
        count = len(repeats)
        inputs, turns, rises, slopes = (
            saved[: count + 1], saved[count + 1 : 2 * count + 1], saved[2 * count + 1 : 3 * count + 1],
            saved[3 * count + 1 : 4 * count + 1],
        )  # fmt: skip
        learned = saved[4 * count + 1 :]
        of_weights, of_turns = [], []
        of_dts: list[Any] = []
        for place, times in enumerate(repeats):
            of_layer, _, dt = learned[3 * place : 3 * place + 3]
            across = along @ of_layer
            of_weights.append(along.t() @ rises[place])
            both = across * slopes[place]
            of_dts.append(None if dt is None else _through_tanh(both, turns[place]))
            of_turns.append(both if dt is None else both * dt)
            across = across if dt is None else across * dt
            along = _with_input(_through_tanh(across, turns[place]), along, times)
        ones = of_value.new_ones(len(of_value))
        of_weight = _column_sums(along, ones).unsqueeze(1).addmm_(inputs[-1].t(), of_value.unsqueeze(1))
        of_input = torch.outer(of_value, weight.squeeze(1))
        found: list[Tensor | None] = []
        for place in reversed(range(count)):
            of_layer, _, dt = learned[3 * place : 3 * place + 3]
            t, of_t, of_dt = turns[place], of_input, of_dts[place]
            if dt is not None:
                of_dt, of_t = _column_sums(of_dt.addcmul_(of_input, t), ones), of_input * dt
            of_sum = _through_tanh(torch.addcmul(of_t, t, of_turns[place], value=-2), t)
            found += [of_dt, _column_sums(of_sum, ones), of_weights[place].addmm_(inputs[place].t(), of_sum)]
            of_input = _before(of_sum, of_layer, of_input, repeats[place], is_own=True)
        return of_input, None, of_weight, of_value.sum().view(1), *reversed(found)
