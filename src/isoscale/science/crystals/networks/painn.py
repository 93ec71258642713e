"""PaiNN: an equivariant network with scalars and vectors on every atom.

Why this one: forces and stresses of crystals depend on angles, which a network of distances alone (SchNet) sees only
through many layers; networks of higher tensors (NequIP, MACE) are more accurate with little data but spend their time
in tensor products of small, irregular matrices. With vectors as the only tensors, a layer is a few dense products and
sums over sorted edges: all of it is captured in a CUDA graph, runs on a CPU in plain kernels, and is differentiable
twice. Differences from the published network (Schütt, Unke, Gastegger 2021): the envelope has two continuous
derivatives, the norm of vectors is smooth where they vanish (as they do in every perfect crystal), sums are scaled by
the typical number of neighbours, and what no output can see is not computed: vectors before the first message and after
the last one.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from isoscale.science.crystals import sums
from isoscale.science.crystals.networks.graph import Graph
from isoscale.science.crystals.networks.radial import BesselBasis, ElementEmbedding, check_sizes
from isoscale.science.crystals.networks.smooth import silu
from isoscale.science.models import Linear

_SOFT = 0.01
"""Squared length below which the norm of a vector turns from a cone into a bowl."""


class PaiNN(nn.Module):
    """Polarizable atom interaction network: features of atoms from their surroundings."""

    def __init__(
        self, width: int = 64, layers: int = 3, cutoff: float = 5.0, basis: int = 12, neighbors: float = 40.0
    ) -> None:
        """`width` scalars and as many vectors on each atom, `layers` of messages over edges up to `cutoff` (Å).

        `basis` is the number of radial functions, and `neighbors` how many an atom typically has: it sets the scale of
        sums at the start of training, no more.
        """
        super().__init__()
        check_sizes((("width", width), ("layers", layers), ("basis", basis)))
        self.width = width
        self.radial = BesselBasis(basis, cutoff)
        self.cutoff = self.radial.cutoff
        self.embedding = ElementEmbedding(width)
        self._scale = 1 / math.sqrt(max(neighbors, 1.0))
        self.messages = nn.ModuleList(_Message(width, basis + 1, layer == 0) for layer in range(layers))
        self.updates = nn.ModuleList(_Update(width, layer == layers - 1) for layer in range(layers))

    def forward(self, graph: Graph) -> Tensor:
        """Scalars (A, width) of each atom, the same however a structure is turned, moved or numbered."""
        radial = self.radial(graph.lengths) * self._scale
        directions = graph.vectors / graph.lengths.unsqueeze(1)
        scalars, vectors = self.embedding(graph.z), None
        layers: list[tuple[Any, Any]] = list(zip(self.messages, self.updates, strict=True))
        for message, update in layers:
            scalars, vectors = message(graph, scalars, vectors, radial, directions)
            scalars, vectors = update(scalars, vectors)
        return scalars


class _Message(nn.Module):
    """What atoms learn from their neighbours; vectors are (A, 3, width), None as long as there are none."""

    def __init__(self, width: int, num_radial: int, is_first: bool) -> None:
        super().__init__()
        self.parts = 2 if is_first else 3
        self.hidden = Linear(width, width)
        self.output = Linear(width, self.parts * width)
        self.filters = nn.ParameterList(_filters(width, num_radial) for _ in range(self.parts))

    def forward(
        self, graph: Graph, scalars: Tensor, vectors: Tensor | None, radial: Tensor, directions: Tensor
    ) -> tuple[Tensor, Tensor]:
        sent = self.output(silu(self.hidden(scalars))).chunk(self.parts, 1)
        filters = [radial @ each for each in self.filters]
        to_scalars = sums.passed(sent[0].unsqueeze(1), filters[0], graph.source, graph.target).squeeze(1)
        to_vectors = sums.along(sums.scaled(sent[1], filters[1], graph.source), directions, graph.target)
        if vectors is not None:
            passed = sums.passed(vectors * sent[2].unsqueeze(1), filters[2], graph.source, graph.target)
            to_vectors = vectors + to_vectors + passed
        return scalars + to_scalars, to_vectors


def _filters(width: int, num_radial: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(num_radial, width) / math.sqrt(num_radial))


class _Update(nn.Module):
    """What an atom makes of its own scalars and vectors."""

    def __init__(self, width: int, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last
        self.mix = nn.Parameter(torch.randn(width, 2 * width) / math.sqrt(width))
        self.hidden = Linear(2 * width, width)
        self.output = Linear(width, (2 if is_last else 3) * width)

    def forward(self, scalars: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor | None]:
        left, right = (vectors @ self.mix).chunk(2, 2)
        norms = (right.square().sum(1) + _SOFT).sqrt() - math.sqrt(_SOFT)
        found = self.output(silu(self.hidden(torch.cat([scalars, norms], 1))))
        gates = found.chunk(2 if self.is_last else 3, 1)
        scalars = scalars + gates[0] + gates[1] * (left * right).sum(1)
        return scalars, None if self.is_last else vectors + left * gates[2].unsqueeze(1)
