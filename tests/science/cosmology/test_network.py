"""The U-Net is that of its description, and layers computed by space-to-depth are those of torch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from isoscale.errors import UserError
from isoscale.science.cosmology.network import (
    CircularConvTranspose3d,
    DownConv3d,
    UNet3d,
    UpConv3d,
    depth_to_space,
    space_to_depth,
)

LAST = torch.channels_last_3d
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def described(fields: Tensor, weights: list[Tensor]) -> Tensor:
    """The default network as its description says, layer by layer; weights and biases from input to output."""
    layers = iter(zip(weights[::2], weights[1::2], strict=True))

    def down(values: Tensor) -> Tensor:
        weight, bias = next(layers)
        return functional.leaky_relu(functional.conv3d(values, weight, bias, stride=2, padding=1), 0.01)

    def up(values: Tensor) -> Tensor:
        weight, bias = next(layers)
        return functional.conv_transpose3d(values, weight, bias, stride=2, padding=1)

    of_32 = down(fields)
    of_16 = down(of_32)
    of_8 = down(of_16)
    of_4 = down(of_8)
    of_2 = down(of_4)
    of_1 = down(of_2)
    values = torch.relu(up(of_1))
    values = torch.relu(up(torch.cat((values, of_2), dim=1)))
    values = torch.relu(up(torch.cat((values, of_4), dim=1)))
    values = torch.relu(up(torch.cat((values, of_8), dim=1)))
    values = torch.relu(up(torch.cat((values, of_16), dim=1)))
    return torch.tanh(up(torch.cat((values, of_32), dim=1)))


def with_gradients(function: Any, inputs: list[Tensor], seed: int = 0) -> list[Tensor]:
    """What a function returns, and the gradients of a weighted sum of it, whose terms do not cancel to rounding."""
    result = function()
    factor = torch.rand(result.shape, dtype=result.dtype, generator=torch.Generator().manual_seed(seed))
    return [result.detach(), *torch.autograd.grad((result * factor).sum(), inputs)]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Each equal to a fraction of its largest value."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-30)


def test_the_default_has_the_parameters_of_its_description() -> None:
    with torch.device("meta"):
        network = UNet3d()
    assert sum(parameter.numel() for parameter in network.parameters()) == 116_977_029
    channels = [(layer.in_channels, layer.out_channels) for layer in [*network.down, *network.up]]
    assert channels[:6] == [(4, 64), (64, 128), (128, 256), (256, 512), (512, 512), (512, 512)]
    assert channels[6:] == [(512, 512), (1024, 512), (1024, 256), (512, 128), (256, 64), (128, 5)]
    kinds = [type(layer) for layer in network.modules() if isinstance(layer, nn.Conv3d | nn.ConvTranspose3d)]
    assert kinds == [DownConv3d, *[nn.Conv3d] * 5, *[nn.ConvTranspose3d] * 5, UpConv3d]


def test_first_weights_are_small_and_normal_and_biases_zero() -> None:
    network = UNet3d(width=16, depth=3)
    weights = torch.cat([layer.weight.detach().flatten() for layer in [*network.down, *network.up]])
    assert abs(float(weights.mean())) < 1e-4 and abs(float(weights.std()) - 0.02) < 1e-4
    assert all(not layer.bias.any() for layer in [*network.down, *network.up])


@pytest.mark.parametrize(
    "rewrite", ["ends", pytest.param("none", marks=pytest.mark.slow), pytest.param("all", marks=pytest.mark.slow)]
)
def test_it_computes_what_the_description_says(rewrite: Any) -> None:
    torch.manual_seed(0)
    network = UNet3d(width=4, rewrite=rewrite).double()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)  # the first weights hardly reach the deepest layers
    fields = torch.randn(1, 4, 64, 64, 64, dtype=torch.float64, requires_grad=True)
    weights = list(network.parameters())
    found = with_gradients(lambda: network(fields), [fields, *weights])
    expected = with_gradients(lambda: described(fields, weights), [fields, *weights])
    assert found[0].shape == (1, 5, 64, 64, 64)
    assert min(float(each.abs().max()) for each in expected) > 1e-3, "every weight counts"
    assert_close(found, expected, 1e-12)


@pytest.mark.full
def test_the_default_computes_what_the_description_says() -> None:
    """In float32: gradients are sums of 262,144 terms, and the sign of an activation at 0 is that of its rounding."""
    torch.manual_seed(0)
    network = UNet3d()
    fields = torch.randn(1, 4, 64, 64, 64)
    weights = list(network.parameters())
    found = with_gradients(lambda: network(fields), weights)
    expected = with_gradients(lambda: described(fields, weights), weights)
    assert_close(found[:1], expected[:1], 1e-5)
    assert max(float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)) < 1e-4


@pytest.mark.parametrize(("width", "depth", "sides"), [
    (2, 1, (2, 4, 6)), (3, 2, (4, 4, 8)), (2, 5, (32, 32, 64)),
    pytest.param(1, 6, (128, 128, 128), marks=pytest.mark.slow),
    pytest.param(1, 7, (128, 128, 128), marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_any_width_depth_and_multiple_of_the_smallest_size(width: int, depth: int, sides: Any, padding: Any) -> None:
    network = UNet3d(in_channels=2, out_channels=3, width=width, depth=depth, padding=padding)
    assert max(layer.out_channels for layer in network.down) == width * min(8, 2 ** (depth - 1))
    assert network(torch.randn(2, 2, *sides)).shape == (2, 3, *sides)


def test_a_seed_gives_the_same_first_weights_whatever_is_rewritten() -> None:
    weights = []
    for rewrite in ("none", "ends", "all"):
        torch.manual_seed(3)
        weights.append(list(UNet3d(width=2, depth=3, rewrite=rewrite).parameters()))
    for plain, *rewritten in zip(*weights, strict=True):
        assert all(torch.equal(plain, each) for each in rewritten)


@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_weights_load_from_every_rewrite_into_every_other(padding: Any) -> None:
    networks = [UNet3d(width=2, depth=3, padding=padding, rewrite=way).double() for way in ("none", "ends", "all")]
    fields = torch.randn(2, 4, 16, 8, 8, dtype=torch.float64)
    for network in networks[1:]:
        assert not torch.equal(network.up[0].weight, networks[0].up[0].weight)
        network.load_state_dict(networks[0].state_dict())
        assert_close([network(fields)], [networks[0](fields)], 1e-12)


@pytest.mark.parametrize("rewrite", ["none", "ends", "all"])
def test_a_circular_network_does_not_see_where_the_box_begins(rewrite: Any) -> None:
    network = UNet3d(width=2, depth=3, padding="circular", rewrite=rewrite).double()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    fields = torch.randn(1, 4, 16, 16, 16, dtype=torch.float64)
    shift = {"shifts": (8, 0, 8), "dims": (2, 3, 4)}  # by what the deepest layer sees as whole cells
    assert_close([network(fields.roll(**shift))], [network(fields).roll(**shift)], 1e-12)
    zeros = UNet3d(width=2, depth=3, rewrite=rewrite).double()
    zeros.load_state_dict(network.state_dict())
    assert not torch.allclose(zeros(fields.roll(**shift)), zeros(fields).roll(**shift), atol=1e-3)


side = st.integers(2, 7)
layers = settings(max_examples=40, deadline=None)


@layers
@given(
    sides=st.tuples(side, side, side), num_in=st.integers(1, 5), num_out=st.integers(1, 5), batch=st.integers(1, 3),
    padding=st.sampled_from(["zeros", "circular"]), dtype=st.sampled_from([torch.float64, torch.float32]),
    is_last=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_convolution_by_space_to_depth_is_that_of_torch(
    sides: Any, num_in: int, num_out: int, batch: int, padding: Any, dtype: torch.dtype, is_last: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    plain = nn.Conv3d(num_in, num_out, 4, 2, 1, padding_mode=padding, dtype=dtype)
    rewritten = DownConv3d(num_in, num_out, padding).to(dtype)
    rewritten.load_state_dict(plain.state_dict())
    input = torch.randn(batch, num_in, *sides, dtype=dtype)
    input = (input.contiguous(memory_format=LAST) if is_last else input).requires_grad_()
    found = with_gradients(lambda: rewritten(input), [input, *rewritten.parameters()])
    expected = with_gradients(lambda: plain(input), [input, *plain.parameters()])
    assert_close(found, expected, TOLERANCE[dtype])


@layers
@given(
    sides=st.tuples(*[st.integers(1, 5)] * 3), num_in=st.integers(1, 5), num_out=st.integers(1, 5),
    batch=st.integers(1, 3), padding=st.sampled_from(["zeros", "circular"]),
    dtype=st.sampled_from([torch.float64, torch.float32]), is_last=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_transposed_convolution_by_depth_to_space_is_that_of_torch(
    sides: Any, num_in: int, num_out: int, batch: int, padding: Any, dtype: torch.dtype, is_last: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    kind = nn.ConvTranspose3d if padding == "zeros" else CircularConvTranspose3d
    plain = kind(num_in, num_out, 4, 2, 1, dtype=dtype)
    rewritten = UpConv3d(num_in, num_out, padding).to(dtype)
    plain.load_state_dict(rewritten.state_dict())
    input = torch.randn(batch, num_in, *sides, dtype=dtype)
    input = (input.contiguous(memory_format=LAST) if is_last else input).requires_grad_()
    found = with_gradients(lambda: rewritten(input), [input, *rewritten.parameters()])
    expected = with_gradients(lambda: plain(input), [input, *plain.parameters()])
    assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize(("padding", "up"), [
    ("zeros", UpConv3d(2, 3)), ("circular", UpConv3d(2, 3, "circular")),
    ("circular", CircularConvTranspose3d(2, 3, 4, 2, 1)),
], ids=["zeros", "circular", "circular by torch"])  # fmt: skip
def test_going_up_is_the_transpose_of_going_down(padding: Any, up: nn.Module) -> None:
    down, up = DownConv3d(3, 2, padding).double(), up.double()
    up.load_state_dict({"weight": down.weight, "bias": torch.zeros(3)})
    nn.init.zeros_(down.bias)
    big, small = torch.randn(1, 3, 8, 4, 6).double(), torch.randn(1, 2, 4, 2, 3).double()
    torch.testing.assert_close((down(big) * small).sum(), (big * up(small)).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding", ["zeros", "circular"])
@pytest.mark.parametrize("kind", [DownConv3d, UpConv3d])
def test_fields_and_weights_in_channels_last_give_such(kind: Any, padding: Any) -> None:
    layer = kind(3, 6, padding)
    input = torch.randn(2, 3, 4, 6, 8)
    assert layer(input).is_contiguous()
    assert layer(input.to(memory_format=LAST)).is_contiguous(memory_format=LAST)
    assert layer.to(memory_format=LAST)(input).is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("is_last", [False, True])
def test_blocks_become_channels_and_cells_again(is_last: bool) -> None:
    values = torch.arange(2 * 3 * 4 * 6 * 8).view(2, 3, 4, 6, 8)
    blocks = space_to_depth(values, is_last)
    assert blocks.shape == (2, 24, 2, 3, 4)
    assert blocks.is_contiguous(memory_format=LAST if is_last else torch.contiguous_format)
    assert torch.equal(blocks[:, 3 * 5 : 3 * 6], values[:, :, 1::2, ::2, 1::2]), "cell 5 is (1, 0, 1)"
    again = depth_to_space(blocks, is_last)
    assert torch.equal(again, values)
    assert again.is_contiguous(memory_format=LAST if is_last else torch.contiguous_format)


def test_autocast_reaches_the_rewritten_layers() -> None:
    network = UNet3d(width=4, depth=2, rewrite="all")
    fields = torch.randn(2, 4, 8, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = network(fields)
    assert coarse.dtype == torch.bfloat16
    torch.testing.assert_close(coarse.float(), network(fields), rtol=0.05, atol=1e-3)


@pytest.mark.parametrize(("sides", "advice"), [
    ((48, 64, 64), r"48×64×64 cells cannot be halved 6 times: .* multiples of 64, such as 64×64×64, or .*depth=4"),
    ((200, 200, 200), r"such as 192×192×192, or set task.model.depth=3 or less"),
    ((65, 64, 64), r"such as 64×64×64$"),
])  # fmt: skip
def test_sizes_that_cannot_be_halved_are_refused_with_what_to_choose(sides: Any, advice: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=advice):
        UNet3d(width=1)(torch.empty(1, 4, *sides))


@pytest.mark.parametrize(("arguments", "shape", "words"), [
    ({}, (1, 4, 64, 64), "leave flatten out"),
    ({}, (1, 3, 64, 64, 64), "task.model.in_channels=3"),
    ({"rewrite": "first"}, None, "expected one of none, ends, all"),
    ({"padding": "reflect"}, None, "expected one of zeros, circular"),
    ({"depth": 0}, None, "above 0"),
])  # fmt: skip
def test_mistakes_are_named(arguments: Any, shape: Any, words: str) -> None:
    with torch.device("meta"), pytest.raises(UserError, match=words):
        UNet3d(width=1, **arguments)(torch.empty(shape))
