"""Augmentation of images on the device, a function of (seed, epoch or step, sample) and of nothing else.

Each is a transform of a batch (n, channels, height, width) that leaves samples alone outside of training.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from isoscale.data.batches import Batch
from isoscale.data.rng import StepRandom, current
from isoscale.errors import UserError


class Augmentation:
    """A transform of the images of a training batch."""

    keeps_units = True

    def __init__(self, key: str = "input") -> None:
        """Augment `batch[key]`."""
        self.key = key

    def __call__(self, batch: Batch) -> Batch:
        """The batch with other images in training, itself elsewhere."""
        random = current()
        if random is None:
            return batch
        images = batch[self.key]
        if images.dim() != 4:
            raise UserError(
                f"{type(self).__name__} needs images (batch, channels, height, width), not {tuple(images.shape)}; "
                "put it before flatten in data.transforms"
            )
        return {**batch, self.key: self.change(images, random)}

    def change(self, images: Tensor, random: StepRandom) -> Tensor:
        """The changed images."""
        raise NotImplementedError


class Flip(Augmentation):
    """Mirror images left to right, by chance or in turns."""

    def __init__(self, mode: Literal["random", "alternate"] = "random", p: float = 0.5, key: str = "input") -> None:
        """`random` mirrors each image with probability `p`; `alternate` draws once and then takes turns by epoch."""
        super().__init__(key)
        self.mode = mode
        self.p = p

    def change(self, images: Tensor, random: StepRandom) -> Tensor:
        """Some images mirrored."""
        if self.mode == "random":
            chosen = random.uniform(random.another("flip")) < self.p
        else:
            chosen = (random.once(random.another("flip")) + random.epoch) % 2 == 1
        return torch.where(chosen[:, None, None, None], images.flip(3), images)


class Crop(Augmentation):
    """Shift images by up to `padding` pixels each way: a crop, of the same size, out of the padded image."""

    def __init__(self, padding: int = 4, mode: Literal["zero", "reflect", "edge"] = "zero", key: str = "input") -> None:
        """`mode` says what stands beyond the border: zeros, the mirrored image, or its outermost pixels."""
        super().__init__(key)
        if padding < 1:
            raise UserError(f"Crop needs a padding of at least 1 pixel, not {padding}")
        self.padding = padding
        self.mode = mode

    def change(self, images: Tensor, random: StepRandom) -> Tensor:
        """Every image at a place of its own."""
        if self.padding >= min(images.shape[2:]):
            raise UserError(f"Crop with padding {self.padding} is too much for images of {tuple(images.shape[2:])}")
        shifts = (random.bits(random.another("crop"), (2,)) * (2 * self.padding + 1) >> 32) - self.padding
        rows, columns = (self._places(shifts[:, side], images.shape[2 + side]) for side in (0, 1))
        sample = torch.arange(images.shape[0], device=images.device)[:, None, None]
        # one gather of whole pixels: channels stand last while it runs
        pixels = images.permute(0, 2, 3, 1)[sample, rows[0][:, :, None], columns[0][:, None, :]]
        moved = pixels.permute(0, 3, 1, 2)
        if self.mode == "zero":
            inside = rows[1][:, None, :, None] & columns[1][:, None, None, :]
            moved = torch.where(inside, moved, torch.zeros((), dtype=images.dtype, device=images.device))
        return moved.contiguous()

    def _places(self, shift: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Where each row or column (batch, size) comes from, and whether that lies inside the image."""
        place = torch.arange(size, device=shift.device) + shift[:, None]
        inside = (place >= 0) & (place < size)
        if self.mode == "reflect":
            return (size - 1) - ((size - 1) - place.abs()).abs(), inside
        return place.clamp(0, size - 1), inside


class Cutout(Augmentation):
    """Blank a square at a random place, which may lie partly outside of the image."""

    def __init__(self, size: int = 8, fill: float = 0.0, key: str = "input") -> None:
        """A square of `size` pixels becomes `fill`; after normalize, 0 is the mean colour."""
        super().__init__(key)
        if size < 1:
            raise UserError(f"Cutout needs a size of at least 1 pixel, not {size}")
        self.size = size
        self.fill = fill

    def change(self, images: Tensor, random: StepRandom) -> Tensor:
        """Every image with a hole."""
        words = random.bits(random.another("cutout"), (2,))
        rows, columns = (self._inside(words[:, side], images.shape[2 + side]) for side in (0, 1))
        hole = rows[:, None, :, None] & columns[:, None, None, :]
        return images.masked_fill(hole, self.fill)

    def _inside(self, word: Tensor, size: int) -> Tensor:
        centre = word * size >> 32
        first = centre - self.size // 2
        place = torch.arange(size, device=word.device)
        return (place >= first[:, None]) & (place < first[:, None] + self.size)


class Rotate(Augmentation):
    """Turn images about their centre by a random angle, with linear interpolation."""

    def __init__(self, degrees: float = 10.0, key: str = "input") -> None:
        """Angles lie between minus and plus `degrees`; corners that turn in from outside are zero."""
        super().__init__(key)
        self.degrees = degrees

    def change(self, images: Tensor, random: StepRandom) -> Tensor:
        """Every image turned by an angle of its own."""
        values = images if images.is_floating_point() else images.to(torch.get_default_dtype())
        angle = (2 * random.uniform(random.another("rotate"), dtype=values.dtype) - 1) * math.radians(self.degrees)
        cosine, sine, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
        aspect = images.shape[2] / images.shape[3]
        turn = torch.stack([cosine, -sine * aspect, zero, sine / aspect, cosine, zero], 1).view(-1, 2, 3)
        grid = functional.affine_grid(turn, list(images.shape), align_corners=False)
        turned = functional.grid_sample(values, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        return turned if images.is_floating_point() else turned.round().to(images.dtype)
