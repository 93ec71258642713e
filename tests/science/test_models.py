"""Networks that several sciences use."""

import copy

import pytest
import torch
from torch import nn

from isoscale.errors import UserError
from isoscale.science.models import MLP, Linear, _Affine

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_gradients_of_a_linear_layer_are_right_to_the_second_order():
    layer = Linear(5, 3).double()
    input = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_Affine.apply, (input, layer.weight, layer.bias))
    assert torch.autograd.gradgradcheck(_Affine.apply, (input, layer.weight, layer.bias))


def test_what_needs_no_gradient_gets_none():
    layer = Linear(5, 3)
    layer.weight.requires_grad_(False)
    input = torch.randn(7, 5)
    _Affine.apply(input, layer.weight, layer.bias).sum().backward()
    assert layer.weight.grad is None
    assert input.grad is None
    assert torch.equal(layer.bias.grad, torch.full((3,), 7.0))


def test_the_weights_have_the_names_of_plain_layers():
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    own = MLP([4, 8, 2])
    assert list(own.layers.state_dict()) == list(plain.state_dict())
    own.layers.load_state_dict(plain.state_dict())
    input = torch.randn(5, 4)
    torch.testing.assert_close(own(input), plain(input))


def test_every_hidden_layer_may_have_an_activation_of_its_own():
    kinds = [type(layer).__name__ for layer in MLP([4, 8, 6, 2], ["relu", "tanh"]).layers]
    assert kinds == ["Linear", "ReLU", "Linear", "Tanh", "Linear"]
    with pytest.raises(UserError, match="1 activations were given for 2 hidden layers"):
        MLP([4, 8, 6, 2], ["relu"])


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_gpu_the_layer_is_that_of_torch(dtype: torch.dtype):
    own = Linear(91, 400).to("cuda", dtype)
    plain = nn.Linear(91, 400).to("cuda", dtype)
    plain.load_state_dict(copy.deepcopy(own.state_dict()))
    input = torch.randn(1000, 91, dtype=dtype, device="cuda")
    for layer in (own, plain):
        layer(input).square().sum().backward()
    assert torch.equal(own(input), plain(input))
    assert torch.equal(own.weight.grad, plain.weight.grad)
    torch.testing.assert_close(own.bias.grad, plain.bias.grad, rtol=1e-5, atol=1e-2)


@needs_cuda
def test_on_a_gpu_mixed_precision_stays_torchs():
    layer = Linear(91, 400).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        output = layer(torch.randn(10, 91, device="cuda"))
    assert output.dtype == torch.bfloat16
