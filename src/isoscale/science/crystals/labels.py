"""The labels of all structures of a source together, and what can be measured of them before anything is learned."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from isoscale.data.sources import Source, Subset, locate
from isoscale.science.crystals.targets import INPUTS, NUM_ELEMENTS, Learned

BLOCK = 4096
"""Structures that are looked at together."""


@dataclass(frozen=True)
class Labels:
    """The labels of all structures of a source, without their graphs where these need not be read."""

    source: Source

    @cached_property
    def _ragged(self) -> tuple[Any, NDArray[np.int64] | None]:
        """The ragged source below, and which of its samples; where there is one."""
        source: Any = self.source
        indices: NDArray[np.int64] | None = None
        while isinstance(source, Subset):
            own = source.indices.cpu().numpy()
            indices = own if indices is None else own[indices]
            source = source.source
        return source, indices

    def __len__(self) -> int:
        """Number of structures."""
        return len(self.source)

    @cached_property
    def _first(self) -> dict[str, Any]:
        return dict(self.source.fetch(torch.tensor([0])))

    @cached_property
    def names(self) -> list[str]:
        """Targets that there are."""
        return [name for name in self._first if name not in INPUTS and not name.startswith("has_")]

    def __contains__(self, name: str) -> bool:
        """Whether any structure has a target."""
        return name in self.names and bool(self.has(name).any())

    def per_atom(self, name: str) -> bool:
        """Whether a target has one row for each atom, and not one for each structure."""
        rows = getattr(self._ragged[0], "rows", None)
        return name not in rows if rows is not None else name not in ("energy", "stress") and self._looks_per_atom(name)

    def _looks_per_atom(self, name: str) -> bool:
        counts = self.counts
        largest = int(counts.argmax())
        found = self.source.fetch(torch.tensor([largest]))
        return len(found[name]) == len(found["z"]) and (len(found["z"]) > 1 or name == "forces")

    def dtype(self, name: str) -> torch.dtype:
        """Of a target as it is stored."""
        found: torch.dtype = self._first[name].dtype
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one value."""
        return tuple(self._first[name].shape[1:])

    def column(self, name: str) -> NDArray[Any]:
        """All rows of an entry."""
        source, indices = self._ragged
        if not hasattr(source, "rows"):
            return np.concatenate([block[name].cpu().numpy() for block in self._blocks])
        values = source.column(name)
        values = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        if indices is None:
            return values
        return values[indices] if name in source.rows else values[self._atoms]

    @cached_property
    def _blocks(self) -> list[dict[str, Any]]:
        wanted = ("z", "batch", "cell", *self.names, *(f"has_{name}" for name in self.names))
        found = []
        for block in torch.arange(len(self.source)).split(BLOCK):
            batch = self.source.fetch(block)
            found.append({name: batch[name] for name in wanted if name in batch})
        return found

    @cached_property
    def _atoms(self) -> NDArray[np.int64]:
        """The places of this part's atoms in the ragged source."""
        source, indices = self._ragged
        counts = source.sizes[:, 0]
        starts, own = np.cumsum(counts) - counts, counts[indices]
        before = np.cumsum(own) - own
        return np.asarray(np.repeat(starts[indices] - before, own) + np.arange(int(own.sum())))

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Atoms of each structure."""
        source, indices = self._ragged
        if hasattr(source, "sizes"):
            sizes = np.asarray(source.sizes)[:, 0]
            return sizes if indices is None else sizes[indices]
        found = [np.bincount(block["batch"].cpu().numpy(), minlength=len(block["cell"])) for block in self._blocks]
        return np.concatenate(found)

    @cached_property
    def _owner(self) -> NDArray[np.int64]:
        """The structure of each atom."""
        return np.repeat(np.arange(len(self)), self.counts)

    @cached_property
    def elements(self) -> list[int]:
        """The atomic numbers that occur."""
        return [int(number) for number in np.flatnonzero(np.bincount(self.column("z")))]

    def with_elements(self, numbers: Sequence[int]) -> list[int]:
        """The structures that hold any of some elements."""
        is_one = np.isin(self.column("z"), np.asarray(numbers))
        return [int(structure) for structure in np.unique(self._owner[is_one])]

    def has(self, name: str) -> NDArray[np.bool_]:
        """Which structures have a target."""
        if name not in self.names:
            return np.zeros(len(self), bool)
        return self.column(f"has_{name}") != 0 if f"has_{name}" in self._first else np.ones(len(self), bool)

    def rows(self, target: Learned) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """The labelled values (rows, …) of a target, and the structure of each row."""
        has = self.has(target.name)
        if not has.any():
            return np.zeros((0, *target.shape)), np.zeros(0, np.int64)
        rows = self._owner if target.of == "atom" else np.arange(len(self))
        chosen = has[rows]
        return self.column(target.name)[chosen].astype(np.float64), rows[chosen]

    def share(self, target: Learned) -> float:
        """Labelled rows per structure."""
        has = self.has(target.name)
        return float((self.counts[has] if target.of == "atom" and target.average == "atoms" else has).sum() / len(self))

    def references(self, target: Learned) -> NDArray[np.float64]:
        """Energies of an atom of each element that explain most of the energies per atom: the smallest ones that do."""
        energies, structures = self.rows(target)
        found, numbers = np.zeros(NUM_ELEMENTS), self.elements
        triangle = np.zeros((0, len(numbers) + 1))
        for shares, start in self._compositions(structures, numbers):
            values = energies[start : start + len(shares)] / self.counts[structures[start : start + len(shares)]]
            triangle = np.asarray(np.linalg.qr(np.vstack([triangle, np.column_stack([shares, values])]), mode="r"))
        if len(energies):
            found[numbers] = np.linalg.lstsq(triangle[:, :-1], triangle[:, -1], rcond=None)[0]
        return found

    def _compositions(
        self, structures: NDArray[np.int64], numbers: Sequence[int]
    ) -> Iterator[tuple[NDArray[np.float64], int]]:
        """Shares of elements (structures, elements) in some structures, block by block, and where each begins."""
        z, ends = self.column("z"), np.cumsum(self.counts)
        place = np.full(NUM_ELEMENTS, -1)
        place[list(numbers)] = np.arange(len(numbers))
        for start in range(0, len(structures), BLOCK):
            block = structures[start : start + BLOCK]
            low, high = block[0], block[-1] + 1
            first = ends[low] - self.counts[low]
            own = place[z[first : ends[high - 1]]]
            rows = np.repeat(np.arange(high - low), self.counts[low:high])
            counts = np.bincount(rows * len(numbers) + own, minlength=(high - low) * len(numbers))
            shares = counts.reshape(high - low, len(numbers)) / self.counts[low:high, None]
            yield shares[block - low], start

    def means(self, target: Learned) -> NDArray[np.float64]:
        """The mean of one value; of atoms, for each element."""
        values = self.rows(target)[0]
        if target.of == "structure":
            return values.mean(0) if len(values) else np.zeros(target.shape)
        found = np.zeros((NUM_ELEMENTS, *target.shape))
        z = self.column("z")[self.has(target.name)[self._owner]]
        for number in np.unique(z):
            found[number] = values[z == number].mean(0)
        return found

    def rms(self, target: Learned, mean: NDArray[np.float64] | None = None) -> float:
        """The root of the mean square of values, less their mean; of energies, per atom."""
        values, structures = self.rows(target)
        if not len(values):
            return 0.0
        if target.kind == "energy" and mean is not None:
            expected = np.bincount(self._owner, mean[self.column("z")], minlength=len(self))
            values = (values - expected[structures]) / self.counts[structures]
        elif target.kind == "value" and mean is not None:
            own = self.has(target.name)[self._owner] if target.of == "atom" else None
            values = values - (mean if own is None else mean[self.column("z")[own]])
        return float(np.sqrt(np.mean(np.square(values))))

    def not_finite(self, targets: Sequence[Learned]) -> str:
        """Where a target is not a number, in words."""
        for target in targets:
            values, structures = self.rows(target)
            bad = structures[~np.isfinite(values.reshape(len(values), -1)).all(1)]
            if len(bad):
                where = locate(self.source, int(bad[0]))
                return f"{where}: {target.name} is not a finite number; correct or remove the structure"
        return f"{targets[0].name} of the training data are too large to add up: are the units right?"
