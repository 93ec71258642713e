"""The se_e2_a descriptor of Deep Potentials: distances and directions of all neighbours, through a learned filter."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from isoscale.errors import UserError
from isoscale.science.models import check_widths
from isoscale.science.potentials.descriptor import Descriptor, Prepared, Pull
from isoscale.science.potentials.geometry import Edges, Layout, lengths
from isoscale.science.potentials.layers import Curve

LEAST_SCALE = 0.01
"""Statistics below it, as where all neighbours are alike, would blow up rounding."""
MOST_CUTOFF = 100.0
"""In Å; to look for neighbours farther away would take forever."""
DTYPES = {"64": torch.float64, "32": torch.float32, "bf16": torch.bfloat16}


class Fading(NamedTuple):
    """A weight that goes smoothly from 1 to 0, and its derivative with the distance."""

    weight: Tensor
    rise: Tensor


def fade(distance: Tensor, smooth: float, cutoff: float) -> Fading:
    """1 up to `smooth`, 0 from `cutoff` on, with two continuous derivatives."""
    u = ((distance - smooth) / (cutoff - smooth)).clamp(0, 1)
    weight = u * u * u * ((15 - 6 * u) * u - 10) + 1
    return Fading(weight, (u * (1 - u)).square() * (-30 / (cutoff - smooth)))


class Block(NamedTuple):
    """Neighbours of one type at atoms of one type, or of any: what one network sees.

    An atom's rows are its slots, and one more that stands for all slots of the model that are not stored.
    """

    network: Any
    atoms: slice
    rows: Tensor
    """What is seen (frames * atoms, rows, 4)."""
    numbers: Tensor
    """What the network gets (frames * atoms, rows): the first of what is seen."""
    jacobian: Tensor
    """Of what is seen with the displacement (frames * atoms, slots, 3, 4); slots beyond `sel` count for nothing."""


class SeE2A(Descriptor):
    """Smooth edition, embedding of two-body terms, all of a neighbour's displacement."""

    def __init__(
        self,
        sel: Sequence[int],
        cutoff: float = 6.0,
        smooth: float = 0.5,
        widths: Sequence[int] = (25, 50, 100),
        axis_width: int = 16,
        dt: bool = False,
        one_side: bool = True,
        precision: str | int | None = None,
    ) -> None:
        """`sel` has a number for each type of atom, 0 for one that is nobody's neighbour.

        `smooth` is where neighbours begin to fade, `one_side` has one network for each type of neighbour instead of one
        for each pair of types, and `precision` is what the networks compute in (64, 32, bf16), by default as all.
        """
        super().__init__()
        self.sel = list(sel)
        if min(self.sel, default=0) < 0 or not sum(self.sel):
            raise UserError(f"sel is {self.sel}: expected how many neighbours of each type an atom may have, not all 0")
        if not 0 <= smooth < cutoff:
            raise UserError(f"smooth is {smooth} and cutoff is {cutoff}: neighbours fade between the two, so that "
                            "smooth must be less than cutoff")  # fmt: skip
        if cutoff > MOST_CUTOFF:
            raise UserError(f"cutoff is {cutoff}: expected a distance in Å, such as 6.0, and at most {MOST_CUTOFF}")
        widths = check_widths("widths", widths)
        if not 1 <= axis_width <= widths[-1]:
            raise UserError(f"axis_width is {axis_width}: expected 1 to {widths[-1]}, the last of widths")
        if precision is not None and str(precision) not in DTYPES:
            raise UserError(f"descriptor precision {precision!r} is not one of {', '.join(DTYPES)}")
        self.cutoff, self.smooth, self.one_side = float(cutoff), float(smooth), one_side
        self.widths, self.dt, self.width, self.axis_width = widths, dt, widths[-1], axis_width
        self.num_features = self.width * axis_width
        self.network_dtype = None if precision is None else DTYPES[str(precision)]
        num_types = len(self.sel)
        self.networks = nn.ModuleList(Curve(widths, dt) for _ in range(num_types if one_side else num_types**2))
        self.mean: Tensor
        self.scale: Tensor
        self.register_buffer("mean", torch.zeros(num_types, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(num_types, 2, dtype=torch.float64))

    def prepare(self, edges: Edges) -> dict[str, Tensor]:
        """What the networks see of the neighbours of each type, and its derivatives with the displacements."""
        found = self._by_type(edges.layout, *self._seen(edges))
        return {key: tensor.to(self._dtype).contiguous() for key, tensor in found.items()}

    def _by_type(self, layout: Layout, seen: Tensor, jacobian: Tensor) -> dict[str, Tensor]:
        empty = layout.for_atoms(-self.mean / self.scale[:, 0]).to(seen.dtype)
        found: dict[str, Tensor] = {}
        for kind, slots in enumerate(layout.of_slots):
            rows, numbers = _rows(seen[:, :, slots], empty, self.sel[kind])
            found |= {f"edge_rows_{kind}": rows, f"edge_numbers_{kind}": numbers}
            found[f"edge_jacobian_{kind}"] = jacobian[:, :, slots]
        return found

    def forward(
        self, atoms: Sequence[int], prepared: Prepared, coarse: torch.dtype | None = None
    ) -> tuple[Tensor, Pull]:
        """The features, and slopes without going back through the networks: they have brought their derivatives."""
        num_frames = prepared["edge_rows_0"].shape[0]
        dtype = self.network_dtype or coarse or self._dtype
        blocks = list(self._blocks(atoms, prepared))
        filtered = [self._filter(block, dtype) for block in blocks]
        moments = self._moments(blocks, [values for values, _ in filtered], num_frames)

        def pull(of_features: Tensor) -> Tensor:
            of_moments = self._of_moments(moments, of_features).view(num_frames, -1, 4, self.width)
            parts: dict[int, list[Tensor]] = {}
            for block, (values, slopes) in zip(blocks, filtered, strict=True):
                across = of_moments[:, block.atoms].reshape(-1, 4, self.width)
                found = _Pulled.apply(values, slopes, across, block.rows, block.jacobian)
                parts.setdefault(block.atoms.start, []).append(found)
            return _joined([torch.cat(group, 1) for group in parts.values()], num_frames)

        return self._squared(moments).view(num_frames, -1, self.num_features), pull

    def features(self, layout: Layout, vectors: Tensor) -> Tensor:
        """The same features in operations that can be differentiated twice: what `forward` is held against."""
        seen = self._normalised(layout, *self._raw(vectors)).to(self._dtype)
        no_jacobian = seen.new_zeros(*seen.shape[:3], 0)
        blocks = list(self._blocks(layout.atoms, self._by_type(layout, seen, no_jacobian)))
        values = [block.network.values(block.numbers.reshape(-1)).view(*block.rows.shape[:2], -1) for block in blocks]
        moments = self._moments(blocks, values, len(vectors))
        return self._squared(moments).view(*vectors.shape[:2], -1)

    @property
    def _dtype(self) -> torch.dtype:
        """Of the weights."""
        network: Any = self.networks[0]
        dtype: torch.dtype = network.layers[0].weight.dtype
        return dtype

    def _raw(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Nearness (…, 1) of neighbours, and their direction times that (…, 3)."""
        distance = lengths(vectors)
        near = fade(distance, self.smooth, self.cutoff).weight / distance
        return near, near / distance * vectors

    def _normalised(self, layout: Layout, near: Tensor, direction: Tensor) -> Tensor:
        mean, scale = self._for_atoms(layout, near.dtype)
        return torch.cat([(near - mean) / scale[..., :1], direction / scale[..., 1:]], -1)

    def _for_atoms(self, layout: Layout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Means (atoms, 1, 1) and scales (atoms, 1, 2) of all places in a frame."""
        both = layout.for_atoms(torch.cat([self.mean.unsqueeze(1), self.scale], 1)).to(dtype).unsqueeze(1)
        return both[..., :1], both[..., 1:]

    @torch.no_grad()
    def _seen(self, edges: Edges) -> tuple[Tensor, Tensor]:
        """What there is to see of every slot (…, 4), and its derivatives with the displacement (…, 3, 4)."""
        vectors = edges.vectors
        distance = lengths(vectors)
        weight, rise = fade(distance, self.smooth, self.cutoff)
        near = weight / distance
        along = near / distance
        _, scale = self._for_atoms(edges.layout, vectors.dtype)
        seen = self._normalised(edges.layout, near, along * vectors)
        unit = vectors / distance
        jacobian = vectors.new_empty(*vectors.shape, 4)
        jacobian[..., 0] = (rise - near) / distance / scale[..., :1] * unit
        steep = (rise - 2 * near) / distance.square() / scale[..., 1:]
        torch.mul((steep * unit).unsqueeze(-1), vectors.unsqueeze(-2), out=jacobian[..., 1:])
        jacobian[..., 1:].diagonal(dim1=-2, dim2=-1).add_(along / scale[..., 1:])
        return seen, jacobian

    def _blocks(self, atoms: Sequence[int], prepared: Prepared) -> Iterator[Block]:
        layout = Layout(tuple(atoms), ())
        groups = [slice(0, sum(atoms))] if self.one_side else layout.of_atoms
        for centre, places in enumerate(groups):
            for kind in range(len(self.sel)) if places.stop > places.start else ():
                parts = (prepared[f"edge_{what}_{kind}"][:, places] for what in ("rows", "numbers", "jacobian"))
                rows, numbers, jacobian = (part.flatten(0, 1) for part in parts)
                yield Block(self.networks[centre * len(self.sel) + kind], places, rows, numbers, jacobian)

    def _filter(self, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Values and slopes of a block's network (frames * atoms, rows, width)."""
        values, slopes = block.network(block.numbers.reshape(-1).to(dtype))
        shape = *block.rows.shape[:2], self.width
        return values.view(shape).to(block.rows.dtype), slopes.view(shape).to(block.rows.dtype)

    def _moments(self, blocks: Sequence[Block], values: Sequence[Tensor], num_frames: int) -> Tensor:
        """The mean over all slots of every atom (frames * atoms, 4, width) of what is seen times its values."""
        of_atoms: dict[int, Tensor] = {}
        for block, own in zip(blocks, values, strict=True):
            first, across = block.atoms.start, block.rows.transpose(1, 2)
            before = of_atoms.get(first)
            of_atoms[first] = torch.bmm(across, own) if before is None else torch.baddbmm(before, across, own)
        return _joined(list(of_atoms.values()), num_frames).flatten(0, 1) / sum(self.sel)

    def _squared(self, moments: Tensor) -> Tensor:
        """What of the moments (n, 4, width) does not change when space is turned: (n, width, axis_width)."""
        return torch.bmm(moments.transpose(1, 2), moments[..., : self.axis_width])

    def _of_moments(self, moments: Tensor, of_features: Tensor) -> Tensor:
        """dE/d moments, over the number of slots, from dE/d features."""
        of_squared = of_features.reshape(-1, self.width, self.axis_width) / sum(self.sel)
        axis = functional.pad(torch.bmm(moments, of_squared), (0, self.width - self.axis_width))
        return torch.baddbmm(axis, moments[..., : self.axis_width], of_squared.transpose(1, 2))

    def sums(self, edges: Edges, is_atom: Tensor) -> Tensor:
        """Number of slots, and the sums of nearness, its square, and the square of directions: (types, 4)."""
        near, direction = self._raw(edges.vectors)
        layout, found = edges.layout, []
        allowed = [slice(slots.start, min(slots.stop, slots.start + most))
                   for slots, most in zip(layout.of_slots, self.sel, strict=True)]  # fmt: skip
        for atoms in layout.of_atoms:
            real = is_atom[:, atoms].double()
            mine = [torch.stack([near[:, atoms, slots].sum((2, 3)), near[:, atoms, slots].square().sum((2, 3)),
                                 direction[:, atoms, slots].square().sum((2, 3))]) for slots in allowed]  # fmt: skip
            totals = (torch.stack(mine).sum(0) * real).sum((1, 2))
            found.append(torch.cat([real.sum().view(1) * sum(self.sel), totals]))
        return torch.stack(found)

    def take_sums(self, total: Tensor) -> None:
        """Mean and spread over all slots, empty ones included; a type without atoms keeps 0 and 1."""
        count, near, square, directions = total.double().unbind(1)
        mean = near / count
        spread = (square / count - mean.square()).clamp_min(0).sqrt()
        scale = torch.stack([spread, (directions / count / 3).sqrt()], 1).clamp_min(LEAST_SCALE)
        is_there = count > 0
        self.mean.copy_(torch.where(is_there, mean, torch.zeros_like(mean)))
        self.scale.copy_(torch.where(is_there.unsqueeze(1), scale, torch.ones_like(scale)))

    def statistics(self) -> dict[str, Any]:
        """What decides statistics besides the frames."""
        return {**super().statistics(), "smooth": self.smooth}


def _rows(seen: Tensor, empty: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """What is seen of the slots of a type, and of all that are not stored together, and the network's numbers."""
    rows = seen[:, :, :most]
    numbers, num_absent = rows[..., 0], most - rows.shape[2]
    if not num_absent:
        return rows, numbers
    nothing = empty.view(1, -1, 1).expand(len(seen), -1, -1)
    together = functional.pad((nothing * num_absent).unsqueeze(-1), (0, 3))
    return torch.cat([rows, together], 2), torch.cat([numbers, nothing], 2)


def _joined(parts: Sequence[Tensor], num_frames: int) -> Tensor:
    """Parts of all frames (frames * atoms, …) side by side, as (frames, atoms, …)."""
    apart = [part.unflatten(0, (num_frames, len(part) // num_frames)) for part in parts]
    return apart[0] if len(apart) == 1 else torch.cat(apart, 1)


class _Pulled(torch.autograd.Function):
    """dE/d displacements of the slots of a block, from dE/d moments, through what its network sees."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, slopes: Tensor, across: Tensor, rows: Tensor, jacobian: Tensor) -> Tensor:
        ctx.save_for_backward(values, slopes, across, rows, jacobian)
        turned = across.transpose(1, 2)
        of_seen = torch.bmm(values, turned)
        of_seen[..., 0].add_((torch.bmm(slopes, turned) * rows).sum(-1))
        num_slots, num_stored = min(rows.shape[1], jacobian.shape[1]), jacobian.shape[1]
        found = (jacobian[:, :num_slots] * of_seen[:, :num_slots].unsqueeze(-2)).sum(-1)
        return functional.pad(found, (0, 0, 0, num_stored - num_slots)) if num_stored > num_slots else found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, slopes, across, rows, jacobian = ctx.saved_tensors
        num_rows, num_slots = rows.shape[1], min(rows.shape[1], jacobian.shape[1])
        of_seen = (jacobian[:, :num_slots] * gradients[0][:, :num_slots].unsqueeze(-1)).sum(-2)
        if num_rows > num_slots:
            of_seen = functional.pad(of_seen, (0, 0, 0, num_rows - num_slots))
        through = of_seen[..., :1] * rows
        of_turned = torch.baddbmm(torch.bmm(values.transpose(1, 2), of_seen), slopes.transpose(1, 2), through)
        return torch.bmm(of_seen, across), torch.bmm(through, across), of_turned.transpose(1, 2), None, None
