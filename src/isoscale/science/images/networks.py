"""Small convolutional networks for small images."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from isoscale.errors import UserError
from isoscale.science.images.resnet import check_images, use_fast_layout
from isoscale.science.models import check_fraction, check_widths


class CNN(nn.Module):
    """Stages of two 3×3 convolutions, each followed by pooling, and a linear layer: a sound start for small images."""

    def __init__(
        self, num_classes: int = 10, in_channels: int = 1, widths: Sequence[int] = (32, 64, 128), dropout: float = 0.0
    ) -> None:
        """`widths` are the channels of the stages; each halves the image."""
        super().__init__()
        check_widths("in_channels, widths and num_classes", [in_channels, *widths, num_classes])
        check_fraction("dropout", dropout)
        stages, num_in = [], in_channels
        for width in widths:
            stages.append(nn.Sequential(_convolution(num_in, width), _convolution(width, width), nn.MaxPool2d(2)))
            num_in = width
        self.stages = nn.Sequential(*stages)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(num_in, num_classes)
        self.in_channels = in_channels
        use_fast_layout(self)

    def forward(self, images: Tensor) -> Tensor:
        """From images to scores (batch, classes)."""
        check_images(images, self.in_channels)
        smallest = 2 ** len(self.stages)
        if min(images.shape[2:]) < smallest:
            raise UserError(
                f"images of {tuple(images.shape[2:])} are too small for {len(self.stages)} stages, which need "
                f"{smallest} pixels: give task.model.widths fewer numbers"
            )
        values = self.stages(images.contiguous(memory_format=torch.channels_last))
        return self.head(self.dropout(values.mean((2, 3))))


def _convolution(num_in: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU())


class FastNet(nn.Module):
    """A network that learns CIFAR-10 in seconds: whitened 2×2 patches, then three short convolutional stages.

    The first layer is measured on the data rather than learned: it turns patches into uncorrelated directions of equal
    variance, each with both signs, so that the layers behind it see well-conditioned inputs from the first step on.
    """

    def __init__(
        self, num_classes: int = 10, in_channels: int = 3, widths: Sequence[int] = (64, 256, 256), scale: float = 1 / 9
    ) -> None:
        """`widths` are the channels of the stages; `scale` tempers the scores."""
        super().__init__()
        check_widths("widths", widths)
        check_widths("in_channels and num_classes", [in_channels, num_classes])
        num_directions = 2 * in_channels * 4
        self.whiten = nn.Conv2d(in_channels, num_directions, 2)
        self.whiten.weight.requires_grad = False
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        sizes = [num_directions, *widths]
        self.stages = nn.Sequential(*(FastStage(sizes[i], sizes[i + 1]) for i in range(len(widths))))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        self.scale = scale
        use_fast_layout(self)

    @torch.no_grad()
    def fit_statistics(self, sample: Callable[[int], Tensor]) -> None:
        """Set the first layer from the patches of 5,000 images."""
        images = sample(5000)
        check_images(images, self.whiten.in_channels)
        self.whiten.weight.copy_(whitening(images))

    def forward(self, images: Tensor) -> Tensor:
        """From images to scores (batch, classes)."""
        check_images(images, self.whiten.in_channels)
        values = functional.gelu(self.whiten(images.contiguous(memory_format=torch.channels_last)))
        values = self.stages(values)
        return self.head(functional.max_pool2d(values, list(values.shape[2:])).flatten(1)) * self.scale


class FastStage(nn.Module):
    """Two 3×3 convolutions with pooling between them."""

    def __init__(self, num_in: int, num_out: int) -> None:
        """From `num_in` to `num_out` channels, at half the size."""
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, padding="same", bias=False)
        self.norm1 = _norm(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding="same", bias=False)
        self.norm2 = _norm(num_out)
        for conv in (self.conv1, self.conv2):
            nn.init.dirac_(conv.weight[: conv.in_channels])  # as many channels as can pass unchanged at first

    def forward(self, values: Tensor) -> Tensor:
        """The stage's output."""
        values = functional.gelu(self.norm1(functional.max_pool2d(self.conv1(values), 2)))
        return functional.gelu(self.norm2(self.conv2(values)))


def _norm(num_channels: int) -> nn.BatchNorm2d:
    """Batch norm that forgets fast, for runs of few steps, and whose scale stays 1."""
    norm = nn.BatchNorm2d(num_channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad = False
    return norm


def whitening(images: Tensor, eps: float = 5e-4) -> Tensor:
    """Filters (2 × channels × 4, channels, 2, 2) that whiten the 2×2 patches of images, each with both signs."""
    channels = images.shape[1]
    patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, channels * 4).double()
    covariance = (patches.T @ patches / len(patches)).cpu()  # eigenvectors are the same on any device then
    variances, directions = torch.linalg.eigh(covariance)
    scaled = directions.T.flip(0) / torch.sqrt(variances.flip(0) + eps)[:, None]
    filters = scaled.reshape(-1, channels, 2, 2)
    return torch.cat([filters, -filters]).to(images.device, images.dtype)
