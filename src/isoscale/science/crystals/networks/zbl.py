"""The repulsion of nuclei at short distances, which no training data shows."""

import torch
from torch import Tensor, nn

from isoscale.errors import UserError
from isoscale.science.crystals import sums
from isoscale.science.crystals.networks.graph import Graph

COULOMB = 14.399645
"""e²/(4πε₀) in eV Å."""
SCREENING = 0.8854 * 0.529177
"""Å."""
TERMS = ((0.18175, 3.19980), (0.50986, 0.94229), (0.28022, 0.40290), (0.02817, 0.20162))
"""Factor and decay of each exponential of the screening."""


class ZBL(nn.Module):
    """Ziegler, Biersack and Littmark's universal repulsion, ended smoothly where two atoms would be bonded.

    The learned energy comes on top of it. It ends at the sum of both covalent radii, with two continuous derivatives,
    so that what is known of bonds is left to the data.
    """

    def __init__(self) -> None:
        """Radii are those of ASE."""
        super().__init__()
        try:
            from ase.data import covalent_radii
        except ImportError:
            raise UserError("zbl takes radii of atoms from ASE: pip install 'isoscale[crystals]'") from None
        self.radii: Tensor
        self.register_buffer("radii", torch.tensor(covalent_radii))

    def forward(self, graph: Graph) -> Tensor:
        """Energies (A,) in eV: each atom has half of what it shares with a neighbour."""
        z, r = graph.z, graph.lengths
        charges, radii = z.to(r.dtype), self.radii.to(r.dtype).index_select(0, z)
        powers = charges.clamp(min=1) ** 0.23
        ends = [values.index_select(0, graph.edge_source) for values in (charges, radii, powers)]
        of_source, radius, power = ends
        of_target, other_radius, other_power = (v.index_select(0, graph.edge_target) for v in (charges, radii, powers))
        x = r * (power + other_power) / SCREENING
        screening = sum((factor * torch.exp(-decay * x) for factor, decay in TERMS), torch.zeros_like(x))
        far = (r / (radius + other_radius)).clamp(max=1)
        fade = 1 - far**3 * (10 - far * (15 - 6 * far))
        energies = COULOMB / 2 * of_source * of_target / r * screening * fade
        return sums.total(energies.unsqueeze(1), graph.target).squeeze(1)
