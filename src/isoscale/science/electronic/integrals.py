"""Integrals over a density of states that is given on an energy grid, and linear in between.

Such an integral is a sum of the values with weights: of each, the integral of a hat, which is 1 at its energy and 0 at
the neighbouring ones. Farther than `REACH` kT from the Fermi level, the Fermi function is 1 or 0 to the last bit;
within, Gauss-Legendre quadrature in pieces of at most `PIECE` kT is exact to rounding. Everything is vectorised over
systems and stays on their device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isoscale.errors import UserError

BOLTZMANN = 8.617330337217213e-05
"""eV/K."""
REACH = 40.0
PIECE = 3.0
NUM_NODES = 12
LARGEST = 1e6
"""No energy of an electron in a material is as far away, in eV."""


@dataclass(frozen=True)
class EnergyGrid:
    """Equidistant energies, in eV."""

    size: int
    spacing: float
    offset: float

    def __post_init__(self) -> None:
        """Refuse what is no grid."""
        if not (self.size >= 2 and 0 < self.spacing < LARGEST and abs(self.offset) < LARGEST):
            raise UserError(
                f"energies have size {self.size}, spacing {self.spacing} and offset {self.offset}; expected at least 2 "
                "of them, a spacing above 0 and an offset, both in eV, such as {size: 11, spacing: 2.5, offset: -5.0}"
            )

    def energies(self, device: torch.device | None = None) -> Tensor:
        """All of them."""
        return self.offset + self.spacing * torch.arange(self.size, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Weights:
    """What the density of states at each energy counts for: (systems, energies) each, in float64."""

    electrons: Tensor
    band_energy: Tensor
    entropy: Tensor
    """Of the term -TS."""
    slope: Tensor
    """The derivative of `electrons` by the Fermi level."""


class Quadrature:
    """The weights of one grid for systems at given temperatures, for any Fermi levels."""

    def __init__(self, grid: EnergyGrid, temperatures: Sequence[float], device: torch.device | None = None) -> None:
        """In eV and K, one temperature for each system."""
        self.grid = grid
        self.kt = BOLTZMANN * torch.tensor(temperatures, dtype=torch.float64, device=device)[:, None]
        # One interval more on either side: the outermost hats reach one spacing beyond the grid.
        self._left = grid.offset + grid.spacing * torch.arange(-1, grid.size, dtype=torch.float64, device=device)
        coldest = BOLTZMANN * min(temperatures)
        num_pieces = math.ceil(min(grid.spacing / coldest, 2 * REACH * max(temperatures) / min(temperatures)) / PIECE)
        nodes, shares = np.polynomial.legendre.leggauss(NUM_NODES)
        places = (np.arange(num_pieces)[:, None] + (nodes + 1) / 2) / num_pieces
        self._nodes = torch.as_tensor(places.flatten(), device=device)
        self._shares = torch.as_tensor(np.tile(shares / 2 / num_pieces, num_pieces), device=device)

    def electrons(self, fermi: Tensor) -> Tensor:
        """What the density of states at each energy counts for in the number of electrons: (systems, energies)."""
        smooth = _Smooth(self, fermi)
        return smooth.hats(smooth.occupation, smooth.whole()[0])

    def weights(self, fermi: Tensor) -> Weights:
        """The weights of all that can be known, for Fermi levels (systems,)."""
        smooth = _Smooth(self, fermi)
        electrons, band_energy = smooth.whole()
        return Weights(
            smooth.hats(smooth.occupation, electrons),
            smooth.hats(smooth.energy * smooth.occupation, band_energy),
            self.kt * smooth.hats(_entropy(smooth.x, smooth.occupation)),
            smooth.hats(smooth.occupation * (1 - smooth.occupation)) / self.kt,
        )


class _Smooth:
    """Nodes in the part of each interval in which the occupation is neither 1 nor 0: (systems, intervals, nodes)."""

    def __init__(self, quadrature: Quadrature, fermi: Tensor) -> None:
        at, kt, self._spacing = fermi[:, None], quadrature.kt, quadrature.grid.spacing
        reach = REACH * kt
        self._left = quadrature._left
        self._low = (at - reach).clamp(self._left, self._left + self._spacing)
        length = (at + reach).clamp(self._left, self._left + self._spacing) - self._low
        self.energy = self._low[..., None] + length[..., None] * quadrature._nodes
        self.x = (self.energy - at[..., None]) / kt[..., None]
        self.occupation = torch.sigmoid(-self.x)
        self._share = length[..., None] * quadrature._shares
        self._rise = (self.energy - self._left[:, None]) / self._spacing * self._share

    def hats(self, values: Tensor, whole: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The integrals of values times hats, each of which rises in one interval and falls in the next."""
        rising = (values * self._rise).sum(-1)
        falling = (values * self._share).sum(-1) - rising
        if whole is not None:
            rising, falling = rising + whole[0], falling + whole[1]
        return rising[:, :-1] + falling[:, 1:]

    def whole(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """What the fully occupied beginning of each interval adds to its rising and its falling hat.

        Once for the number of electrons (of 1) and once for the band energy (of E).
        """
        length = self._low - self._left
        rising = length**2 / (2 * self._spacing)
        rising_energy = self._left * rising + length**3 / (3 * self._spacing)
        energy = self._left * length + length**2 / 2
        return (rising, length - rising), (rising_energy, energy - rising_energy)


def _entropy(x: Tensor, occupation: Tensor) -> Tensor:
    """f ln f + (1-f) ln(1-f)."""
    logarithm = torch.nn.functional.logsigmoid
    return occupation * logarithm(-x) + (1 - occupation) * logarithm(x)
