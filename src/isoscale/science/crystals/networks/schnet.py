"""SchNet: a network of distances, as PyTorch Geometric has it, with sums that can be captured and repeated."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isoscale.science.crystals import sums
from isoscale.science.crystals.networks.graph import Graph
from isoscale.science.crystals.networks.radial import ElementEmbedding, check_cutoff, check_sizes
from isoscale.science.crystals.networks.smooth import shifted_softplus, softplus
from isoscale.science.models import Linear


class SchNet(nn.Module):
    """Continuous-filter convolutions: features of atoms from the distances of their neighbours (Schütt et al. 2017).

    Form, size and names of weights are those of `torch_geometric.nn.models.SchNet`; `from_pyg` reads its weights.
    """

    activation = staticmethod(shifted_softplus)
    """Of the layers that make an energy of features."""

    def __init__(
        self, width: int = 128, filters: int = 128, layers: int = 6, gaussians: int = 50, cutoff: float = 5.0
    ) -> None:
        """`width` features of each atom, `layers` of messages over edges up to `cutoff` (Å), seen by `gaussians`."""
        super().__init__()
        check_sizes((("width", width), ("filters", filters), ("layers", layers)))
        check_sizes((("gaussians - 1", gaussians - 1),))
        self.width, self.cutoff = width, check_cutoff(cutoff)
        self.embedding = ElementEmbedding(width)
        self.centres: Tensor
        self.register_buffer("centres", torch.linspace(0, cutoff, gaussians), persistent=False)
        self._sharpness = -0.5 / (cutoff / (gaussians - 1)) ** 2
        self.interactions = nn.ModuleList(_Interaction(width, filters, gaussians) for _ in range(layers))

    def forward(self, graph: Graph) -> Tensor:
        """Features (A, width) of each atom."""
        apart = graph.lengths.unsqueeze(1) - self.centres.to(graph.lengths.dtype)
        radial = torch.exp(apart.square() * self._sharpness)
        angle = graph.lengths.clamp(max=self.cutoff) * (math.pi / self.cutoff)
        fade = (angle.cos().unsqueeze(1) + 1) / 2
        features = self.embedding(graph.z)
        for interaction in self.interactions:
            features = features + interaction(graph, features, radial, fade)
        return features

    @staticmethod
    def from_pyg(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The weights of PyG's SchNet as those of this network, and as those of the head that makes an energy."""
        own: dict[str, Tensor] = {}
        embedding = state["embedding.weight"]
        rows = torch.zeros(ElementEmbedding(1).weight.shape[0], embedding.shape[1], dtype=embedding.dtype)
        rows[: len(embedding) - 1] = embedding[1:]
        own["embedding.weight"] = rows
        for name, value in state.items():
            if name.startswith("interactions.") and ".conv.nn." not in name:
                own[name] = value
        head = {"hidden": "lin1", "output": "lin2"}
        return own, {f"{ours}.{what}": state[f"{theirs}.{what}"] for ours, theirs in head.items() for what in _BOTH}


_BOTH = ("weight", "bias")


class _Interaction(nn.Module):
    def __init__(self, width: int, filters: int, gaussians: int) -> None:
        super().__init__()
        self.mlp = nn.ModuleList([Linear(gaussians, filters), nn.Identity(), Linear(filters, filters)])
        self.conv = nn.ModuleDict({"lin1": Linear(width, filters, bias=False), "lin2": Linear(filters, width)})
        self.lin = Linear(width, width)
        for layer in (self.mlp[0], self.mlp[2], *self.conv.values(), self.lin):
            _begin(layer)

    def forward(self, graph: Graph, features: Tensor, radial: Tensor, fade: Tensor) -> Tensor:
        first, last, lin1, lin2 = self._layers()
        bias = last.bias - math.log(2.0) * last.weight.sum(1)  # of a softplus that is shifted
        filters = functional.linear(softplus(first(radial)), last.weight, bias)
        messages = sums.scaled(lin1(features), filters, graph.source)
        found = sums.along(messages, fade, graph.target).squeeze(1)
        return self.lin(shifted_softplus(lin2(found)))

    def _layers(self) -> list[Any]:
        return [self.mlp[0], self.mlp[2], self.conv["lin1"], self.conv["lin2"]]


def _begin(layer: Any) -> None:
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
