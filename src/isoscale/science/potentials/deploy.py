"""A trained potential as a TorchScript module of plain torch operations, that runs where this package is not installed.

It takes any atoms and a list of their neighbours as simulation codes have them, rather than frames in tables.
"""

# mypy: disable-error-code="arg-type, call-overload, operator"
# Layers come out of module lists without their types, and TorchScript takes no casts.

import json
from typing import Any

import torch
from torch import Tensor, nn

from isoscale.errors import UserError
from isoscale.science.potentials.model import DeepPotential
from isoscale.science.potentials.se_e2_a import SeE2A, fade

UNITS = {"length": "angstrom", "energy": "eV", "force": "eV/angstrom", "virial": "eV"}


class _Plain(nn.Module):
    """A layer in words that TorchScript knows."""

    weight: Tensor
    bias: Tensor
    dt: Tensor

    def __init__(self, layer: Any, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        dt = torch.ones_like(layer.bias) if layer.dt is None else layer.dt
        for name, values in (("weight", layer.weight), ("bias", layer.bias), ("dt", dt)):
            self.register_buffer(name, values.detach().clone().to(dtype))
        self.repeats = layer.repeats

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, and their derivatives with what comes out of the product."""
        active = torch.addmm(self.bias, inputs, self.weight).tanh()
        outputs = active * self.dt
        if self.repeats > 0:
            outputs = outputs + inputs.repeat(1, self.repeats)
        return outputs, (1 - active * active) * self.dt


class _Filter(nn.Module):
    """The embedding network of one type of neighbour."""

    def __init__(self, curve: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Plain(layer, dtype) for layer in curve.layers)

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Values and slopes (n, width) at `numbers` (n), in whose precision they are returned."""
        values = numbers.unsqueeze(1).to(self.layers[0].weight.dtype)
        slopes = torch.ones_like(values)
        for layer in self.layers:
            values, steep = layer(values)
            before, slopes = slopes, (slopes @ layer.weight) * steep
            if layer.repeats > 0:
                slopes = slopes + before.repeat(1, layer.repeats)
        return values.to(numbers.dtype), slopes.to(numbers.dtype)


class _Fit(nn.Module):
    """The fitting network of one type of atom."""

    weight: Tensor
    bias: Tensor

    def __init__(self, score: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Plain(layer) for layer in score.layers)
        self.register_buffer("weight", score.weight.detach().clone())
        self.register_buffer("bias", score.bias.detach().clone())

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Energies (n), and their derivatives with the features (n, num_features)."""
        values = features
        weights: list[Tensor] = []
        rises: list[Tensor] = []
        repeats: list[int] = []
        for layer in self.layers:
            values, steep = layer(values)
            weights.append(layer.weight)
            rises.append(steep)
            repeats.append(layer.repeats)
        slopes = self.weight.t().expand(features.shape[0], -1)
        for place in range(len(weights) - 1, -1, -1):  # TorchScript cannot go through layers backwards
            past, slopes = slopes, (slopes * rises[place]) @ weights[place].t()
            if repeats[place] > 0:
                slopes = slopes + past.reshape(past.shape[0], repeats[place], -1).sum(1)
        return torch.addmm(self.bias, values, self.weight).squeeze(1), slopes


class _Centre(nn.Module):
    """The networks of atoms of one type."""

    mean: Tensor
    scale: Tensor
    energy_bias: Tensor

    def __init__(self, model: DeepPotential, kind: int) -> None:
        super().__init__()
        descriptor: Any = model.descriptor
        num_types = len(model.types)
        first = 0 if descriptor.one_side else kind * num_types
        networks = descriptor.networks[first : first + num_types]
        self.filters = nn.ModuleList(_Filter(network, descriptor.network_dtype) for network in networks)
        self.fit = _Fit(model.fitting[kind])
        scale = descriptor.scale[kind].detach().double()
        self.register_buffer("mean", torch.cat([descriptor.mean[kind].view(1).double(), scale.new_zeros(3)]))
        self.register_buffer("scale", scale[[0, 1, 1, 1]])
        self.register_buffer("energy_bias", model.energy_bias[kind].detach().double())
        self.sel = [int(count) for count in model.sel]
        self.axis_width = descriptor.axis_width

    def forward(self, nearness: Tensor, tables: list[Tensor], slopes: Tensor) -> Tensor:
        """The energies of some atoms (m); their derivatives are written to `slopes` (edges + 1, 4).

        `nearness` (edges + 1, 4) is what is seen of neighbours, with an empty slot at the end, and `tables` have the
        places (m, slots) of each type of neighbour in it.
        """
        normalised = ((nearness - self.mean) / self.scale).to(self.fit.weight.dtype)
        total = float(sum(self.sel))
        seen = [normalised[table] for table in tables]
        shapes, rises, moments = self._filtered(seen, normalised[-1:])
        moments = moments / total
        some = moments[:, :, : self.axis_width]
        features = torch.bmm(moments.transpose(1, 2), some)
        energy, steep = self.fit(features.reshape(features.shape[0], -1))
        steep = steep.reshape(features.shape)
        pull = torch.bmm(some, steep.transpose(1, 2))
        pull[:, :, : self.axis_width] += torch.bmm(moments, steep)
        pull = pull.transpose(1, 2) / total
        for other, table in enumerate(tables):
            found = torch.bmm(shapes[other], pull)
            found[:, :, 0] += (torch.bmm(rises[other], pull) * seen[other]).sum(2)
            slopes[table.reshape(-1)] = found.reshape(-1, 4).double() / self.scale
        return energy.double() + self.energy_bias

    def _filtered(self, seen: list[Tensor], empty: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """What the filters make of neighbours (m, slots, width), its slopes, and sums over all slots (m, 4, width).

        Slots that no atom uses are not there; all of them together are some times one that is `empty` (1, 4).
        """
        shapes: list[Tensor] = []
        rises: list[Tensor] = []
        sums: list[Tensor] = []
        for other, network in enumerate(self.filters):
            own = seen[other]
            values, slopes = network(torch.cat([own[:, :, 0].reshape(-1), empty[:, 0]]))
            size = own.shape[0], own.shape[1], values.shape[1]
            shapes.append(values[:-1].view(size))
            rises.append(slopes[:-1].view(size))
            absent = (self.sel[other] - own.shape[1]) * empty.t() * values[-1:]
            sums.append(torch.bmm(own.transpose(1, 2), shapes[-1]) + absent)
        return shapes, rises, torch.stack(sums).sum(0)


class Deployed(nn.Module):
    """Energy, forces and virial of any atoms, from a list of their neighbours.

    The list holds every pair in both directions. What it holds beyond the cutoff does no harm, so that a longer list
    can serve for many steps. Everything is in eV and Å.
    """

    def __init__(self, model: DeepPotential, allow_more_neighbours: bool = False) -> None:
        """With `allow_more_neighbours`, those beyond the model's slots are left out, farthest first: no error."""
        super().__init__()
        descriptor: Any = model.descriptor
        if not isinstance(descriptor, SeE2A):
            raise UserError(
                f"a potential with the descriptor {type(descriptor).__name__} cannot be used outside of training yet; "
                "the descriptor se_e2_a can"
            )
        self.centres = nn.ModuleList(_Centre(model, kind) for kind in range(len(model.types)))
        self.types = list(model.types)
        self.sel = [int(count) for count in model.sel]
        self.cutoff, self.smooth = float(model.cutoff), float(descriptor.smooth)
        self.allow_more_neighbours = allow_more_neighbours

    def described(self) -> dict[str, str]:
        """What a file of the potential says about itself."""
        return {
            "types": json.dumps(self.types), "cutoff": str(self.cutoff), "sel": json.dumps(self.sel),
            "allow_more_neighbours": json.dumps(self.allow_more_neighbours), "units": json.dumps(UNITS),
            "inputs": "positions, types, box, first, second, shifts",
        }  # fmt: skip

    def forward(
        self, positions: Tensor, types: Tensor, box: Tensor, first: Tensor, second: Tensor, shifts: Tensor
    ) -> dict[str, Tensor]:
        """Energy (), atom_energy (n), force (n, 3) and virial (3, 3).

        Of atoms at `positions` (n, 3), with `types` (n) as places in the list of types; the rows of `box` (3, 3) are
        cell vectors. Pairs go from atom `first` (e) to atom `second` (e), moved by `shifts` (e, 3) cells.
        """
        if bool(((types < 0) | (types >= len(self.types))).any()):
            raise ValueError(f"types are places in {self.types}, and some are not")
        positions, box = positions.double(), box.double()
        vectors = positions[second] + shifts.double() @ box - positions[first]
        distance = vectors.norm(2, 1)
        near = torch.nonzero(distance < self.cutoff).squeeze(1)
        first, second, vectors, distance = first[near], second[near], vectors[near], distance[near]
        tables = self._tables(types, first, second, distance)
        energies, slopes = self._energies(types, self._seen(vectors, distance), tables)
        pull = self._pull(vectors, distance, slopes)
        force = torch.zeros_like(positions).index_add(0, first, pull).index_add(0, second, -pull)
        return {"energy": energies.sum(), "atom_energy": energies, "force": force, "virial": -vectors.t() @ pull}

    def _seen(self, vectors: Tensor, distance: Tensor) -> Tensor:
        """Nearness, and direction times nearness, of every neighbour (e + 1, 4); the last one is an empty slot."""
        weight, _ = fade(distance, self.smooth, self.cutoff)
        near = (weight / distance).unsqueeze(1)
        found = torch.cat([near, near * vectors / distance.unsqueeze(1)], 1)
        return torch.cat([found, torch.zeros_like(found[:1]) if found.shape[0] > 0 else found.new_zeros(1, 4)])

    def _pull(self, vectors: Tensor, distance: Tensor, slopes: Tensor) -> Tensor:
        """dE/d displacement (e, 3), from dE/d what is seen (e, 4)."""
        weight, rise = fade(distance, self.smooth, self.cutoff)
        near = weight / distance
        along = (slopes[:, 1:] * vectors).sum(1) / distance
        steep = (rise - near) / distance * slopes[:, 0] + (rise - 2 * near) / distance * along
        return (steep / distance).unsqueeze(1) * vectors + (near / distance).unsqueeze(1) * slopes[:, 1:]

    def _tables(self, types: Tensor, first: Tensor, second: Tensor, distance: Tensor) -> list[Tensor]:
        """For each type, where every atom's neighbours are in the list (n, slots); empty slots point past its end."""
        found: list[Tensor] = []
        of_second = types[second]
        for other, most in enumerate(self.sel):
            places = torch.nonzero(of_second == other).squeeze(1)
            if self.allow_more_neighbours:
                places = places[torch.argsort(distance[places], stable=True)]
            else:
                self._check(first[places], other, most)
            places = places[torch.argsort(first[places], stable=True)]
            found.append(_table(first[places], places, types.shape[0], most, first.shape[0]))
        return found

    def _check(self, first: Tensor, other: int, most: int) -> None:
        counts = torch.bincount(first, minlength=1)
        if int(counts.max()) > most:
            raise ValueError(
                f"atom {int(counts.argmax())} has {int(counts.max())} neighbours {self.types[other]} within "
                f"{self.cutoff} angstrom, and the model was made for {most} at most: train it with a larger sel, or "
                "with task.allow_more_neighbours=true, which leaves out the farthest"
            )

    def _energies(self, types: Tensor, seen: Tensor, tables: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Of every atom (n), and their derivatives with what is seen (e, 4)."""
        energies = torch.zeros(types.shape[0], dtype=seen.dtype, device=seen.device)
        slopes = torch.zeros_like(seen)
        for kind, centre in enumerate(self.centres):
            atoms = torch.nonzero(types == kind).squeeze(1)
            if atoms.shape[0] > 0:
                energies[atoms] = centre(seen, [table[atoms] for table in tables], slopes)
        return energies, slopes[:-1]


def _table(rows: Tensor, places: Tensor, num_rows: int, most: int, empty: int) -> Tensor:
    """Places by row (num_rows, slots), the first `most` of each; `rows` is sorted."""
    counts = torch.bincount(rows, minlength=num_rows)
    columns = torch.arange(rows.shape[0], device=rows.device) - (counts.cumsum(0) - counts)[rows]
    width = min(int(counts.max()), most)
    found = torch.full((num_rows, width), empty, dtype=places.dtype, device=places.device)
    kept = columns < width
    found[rows[kept], columns[kept]] = places[kept]
    return found
