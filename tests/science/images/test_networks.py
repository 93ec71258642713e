"""The networks for images: shapes, refusals, and a first layer that is measured."""

from typing import Any

import pytest
import torch
from torch import nn

from isoscale.errors import UserError
from isoscale.science.images import CNN, FastNet, ResNet
from isoscale.science.images.networks import whitening
from isoscale.science.models import MLP


@pytest.mark.parametrize("depth", [18, 34, 50])
@pytest.mark.parametrize(("stem", "size", "last"), [("cifar", 32, 4), ("imagenet", 64, 2)])
def test_a_resnet_of_any_depth_and_stem_classifies(depth: Any, stem: Any, size: int, last: int) -> None:
    network = ResNet(depth, num_classes=7, stem=stem, width=8).eval()
    shapes = []
    network.layer4.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[2:]))
    assert network(torch.randn(2, 3, size, size)).shape == (2, 7)
    assert shapes == [(last, last)]


@pytest.mark.parametrize("network", [ResNet(18, width=8), CNN(in_channels=3), FastNet(widths=(8, 8, 8))])
def test_images_of_other_channels_are_refused_with_the_setting(network: nn.Module) -> None:
    with pytest.raises(UserError, match=r"takes images of 3 channels, but these have 1 .*task.model.in_channels=1"):
        network(torch.randn(2, 1, 32, 32))
    with pytest.raises(UserError, match="leave flatten out"):
        network(torch.randn(2, 3 * 32 * 32))


def test_an_mlp_says_what_it_takes() -> None:
    with pytest.raises(UserError, match=r"takes 64 numbers .* begin with 784, and add flatten"):
        MLP([64, 10])(torch.randn(2, 1, 28, 28))


def test_images_too_small_for_the_stages_are_refused() -> None:
    with pytest.raises(UserError, match="too small for 3 stages, which need 8 pixels"):
        CNN(in_channels=1)(torch.randn(2, 1, 6, 6))


def test_an_unknown_depth_is_refused() -> None:
    with pytest.raises(UserError, match="there are 18, 34, 50"):
        ResNet(19)  # type: ignore[arg-type]


def test_convolutions_are_stored_channels_last() -> None:
    weights = [module.weight for module in ResNet(18, width=8).modules() if isinstance(module, nn.Conv2d)]
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def test_whitened_patches_are_uncorrelated_with_equal_variance() -> None:
    images = torch.nn.functional.avg_pool2d(torch.randn(200, 3, 18, 18), 3, 1)  # neighbours are alike
    filters = whitening(images, eps=0.0)
    patches = nn.functional.conv2d(images, filters[:12]).permute(0, 2, 3, 1).reshape(-1, 12).double()
    torch.testing.assert_close(patches.T @ patches / len(patches), torch.eye(12).double(), atol=1e-3, rtol=0)
    assert torch.equal(filters[:12], -filters[12:])


def test_the_first_layer_of_fastnet_is_measured_and_not_trained() -> None:
    network = FastNet(widths=(8, 8, 8))
    images = torch.randn(50, 3, 32, 32)
    network.fit_statistics(lambda count: images[:count])
    torch.testing.assert_close(network.whiten.weight, whitening(images))
    assert not network.whiten.weight.requires_grad
    assert network(images).shape == (50, 10)
