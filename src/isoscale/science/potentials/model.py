"""A Deep Potential: energies, forces and virials of frames of atoms."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isoscale.errors import UserError
from isoscale.science.models import check_widths
from isoscale.science.potentials.descriptor import Descriptor
from isoscale.science.potentials.geometry import Edges, Layout, forces, virials
from isoscale.science.potentials.layers import Score


class Prediction(NamedTuple):
    """What a potential says of frames; virtual atoms have no energy and no force."""

    energy: Tensor
    """(frames), eV, in float64."""
    atom_energy: Tensor
    """(frames, atoms)."""
    force: Tensor
    """(frames, atoms, 3), eV/Å."""
    virial: Tensor
    """(frames, 3, 3), eV."""


class DeepPotential(nn.Module):
    """The energy of an atom from features of its neighbours, by a network for each type of atom."""

    def __init__(
        self,
        types: Sequence[str],
        descriptor: Descriptor,
        fitting_widths: Sequence[int] = (240, 240, 240),
        fitting_dt: bool = True,
    ) -> None:
        """`types` names the atoms by number, such as [O, H]; the fitting networks by their hidden widths."""
        super().__init__()
        if len(set(types)) != len(types) or len(types) != len(descriptor.sel):
            raise UserError(
                f"types are {list(types)} and sel is {descriptor.sel}: expected a name for each type of atom, each "
                "only once, and a number in sel for each"
            )
        self.types = [str(name) for name in types]
        self.descriptor = descriptor
        widths = check_widths("fitting_widths", fitting_widths)
        self.fitting = nn.ModuleList(Score(descriptor.num_features, widths, fitting_dt) for _ in types)
        self.energy_bias: Tensor
        self.register_buffer("energy_bias", torch.zeros(len(types), dtype=torch.float64))

    @property
    def cutoff(self) -> float:
        """Å, up to which atoms are neighbours."""
        return self.descriptor.cutoff

    @property
    def sel(self) -> list[int]:
        """The most neighbours of each type that an atom may have."""
        return self.descriptor.sel

    def forward(self, batch: Mapping[str, Tensor], with_virial: bool = True) -> Prediction:
        """Of a batch of frames with their neighbours; a virial that nobody wants need not be computed."""
        kind = self.energy_bias.device.type
        coarse = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False):  # what is added up needs all digits
            return self._predict(self.prepare(batch, with_virial) if "coord" in batch else batch, coarse, with_virial)

    @torch.no_grad()
    def prepare(self, batch: Mapping[str, Tensor], with_virial: bool = True) -> dict[str, Tensor]:
        """A batch with all that is made of coordinates before anything learned comes in, instead of these."""
        edges = Edges.of(batch, len(self.types), self.cutoff)
        found = self.descriptor.prepare(edges) | ({"vectors": edges.vectors} if with_virial else {})
        found["is_atom"] = real_atoms(batch, edges.layout).to(self.energy_bias.dtype)
        found["num_atoms"] = found["is_atom"].sum(1)
        left_out = ("coord", "box", "shifts", "places", *(f"neighbours_{t}" for t in range(len(self.types))))
        return {key: tensor for key, tensor in batch.items() if key not in left_out} | found

    def _predict(self, batch: Mapping[str, Tensor], coarse: torch.dtype | None, with_virial: bool) -> Prediction:
        layout = Layout.of(batch, len(self.types))
        features, pull = self.descriptor(layout.atoms, batch, coarse)
        energies, slopes = self._scored(layout, features)
        bias = layout.for_atoms(self.energy_bias)
        energies = (energies.to(bias.dtype) + bias) * batch["is_atom"]
        of_vectors = pull(slopes)
        unknown = of_vectors.new_full((len(energies), 3, 3), math.nan)
        virial = virials(of_vectors, batch["vectors"]) if with_virial else unknown
        return Prediction(energies.sum(1), energies, forces(of_vectors, batch["reverse"]), virial)

    def _scored(self, layout: Layout, features: Tensor) -> tuple[Tensor, Tensor]:
        """Energies (frames, atoms), and their slopes with the features (frames, atoms, features)."""
        energies, slopes = [], []
        num_frames, _, num_features = features.shape
        for score, atoms in zip(self.fitting, layout.of_atoms, strict=True):
            if atoms.stop > atoms.start:
                found = score(features[:, atoms].reshape(-1, num_features))
                energies.append(found.values.view(num_frames, -1))
                slopes.append(found.slopes.view(num_frames, -1, num_features))
        return torch.cat(energies, 1), torch.cat(slopes, 1)


def real_atoms(batch: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """Which places (frames, atoms) hold real atoms."""
    return torch.cat([batch[f"atoms_{t}"] for t, count in enumerate(layout.atoms) if count], -1)
