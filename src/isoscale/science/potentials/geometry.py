"""Where neighbours are: displacements from stored lists, and forces and virials from slopes of the energy."""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isoscale.system.devices import widest_float


class Layout(NamedTuple):
    """How frames are laid out: atoms sorted by type, and at each atom slots sorted by the type of the neighbour.

    A frame with fewer atoms of a type than others has virtual atoms in their places.
    """

    atoms: tuple[int, ...]
    """Places for atoms of each type in a frame."""
    slots: tuple[int, ...]
    """Places for neighbours of each type at an atom."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], num_types: int) -> "Layout":
        """The layout of a batch, which its shapes tell."""
        return cls(*(tuple(_width(batch, f"{what}_{t}") for t in range(num_types)) for what in ("atoms", "neighbours")))

    @property
    def of_atoms(self) -> list[slice]:
        """The places of each type in a frame."""
        return _slices(self.atoms)

    @property
    def of_slots(self) -> list[slice]:
        """The places of each type of neighbour at an atom."""
        return _slices(self.slots)

    def for_atoms(self, values: Tensor) -> Tensor:
        """Values of every place in a frame (atoms, …) from those of every type (types, …)."""
        return torch.cat([values[t : t + 1].expand(count, *values.shape[1:]) for t, count in enumerate(self.atoms)])


def _width(batch: Mapping[str, Tensor], key: str) -> int:
    return batch[key].shape[-1] if key in batch else 0


def _slices(widths: tuple[int, ...]) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate(widths, initial=0))]


class Edges(NamedTuple):
    """From each atom to its neighbours."""

    layout: Layout
    vectors: Tensor
    """Displacements (frames, atoms, slots, 3); in an empty slot, one that is as long as the cutoff."""
    reverse: Tensor
    """The place of the edge back among the edges of the frame (frames, atoms, slots); its own in an empty slot."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], num_types: int, cutoff: float) -> "Edges":
        """The edges of a batch of frames."""
        layout = Layout.of(batch, num_types)
        lists = [batch[f"neighbours_{t}"] for t, width in enumerate(layout.slots) if width]
        shape = *batch["coord"].shape[:2], 0
        neighbours = torch.cat(lists, -1) if lists else batch["reverse"].new_zeros(shape)
        coord, box, shifts = (_exact(batch[key]) for key in ("coord", "box", "shifts"))
        return cls(layout, _displacements(coord, box, neighbours, shifts, cutoff), batch["reverse"])


def _exact(values: Tensor) -> Tensor:
    """In float64, where the device has it: a displacement is a small difference of large numbers."""
    return values.to(widest_float(values.device))


def _displacements(coord: Tensor, box: Tensor, neighbours: Tensor, shifts: Tensor, far: float) -> Tensor:
    num_frames, num_atoms, num_slots = neighbours.shape
    places = _places(neighbours.clamp_min(0), num_atoms)
    ends = coord.reshape(-1, 3).index_select(0, places).view(num_frames, num_atoms, num_slots, 3)
    found = ends - coord.unsqueeze(2)
    for axis in range(3):  # no matrix product, whose bits might follow the size of the batch
        found = torch.addcmul(found, shifts[..., axis, None], box[:, None, None, axis])
    nowhere = torch.zeros(3, dtype=coord.dtype, device=coord.device)
    nowhere[:1].fill_(far)
    return torch.where((neighbours >= 0).unsqueeze(-1), found, nowhere)


def lengths(vectors: Tensor) -> Tensor:
    """Of vectors (…, 3), as (…, 1); each by itself, whatever else is in the batch."""
    x, y, z = vectors.square().unbind(-1)
    return (x + y + z).sqrt().unsqueeze(-1)


def _places(inside: Tensor, size: int) -> Tensor:
    """Places in frames (frames, …), each of `size`, as places in the whole batch."""
    first = torch.arange(len(inside), device=inside.device) * size
    return (inside + first.view(-1, *[1] * (inside.dim() - 1))).view(-1)


class _Turned(torch.autograd.Function):
    """Rows in the order of an involution. The gradient takes the same way: nothing is added up in a chance order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].contiguous().index_select(0, ctx.saved_tensors[0]), None


def forces(slopes: Tensor, reverse: Tensor) -> Tensor:
    """Forces (frames, atoms, 3) from the slopes of the energy with every displacement (frames, atoms, slots, 3).

    What pulls at an atom through a neighbour's edge to it is found at the edge back, so that an atom's force is a sum
    over its own slots.
    """
    back = _Turned.apply(slopes.reshape(-1, 3), _places(reverse, reverse[0].numel()))
    return (slopes - back.view_as(slopes)).sum(2)


def virials(slopes: Tensor, vectors: Tensor) -> Tensor:
    """-dE/dε (frames, 3, 3) for a strain that takes atoms and box from x to x(1+ε)."""
    return -(vectors.transpose(2, 3) @ slopes.to(vectors.dtype)).sum(1)
