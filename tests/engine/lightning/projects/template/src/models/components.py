import torch
from torch import nn


class SimpleDenseNet(nn.Module):
    """A fully connected network with batch norm."""

    def __init__(self, input_size: int = 6, hidden_size: int = 16, output_size: int = 3) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(input_size, hidden_size),
            nn.BatchNorm1d(hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, output_size),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)
