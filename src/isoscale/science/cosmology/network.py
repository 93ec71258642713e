"""A 3-D U-Net for fields in a box, whose convolutions can be computed by space-to-depth.

A convolution with kernel 4 and stride 2 is one with kernel 2 and stride 1 of blocks of 2×2×2 cells, whose cells became
channels. Few channels leave most of a GPU idle, so that the first and the last layer gain much from it: 4 → 64 channels
become 32 → 64, and 128 → 5 become 128 → 40.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from isoscale.errors import UserError
from isoscale.science.models import check_floats, check_widths

Padding = Literal["zeros", "circular"]
Rewrite = Literal["none", "ends", "all"]
SLOPE = 0.01
"""Of the leaky ReLU."""
DEVIATION = 0.02
"""Of the first weights."""


class UNet3d(nn.Module):
    """A U-Net from fields (batch, channels, n, n, n) to fields of the same size, between -1 and 1, without norms.

    Every layer is a convolution with kernel 4, stride 2 and padding 1, transposed on the way up. On the way down a
    leaky ReLU follows each. On the way up a ReLU follows each, and then the skip connection: the output of the same
    size on the way down, after its own activation, is appended to the channels, and the next layer sees both as they
    are. A tanh takes the place of both behind the last layer.
    """

    def __init__(
        self,
        in_channels: int = 4,
        out_channels: int = 5,
        width: int = 64,
        depth: int = 6,
        padding: Padding = "zeros",
        rewrite: Rewrite = "ends",
    ) -> None:
        """`width` channels after the first layer, doubled by each of the `depth` layers down to 8 × `width` at most.

        `padding` is what stands beyond the border: zeros, or the other side of a periodic box (circular). `rewrite`
        says which layers are computed by space-to-depth; results differ by rounding, and weights fit all three.
        """
        super().__init__()
        check_widths("in_channels, out_channels, width and depth", [in_channels, out_channels, width, depth])
        for name, value, known in (("padding", padding, Padding), ("rewrite", rewrite, Rewrite)):
            if value not in get_args(known):
                raise UserError(f"{name} is {value!r}; expected one of {', '.join(get_args(known))}")
        self.in_channels, self.out_channels, self.depth = in_channels, out_channels, depth
        widths = [width * 2 ** min(level, 3) for level in range(depth)]
        plain_up = nn.ConvTranspose3d if padding == "zeros" else CircularConvTranspose3d
        down: list[nn.Module] = []
        up: list[nn.Module] = []
        for level in range(depth):
            is_rewritten = rewrite == "all" or (rewrite == "ends" and level == 0)
            above = widths[level - 1] if level else in_channels
            down.append(
                DownConv3d(above, widths[level], padding) if is_rewritten
                else nn.Conv3d(above, widths[level], 4, 2, 1, padding_mode=padding)
            )  # fmt: skip
            num_in = widths[level] if level == depth - 1 else 2 * widths[level]
            above = widths[level - 1] if level else out_channels
            up.append(UpConv3d(num_in, above, padding) if is_rewritten else plain_up(num_in, above, 4, 2, 1))
        self.down = nn.ModuleList(down)
        self.up = nn.ModuleList(reversed(up))
        for name, parameter in self.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.normal_(parameter, std=DEVIATION)

    def forward(self, fields: Tensor) -> Tensor:
        """From (batch, in_channels, n, n, n) to (batch, out_channels, n, n, n); sides may differ."""
        self._check(fields)
        values, skips = fields, []
        for layer in self.down:
            values = functional.leaky_relu(layer(values), SLOPE)
            skips.append(values)
        *upper, last = self.up
        for layer, skip in zip(upper, skips[-2::-1], strict=True):
            values = torch.cat([functional.relu(layer(values)), skip], 1)
        return torch.tanh(last(values))

    def _check(self, fields: Tensor) -> None:
        check_floats(fields)
        if fields.dim() != 5:
            raise UserError(
                f"this network takes fields (batch, channels, n, n, n), but gets {tuple(fields.shape)}: "
                "leave flatten out of data.transforms"
            )
        if fields.shape[1] != self.in_channels:
            raise UserError(
                f"this network takes {self.in_channels} fields, but a sample has {fields.shape[1]} "
                f"(batch {tuple(fields.shape)}): set task.model.in_channels={fields.shape[1]}"
            )
        sides, smallest = fields.shape[2:], 2**self.depth
        if any(side % smallest or not side for side in sides):
            lower = [max(side // smallest, 1) * smallest for side in sides]
            common = math.gcd(*sides)
            depth = (common & -common).bit_length() - 1
            raise UserError(
                f"fields of {_times(sides)} cells cannot be halved {self.depth} times: choose sides that are multiples "
                f"of {smallest}, such as {_times(lower)}"
                + (f", or set task.model.depth={depth} or less" if depth > 0 else "")
            )


def _times(sides: torch.Size | list[int]) -> str:
    return "×".join(map(str, sides))


class DownConv3d(nn.Conv3d):
    """`nn.Conv3d` with kernel 4, stride 2 and padding 1, computed by space-to-depth: the same weights and results."""

    def __init__(self, in_channels: int, out_channels: int, padding: Padding = "zeros") -> None:
        """`padding` is what stands beyond the border."""
        super().__init__(in_channels, out_channels, 4, 2, 1, padding_mode=padding)

    def forward(self, input: Tensor) -> Tensor:
        """From (batch, in_channels, n, n, n) to (batch, out_channels, n / 2, n / 2, n / 2).

        Cell 2p + k of the padded input, which the kernel's cell k sees at p, is cell k mod 2 of block p + k div 2.
        """
        is_last = channels_come_last(input) or channels_come_last(self.weight)
        # the last cell of an odd side meets no kernel
        borders = [border for side in reversed(input.shape[2:]) for border in (1, 1 - side % 2)]
        blocks = space_to_depth(pad(input, borders, self.padding_mode), is_last)
        return functional.conv3d(blocks, space_to_depth(self.weight, is_last), self.bias)


class UpConv3d(nn.ConvTranspose3d):
    """`nn.ConvTranspose3d` with kernel 4, stride 2 and padding 1, computed by depth-to-space, with the same weights.

    With circular padding, which torch has not, it is the transpose of a circular convolution.
    """

    def __init__(self, in_channels: int, out_channels: int, padding: Padding = "zeros") -> None:
        """`padding` is what stands beyond the border."""
        super().__init__(in_channels, out_channels, 4, 2, 1)
        self.padding_mode = padding

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]  # one size of output
        """From (batch, in_channels, n, n, n) to (batch, out_channels, 2n, 2n, 2n).

        Cell k mod 2 of block p gets, through the kernel's cell k, the input at p - k div 2: a convolution whose kernel
        is mirrored. The outermost cells, half of the outermost blocks, are cut off, which is what padding 1 means here.
        """
        is_last = channels_come_last(input) or channels_come_last(self.weight)
        weight = space_to_depth(self.weight, is_last).transpose(0, 1).flip(2, 3, 4)
        weight = weight.contiguous(memory_format=torch.channels_last_3d if is_last else torch.contiguous_format)
        bias = None if self.bias is None else self.bias.repeat(8)
        if self.padding_mode == "zeros":
            blocks = functional.conv3d(input, weight, bias, padding=1)
        else:
            blocks = functional.conv3d(pad(input, [1] * 6, self.padding_mode), weight, bias)
        return functional.pad(depth_to_space(blocks, is_last), [-1] * 6)


class CircularConvTranspose3d(nn.ConvTranspose3d):
    """The transpose of a circular convolution with kernel 4, stride 2 and padding 1, computed by torch."""

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]  # one size of output
        """From (batch, in_channels, n, n, n) to (batch, out_channels, 2n, 2n, 2n)."""
        wrapped = pad(input, [1] * 6, "circular")
        return functional.conv_transpose3d(wrapped, self.weight, self.bias, stride=2, padding=3)


def pad(values: Tensor, borders: list[int], mode: str) -> Tensor:
    """`functional.pad` with torch's names of a convolution's `padding_mode`."""
    return functional.pad(values, borders, "constant" if mode == "zeros" else mode)


def space_to_depth(values: Tensor, is_last: bool) -> Tensor:
    """Turn blocks of 2×2×2 cells into channels: (batch, c, 2d, 2h, 2w) to (batch, 8c, d, h, w).

    The cell within the block comes first in the new channels, so that a copy channels last moves all c at once.
    """
    cells = values.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # (batch, c, d, 2, h, 2, w, 2)
    if is_last:
        return cells.permute(0, 2, 4, 6, 3, 5, 7, 1).flatten(4).movedim(4, 1)
    return cells.permute(0, 3, 5, 7, 1, 2, 4, 6).flatten(1, 4)


def depth_to_space(values: Tensor, is_last: bool) -> Tensor:
    """The inverse of `space_to_depth`: (batch, 8c, d, h, w) to (batch, c, 2d, 2h, 2w)."""
    cells = values.unflatten(1, (2, 2, 2, -1))  # (batch, 2, 2, 2, c, d, h, w)
    if is_last:
        return cells.permute(0, 5, 1, 6, 2, 7, 3, 4).flatten(5, 6).flatten(3, 4).flatten(1, 2).movedim(4, 1)
    return cells.permute(0, 4, 5, 1, 6, 2, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def channels_come_last(tensor: Tensor) -> bool:
    """Whether a tensor is in the memory format channels_last_3d, and in no other."""
    return tensor.is_contiguous(memory_format=torch.channels_last_3d) and not tensor.is_contiguous()
