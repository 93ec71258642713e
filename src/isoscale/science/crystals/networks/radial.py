"""Functions of distances: a basis that networks see instead of them, and envelopes that end smoothly at the cutoff."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from isoscale.errors import UserError

NUM_ELEMENTS = 118
"""Atomic numbers go from 1 to this."""


def envelope(distances: Tensor, cutoff: float) -> Tensor:
    """From 1 at 0 to 0 at the cutoff and beyond, with two continuous derivatives: 1 - 10x³ + 15x⁴ - 6x⁵."""
    x = (distances / cutoff).clamp(max=1)
    return 1 - x * x * x * (10 - x * (15 - 6 * x))


class BesselBasis(nn.Module):
    """The basis sin(kπr/c)/r times the envelope, and the envelope alone: (E,) to (E, size + 1).

    These are the spherical waves that vanish at the cutoff: with few of them a network sees short distances as finely
    as long ones.
    """

    def __init__(self, size: int, cutoff: float) -> None:
        """`size` waves."""
        super().__init__()
        self.cutoff = check_cutoff(cutoff)
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.arange(1, size + 1) * (math.pi / cutoff), persistent=False)

    def forward(self, distances: Tensor) -> Tensor:
        """In the dtype of distances."""
        ends = envelope(distances, self.cutoff).unsqueeze(1)
        r = distances.unsqueeze(1)
        waves = torch.sin(r * self.frequencies.to(r.dtype)) / r * math.sqrt(2 / self.cutoff)
        return torch.cat([ends, waves * ends], 1)


class ElementEmbedding(nn.Module):
    """A vector for each element, learned; that of padding is 0.

    A product with a matrix of zeros and ones: its derivative needs no atomics and no sort.
    """

    def __init__(self, width: int) -> None:
        """Vectors of `width` numbers."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_ELEMENTS, width))

    def forward(self, z: Tensor) -> Tensor:
        """(A,) to (A, width)."""
        elements = torch.arange(1, NUM_ELEMENTS + 1, device=z.device)
        return (z.unsqueeze(1) == elements).to(self.weight.dtype) @ self.weight


def check_cutoff(cutoff: float) -> float:
    """Refuse distances that no graph has."""
    if not 0 < cutoff < math.inf:
        raise UserError(f"cutoff is {cutoff}: expected a distance in Å above 0, such as 5.0")
    return float(cutoff)


def check_sizes(sizes: Sequence[tuple[str, int]]) -> None:
    """Refuse counts that no network can have."""
    for name, size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UserError(f"{name} is {size!r}: expected a whole number above 0")
