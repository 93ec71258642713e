"""Models of crystals with made-up weights, in float64 and fast enough for differences."""

from typing import Any

import torch
from ase.data import atomic_numbers
from torch import nn

from isoscale.science.crystals.model import CrystalModel, Head
from isoscale.science.crystals.networks.painn import PaiNN
from isoscale.science.crystals.networks.schnet import SchNet

ELEMENTS = ["H", "Li", "O", "Cu"]
CUTOFF = 4.0
NETWORKS = ["painn", "schnet"]


def small(network: str = "painn", *more: Head, **options: Any) -> CrystalModel:
    """A model of energies, forces and stress, and of whatever else is named."""
    torch.manual_seed(3)
    encoders: dict[str, Any] = {
        "painn": lambda: PaiNN(8, 2, CUTOFF, 6, 10.0), "schnet": lambda: SchNet(8, 8, 2, 10, CUTOFF)
    }  # fmt: skip
    return trained(CrystalModel(encoders[network](), ["energy", "forces", "stress", *more], **options))


def trained(model: CrystalModel) -> CrystalModel:
    """As if it had seen data."""
    numbers = [atomic_numbers[symbol] for symbol in ELEMENTS]
    model.set_elements(numbers)
    mean = torch.zeros(119)
    mean[numbers] = torch.tensor([-1.0, -2.0, 3.0, -0.5])
    model.set_units("energy", mean, 5.0)
    return model.double()


class Own(nn.Module):
    """A network that a user might write: every neighbour counts by its distance and element."""

    width, cutoff = 6, CUTOFF

    def __init__(self) -> None:
        """With weights of its own."""
        super().__init__()
        self.embedding, self.filters = nn.Embedding(119, 6), nn.Linear(1, 6)

    def forward(self, graph: Any) -> torch.Tensor:
        """Features of atoms."""
        fade = (1 - (graph.lengths / self.cutoff).clamp(max=1).square()).pow(3).unsqueeze(1)
        sent = self.embedding(graph.z[graph.edge_source]) * self.filters(graph.lengths.unsqueeze(1)).tanh() * fade
        start = self.embedding(graph.z)
        return start + torch.zeros_like(start).index_add(0, graph.edge_target, sent)
