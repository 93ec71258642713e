"""Residual networks, with the names and shapes of torchvision's weights, so that pretrained ones can be loaded."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from isoscale.errors import UserError
from isoscale.science.models import check_floats, check_widths

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
"""Blocks of each of the four stages, by depth."""


class ResNet(nn.Module):
    """A residual network for images (batch, channels, height, width)."""

    def __init__(
        self,
        depth: Literal[18, 34, 50] = 18,
        num_classes: int = 10,
        stem: Literal["cifar", "imagenet"] = "cifar",
        in_channels: int = 3,
        width: int = 64,
    ) -> None:
        """`stem` is for small images (cifar: 3×3, no pooling) or large ones (imagenet: 7×7, then pooling)."""
        super().__init__()
        if depth not in BLOCKS:
            raise UserError(f"there is no ResNet of depth {depth}; there are {', '.join(map(str, BLOCKS))}")
        check_widths("in_channels, width and num_classes", [in_channels, width, num_classes])
        block: type[Basic | Bottleneck] = Bottleneck if depth >= 50 else Basic
        large = stem == "imagenet"
        kernel = 7 if large else 3
        self.conv1 = nn.Conv2d(in_channels, width, kernel, 2 if large else 1, kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        num_in = width
        stages, num_in = [], width
        for stage, num_blocks in enumerate(BLOCKS[depth]):
            inner, stride = width * 2**stage, 1 if stage == 0 else 2
            num_out = inner * block.expansion
            rest = [block(num_out, inner, 1) for _ in range(num_blocks - 1)]
            stages.append(nn.Sequential(block(num_in, inner, stride), *rest))
            num_in = num_out
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(num_in, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        use_fast_layout(self)

    def forward(self, images: Tensor) -> Tensor:
        """From images to scores (batch, classes)."""
        check_images(images, self.conv1.in_channels)
        values = images.contiguous(memory_format=torch.channels_last)
        values = self.maxpool(functional.relu(self.bn1(self.conv1(values))))
        values = self.layer4(self.layer3(self.layer2(self.layer1(values))))
        return self.fc(values.mean((2, 3)))


class Basic(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        """From `num_in` to `width` channels."""
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(num_in, width, stride)

    def forward(self, values: Tensor) -> Tensor:
        """The block's output."""
        inner = functional.relu(self.bn1(self.conv1(values)))
        return functional.relu(self.bn2(self.conv2(inner)) + self.downsample(values))


class Bottleneck(nn.Module):
    """A 3×3 convolution between two of 1×1, beside a shortcut."""

    expansion = 4

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        """From `num_in` to 4 × `width` channels."""
        super().__init__()
        num_out = width * self.expansion
        self.conv1 = nn.Conv2d(num_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, num_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(num_out)
        self.downsample = shortcut(num_in, num_out, stride)

    def forward(self, values: Tensor) -> Tensor:
        """The block's output."""
        inner = functional.relu(self.bn1(self.conv1(values)))
        inner = functional.relu(self.bn2(self.conv2(inner)))
        return functional.relu(self.bn3(self.conv3(inner)) + self.downsample(values))


def shortcut(num_in: int, num_out: int, stride: int) -> nn.Sequential:
    """What stands beside a block: nothing, or a 1×1 convolution where the shape changes."""
    if stride == 1 and num_in == num_out:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))


def use_fast_layout(module: nn.Module) -> None:
    """Store the weights of convolutions channels last, the layout in which they are fast."""
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def check_images(images: Tensor, num_channels: int) -> None:
    """Refuse what is not a batch of images with this many channels."""
    check_floats(images)
    if images.dim() != 4:
        raise UserError(
            f"this network takes images (batch, channels, height, width), but gets {tuple(images.shape)}: "
            "leave flatten out of data.transforms"
        )
    if images.shape[1] != num_channels:
        raise UserError(
            f"this network takes images of {num_channels} channels, but these have {images.shape[1]} "
            f"(batch {tuple(images.shape)}): set task.model.in_channels={images.shape[1]}"
        )
