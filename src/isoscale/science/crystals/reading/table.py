"""Many structures in a few arrays: atoms of one structure after those of the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isoscale.errors import UserError
from isoscale.science.crystals.reading.structure import Structure

Per = Literal["structure", "atom"]


class Target(NamedTuple):
    """One target of all structures; zeros where `has` says that a structure has none."""

    values: NDArray[Any]  # (structures, …) or (atoms, …), float64 or int64
    per: Per
    has: NDArray[np.bool_]  # (structures,)


@dataclass(frozen=True)
class StructureTable:
    """Structures of any sizes, held ragged."""

    counts: NDArray[np.int64]  # (N,), atoms of each structure
    numbers: NDArray[np.int64]  # (ΣN,)
    positions: NDArray[np.float64]  # (ΣN, 3)
    cells: NDArray[np.float64]  # (N, 3, 3)
    pbc: NDArray[np.bool_]  # (N, 3)
    targets: dict[str, Target]
    places: Callable[[int], str]
    """Where a structure is, for people."""
    names: Sequence[str] = ()
    """What each structure belongs to, for errors by system; empty where nothing says so."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Values in the files that make no target, and why."""

    @classmethod
    def of(cls, structures: Sequence[Structure]) -> "StructureTable":
        """All structures of a list, in its order."""
        if not structures:
            raise UserError("there are no structures: at least one is needed")
        names = dict.fromkeys(name for structure in structures for name in structure.targets)
        targets, left_out = {}, {}
        for name in names:
            joined = _joined(name, structures)
            if isinstance(joined, str):
                left_out[name] = joined
            else:
                targets[name] = joined
        systems = [structure.name for structure in structures]
        return cls(
            counts=np.array([len(structure) for structure in structures], np.int64),
            numbers=np.concatenate([structure.numbers for structure in structures]).astype(np.int64, copy=False),
            positions=np.concatenate([structure.positions for structure in structures]).astype(np.float64, copy=False),
            cells=np.stack([structure.cell for structure in structures]).astype(np.float64, copy=False),
            pbc=np.stack([structure.pbc for structure in structures]).astype(np.bool_, copy=False),
            targets=targets,
            places=[structure.place for structure in structures].__getitem__,
            names=systems if any(systems) else (),
            left_out=left_out,
        )

    def __len__(self) -> int:
        """Number of structures."""
        return len(self.counts)

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first atom of each structure, and the end of the last one: (N + 1,)."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @property
    def num_atoms(self) -> int:
        """Atoms of all structures."""
        return len(self.numbers)

    @property
    def structure_of(self) -> NDArray[np.int64]:
        """The structure of each atom."""
        return np.repeat(np.arange(len(self)), self.counts)

    @property
    def elements(self) -> NDArray[np.int64]:
        """The atomic numbers that occur, sorted."""
        return np.unique(self.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [self.counts, self.numbers, self.positions, self.cells, self.pbc]
        return sum(array.nbytes for array in [*arrays, *(target.values for target in self.targets.values())])

    def subset(self, indices: ArrayLike) -> "StructureTable":
        """Some structures, in the order of `indices`."""
        rows = np.asarray(indices, np.int64).reshape(-1)
        counts, places = self.counts[rows], self.places
        atoms = _ranges(self.starts[rows], counts)
        targets = {
            name: Target(target.values[rows if target.per == "structure" else atoms], target.per, target.has[rows])
            for name, target in self.targets.items()
        }
        return StructureTable(
            counts, self.numbers[atoms], self.positions[atoms], self.cells[rows], self.pbc[rows], targets,
            places=lambda index: places(int(rows[index])),
            names=[self.names[row] for row in rows.tolist()] if self.names else (),
            left_out=self.left_out,
        )  # fmt: skip

    def structure(self, index: int) -> Structure:
        """One structure, with the targets that it has."""
        start = int(self.counts[:index].sum())
        atoms = slice(start, start + int(self.counts[index]))
        targets = {
            name: target.values[index] if target.per == "structure" else target.values[atoms]
            for name, target in self.targets.items()
            if target.has[index]
        }
        return Structure(
            self.numbers[atoms], self.positions[atoms], self.cells[index], self.pbc[index],
            {name: np.asarray(values) for name, values in targets.items()}, self.places(index),
            self.names[index] if self.names else "",
            frozenset(name for name, target in self.targets.items() if target.per == "atom"),
        )  # fmt: skip

    def __iter__(self) -> Iterator[Structure]:
        """Each structure."""
        return (self.structure(index) for index in range(len(self)))


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """`starts[i], …, starts[i] + counts[i] - 1` of all i."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _joined(name: str, structures: Sequence[Structure]) -> Target | str:
    """A target of all structures, or why it is none."""
    has = np.array([name in structure.targets for structure in structures], np.bool_)
    first = next(structure for structure in structures if name in structure.targets)
    per_atom = all(each.is_per_atom(name) for each in structures if name in each.targets)
    given = np.asarray(first.targets[name])
    shape = given.shape[1:] if per_atom else given.shape
    is_whole = True
    for structure in structures:
        if name not in structure.targets:
            continue
        values = np.asarray(structure.targets[name])
        expected = (len(structure), *shape) if per_atom else shape
        if values.shape != expected:
            return f"its shape is {_words(given)} in {first.place}, but {_words(values)} in {structure.place}"
        is_whole = is_whole and values.dtype.kind in "biu"
    dtype = np.int64 if is_whole else np.float64
    parts = [
        np.asarray(each.targets[name], dtype) if name in each.targets
        else np.zeros((len(each), *shape) if per_atom else shape, dtype)
        for each in structures
    ]  # fmt: skip
    values = np.concatenate(parts) if per_atom else np.stack(parts)
    return Target(values, "atom" if per_atom else "structure", has)


def _words(values: NDArray[Any]) -> str:
    return f"({', '.join(map(str, values.shape))})" if values.shape else "one number"
