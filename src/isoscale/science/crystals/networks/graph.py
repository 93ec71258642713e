"""Graphs of atoms as networks see them: vectors from atoms to their neighbours, and how to add up over them."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isoscale.science.crystals import sums
from isoscale.science.crystals.sums import Side


class Graph(NamedTuple):
    """Atoms and edges of a packed batch, made once per step: A atoms, E edges, B structures."""

    z: Tensor
    """(A,) atomic numbers, 0 where there is padding."""
    vectors: Tensor
    """(E, 3) Å, from the target to the source; a constant as long as the cutoff where there is padding."""
    lengths: Tensor
    """(E,) Å."""
    edge_source: Tensor
    edge_target: Tensor
    """(E,) messages go from sources to targets; sorted by targets."""
    by_source: Tensor
    """(E,) the permutation that sorts edges by sources."""
    source: Side
    """Atoms where edges begin: `sums.gather(features, graph.source)`."""
    target: Side
    """Atoms where edges end: `sums.total(messages, graph.target)`."""
    batch: Tensor
    """(A,) the structure of each atom, sorted; B where there is padding."""
    structures: Side
    """Structures of atoms, and a row more for padding."""
    num_structures: int

    pos: Tensor | None = None
    """(A, 3) Å, where the network asked for it with `by_positions`; `vectors` follow from it."""
    shifts: Tensor | None = None
    """(E, 3) Å, how far the source of an edge is from its place in the cell; with `pos`."""

    @classmethod
    def of(
        cls, batch: Mapping[str, Tensor], cutoff: float, dtype: torch.dtype | None = None, by_positions: bool = False
    ) -> "Graph":
        """Of a batch: vectors are computed in float64, then cast.

        vector = pos[source] + shift @ cell - pos[target]; padding has a constant instead, as long as the cutoff.
        """
        num_atoms, num_structures = len(batch["z"]), len(batch["cell"])
        source = Side.of_order(batch["edge_source"], batch["by_source"], num_atoms)
        target = Side.of_sorted(batch["edge_target"], num_atoms)
        structures = Side.of_sorted(batch["batch"], num_structures + 1)
        pos = batch["pos"]
        cells = nn.functional.pad(batch["cell"].to(pos.dtype), (0, 0, 0, 0, 0, 1))  # and none for padding
        cells = sums.gather(sums.gather(cells, structures), target)
        shifts = (batch["edge_shift"].to(pos.dtype).unsqueeze(1) @ cells).squeeze(1)
        vectors = sums.gather(pos, source) - sums.gather(pos, target) + shifts
        is_real = batch["batch"].index_select(0, target.row) < num_structures
        vectors = torch.where(is_real.unsqueeze(1), vectors, nn.functional.pad(pos.new_full((1, 1), cutoff), (0, 2)))
        dtype = vectors.dtype if dtype is None else dtype
        vectors = vectors.to(dtype)
        return cls(
            batch["z"], vectors, _lengths(vectors), batch["edge_source"], batch["edge_target"], batch["by_source"],
            source, target, batch["batch"], structures, num_structures,
            pos.to(dtype) if by_positions else None, shifts.to(dtype) if by_positions else None,
        )  # fmt: skip

    @property
    def num_atoms(self) -> int:
        """With padding."""
        return len(self.z)

    @property
    def offsets(self) -> Tensor:
        """(A + 1,) where the edges of each target begin."""
        return self.target.offsets

    def with_vectors(self, vectors: Tensor) -> "Graph":
        """The same graph, stretched: with other vectors, and their lengths."""
        return self._replace(vectors=vectors, lengths=_lengths(vectors))

    def per_structure(self, values: Tensor) -> Tensor:
        """Sums over the atoms of each structure: (A, …) to (B, …)."""
        return sums.of_structures(values, self.structures, self.num_structures)

    def num_atoms_of(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """(B,) atoms in each structure."""
        return self.structures.offsets.diff()[: self.num_structures].to(dtype)

    def forces(self, slopes: Tensor) -> Tensor:
        """-dE/dpos (A, 3) from dE/dvectors (E, 3)."""
        return sums.total(slopes, self.target) - sums.total(slopes, self.source)

    def virials(self, slopes: Tensor) -> Tensor:
        """dE/dstrain (B, 3, 3) from dE/dvectors, symmetric: all vectors are stretched by 1 + strain."""
        products = self.vectors.detach().unsqueeze(2) * slopes.unsqueeze(1)
        found = self.per_structure(sums.total(products, self.target))
        return (found + found.mT) / 2


def _lengths(vectors: Tensor) -> Tensor:
    return vectors.square().sum(1).sqrt()
