"""The network: a plain nn.Module that knows nothing of isoscale."""

import torch
from torch import Tensor, nn


class Network(nn.Module):
    """From speed and angle to a distance."""

    scale: Tensor

    def __init__(self, width: int = 64) -> None:
        """`width` is the size of the two hidden layers."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, 1),
        )  # fmt: skip
        # Networks learn numbers around one: a speed is up to 40 m/s, an angle up to 1.5, a distance up to 100 m.
        self.register_buffer("scale", torch.tensor([20.0, 1.0]))

    def forward(self, throws: Tensor) -> Tensor:
        """From (batch, 2) to (batch, 1)."""
        return 100 * self.layers(throws / self.scale)
