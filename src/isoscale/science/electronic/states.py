"""What follows from a density of states: the Fermi level, the number of electrons, band energy and entropy.

All of it can be differentiated by the density of states; the Fermi level then moves so that the number of electrons
stays what it is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from isoscale.science.electronic.integrals import Quadrature, Weights

NUM_HALVINGS = 44
"""From a grid of 25 eV to 1e-12 eV."""


@dataclass(frozen=True)
class Filling:
    """States filled up to a Fermi level: of each system, (systems,), in eV."""

    dos: Tensor
    """(systems, energies), in states per eV."""
    fermi: Tensor
    """NaN, as all that follows from it, where the grid does not hold that many electrons."""
    weights: Weights

    @property
    def num_electrons(self) -> Tensor:
        """How many electrons there are below it."""
        return (self.dos * self.weights.electrons).sum(-1)

    @property
    def band_energy(self) -> Tensor:
        """The sum of the energies of all electrons."""
        return (self.dos * self.weights.band_energy).sum(-1)

    @property
    def entropy(self) -> Tensor:
        """The term -TS of the free energy."""
        return (self.dos * self.weights.entropy).sum(-1)


def fill(dos: Tensor, fermi: Tensor, quadrature: Quadrature) -> Filling:
    """Fill states up to given Fermi levels."""
    return Filling(dos, fermi, quadrature.weights(fermi))


def fill_with(dos: Tensor, num_electrons: Tensor, quadrature: Quadrature) -> Filling:
    """Fill states with given numbers of electrons, without a word to the host."""
    with torch.no_grad():
        fermi = _fermi_level(dos, num_electrons, quadrature)
        weights = quadrature.weights(fermi)
        steepness = (dos * weights.slope).sum(-1)
    # One more step of Newton's method: it mends the last digits, and carries the derivative. In a gap there is nothing
    # to mend, and only rounding to be divided by almost nothing.
    missing = num_electrons - (dos * weights.electrons).sum(-1)
    last = quadrature.grid.spacing * quadrature.grid.size / 2**NUM_HALVINGS
    move = (missing / steepness.clamp(min=torch.finfo(torch.float64).tiny)).clamp(-last, last)
    return fill(dos, fermi + move, quadrature)


def _fermi_level(dos: Tensor, num_electrons: Tensor, quadrature: Quadrature) -> Tensor:
    grid = quadrature.grid
    low = torch.full_like(num_electrons, grid.offset)
    high = low + grid.spacing * (grid.size - 1)
    is_there = (_count(dos, low, quadrature) <= num_electrons) & (num_electrons <= _count(dos, high, quadrature))
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        is_low = _count(dos, middle, quadrature) < num_electrons
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return torch.where(is_there, (low + high) / 2, torch.nan)


def _count(dos: Tensor, fermi: Tensor, quadrature: Quadrature) -> Tensor:
    return (dos * quadrature.electrons(fermi)).sum(-1)
