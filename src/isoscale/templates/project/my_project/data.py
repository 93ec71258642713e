"""The data: throws, simulated here; yours may come from files."""

import math

import torch
from torch import Tensor

from isoscale.data.sources import Sources, TensorSource, split_source


class Throws(Sources):
    """Throws of a ball, and where it comes down: 80 % to train, 10 % to validate, 10 % to test."""

    def __init__(self, num_throws: int = 5000, drag: float = 0.01, seed: int = 0) -> None:
        """Every argument can be set in the recipe; `drag` is the deceleration by the air, in 1/m."""
        generator = torch.Generator().manual_seed(seed)
        random = torch.rand(num_throws, 2, generator=generator)
        speed, angle = 5 + 35 * random[:, 0], math.radians(5) + math.radians(80) * random[:, 1]
        # One row per sample. `Supervised` reads the names input and target.
        throws = {"input": torch.stack([speed, angle], 1), "target": distance(speed, angle, drag)[:, None]}
        parts = split_source(TensorSource(throws), {"train": 0.8, "val": 0.1, "test": 0.1}, seed)
        # Each part may also be a torch Dataset of yours, whose samples are such dicts or (input, target):
        #   super().__init__(train=MyDataset("train"), val=MyDataset("val"), test=MyDataset("test"))
        super().__init__(parts.train, parts.val, parts.test)


def distance(speed: Tensor, angle: Tensor, drag: float, time_step: float = 0.01) -> Tensor:
    """How far balls fly, in m, at a speed in m/s and an angle in radians: all of them at once, step by step."""
    position = torch.zeros(len(speed), 2)
    velocity = speed[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    gravity = torch.tensor([0.0, -9.81])
    while (flying := position[:, 1] >= 0).any():
        acceleration = gravity - drag * velocity.norm(dim=1, keepdim=True) * velocity
        velocity = velocity + flying[:, None] * time_step * acceleration
        position = position + flying[:, None] * time_step * velocity
    # The last step of each ball went below the ground: back to where it met it.
    return position[:, 0] - position[:, 1] * velocity[:, 0] / velocity[:, 1]
