"""What a descriptor is: from the neighbours of each atom to features that stay the same when space is turned."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isoscale.science.potentials.geometry import Edges, Layout

Pull = Callable[[Tensor], Tensor]
"""From dE/d features (frames, atoms, features) to dE/d displacement (frames, atoms, slots, 3)."""
Prepared = Mapping[str, Tensor]
"""What a descriptor makes of displacements, which are data: it stays the same all along a training."""


class Descriptor(nn.Module):
    """Features of every atom, and how displacements change them.

    A new one says its `cutoff`, `sel` and `num_features`, and defines `features`, and `sums` and `take_sums` where it
    measures statistics. It gets its slopes by differentiation; one that knows a faster way overrides `prepare` and
    `forward`.
    """

    cutoff: float
    sel: list[int]
    """The most neighbours of each type that an atom may have."""
    num_features: int

    def features(self, layout: Layout, vectors: Tensor) -> Tensor:
        """Features (frames, atoms, num_features), differentiable with displacements (frames, atoms, slots, 3)."""
        raise NotImplementedError

    def prepare(self, edges: Edges) -> dict[str, Tensor]:
        """What `forward` wants to know of edges, one row per frame; names that begin with `edge_` are its own."""
        return {f"edge_{t}": edges.vectors[:, :, slots] for t, slots in enumerate(edges.layout.of_slots)}

    def forward(
        self, atoms: Sequence[int], prepared: Prepared, coarse: torch.dtype | None = None
    ) -> tuple[Tensor, Pull]:
        """The features, and how to get from slopes with these to slopes with displacements.

        `atoms` are the places of each type in a frame, and `coarse` is what mixed precision would have large products
        computed in; whoever cannot use it leaves it.
        """
        is_training = torch.is_grad_enabled()
        parts = [prepared[f"edge_{t}"] for t in range(len(self.sel))]
        layout = Layout(tuple(atoms), tuple(part.shape[2] for part in parts))
        vectors = torch.cat(parts, 2).detach().requires_grad_()
        with torch.enable_grad():
            features = self.features(layout, vectors)

        def pull(of_features: Tensor) -> Tensor:
            with torch.enable_grad():
                (found,) = torch.autograd.grad(features, vectors, of_features, create_graph=is_training)
            return found

        return features if is_training else features.detach(), pull

    def sums(self, edges: Edges, is_atom: Tensor) -> Tensor:
        """What statistics are made of, of some frames (types, …), in float64; sums of several frames are added."""
        raise NotImplementedError

    def take_sums(self, total: Tensor) -> None:
        """Set statistics from the sums over all frames that are looked at."""
        raise NotImplementedError

    def statistics(self) -> dict[str, Any]:
        """What decides statistics besides the frames, by name."""
        return {"cutoff": self.cutoff, "sel": self.sel}
