"""Frames as a model reads them: atoms sorted by type, each with a table of its neighbours."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoscale.data.columns import BLOCK_BYTES, Column, Rows, row_bytes
from isoscale.errors import UserError
from isoscale.science.atoms.neighbours import Integers
from isoscale.science.potentials.geometry import Layout
from isoscale.science.potentials.neighbours import arranged, as_batch
from isoscale.science.potentials.systems import LABELS, VIRTUAL, System

Frames = dict[str, NDArray[Any]]


class Over(NamedTuple):
    """Atoms with more neighbours than a model has room for, and the worst of them."""

    num_atoms: int
    num_frames: int
    frame: int
    atom: int
    """Its number in the stored frame."""
    type: int
    found: int


class SortedSystem:
    """A system whose atoms are sorted by the types of a model."""

    def __init__(self, system: System, types: Sequence[str]) -> None:
        """`types` are those of the model; every atom must be of one of them."""
        self.system = system
        self.types = list(types)
        self._kinds = system.kinds(types)
        self._fixed = None if "types" in system.columns else self._types(np.zeros(1, np.int64))
        counted = [self._count(kinds) for kinds in self._all_types()]
        self.atoms = tuple(np.max([most for most, _ in counted], axis=0).tolist())
        """Places for atoms of each type."""
        if not all(least for _, least in counted):
            raise UserError(f"{system.name} has a frame without atoms: all of its real_atom_types are {VIRTUAL}")
        self._places = None if self._fixed is None else arranged(self._fixed, self.atoms)

    def __len__(self) -> int:
        """Number of frames."""
        return len(self.system)

    def places(self, rows: Rows) -> Integers:
        """For each place of some frames the stored atom (frames, places), or -1."""
        if self._places is not None:
            return np.broadcast_to(self._places, (len(rows), self._places.shape[1]))
        return arranged(self._types(rows), self.atoms)

    def sort(self, key: str, rows: Rows, places: Integers) -> NDArray[Any]:
        """An array of some frames, with its atoms sorted; those that are not real are 0."""
        stored = self.system.columns[key].take(rows)
        if key in ("box", "energy", "virial"):
            return stored
        if self._places is not None:
            return stored[:, self._places[0]]
        index = np.maximum(places, 0).reshape(*places.shape, *[1] * (stored.ndim - 2))
        found = np.take_along_axis(stored, index, 1)
        found[places < 0] = 0
        return found

    def boxes(self, rows: Rows) -> NDArray[Any]:
        """The boxes of some frames, 0 where nothing is periodic."""
        if self.system.is_periodic:
            return self.system.columns["box"].take(rows)
        return np.zeros((len(rows), 3, 3), self.system.columns["coord"].dtype)

    def each(self, start: int, stop: int) -> Iterator[tuple[NDArray[Any], Integers, Integers, NDArray[Any] | None]]:
        """Frame by frame the real atoms: positions, types, their places, and the box if there is one."""
        kinds = np.repeat(np.arange(len(self.atoms)), self.atoms)
        for rows in _blocks(start, stop, row_bytes(self.system.columns["coord"])):
            places = self.places(rows)
            coord, boxes = self.sort("coord", rows, places), self.boxes(rows)
            for number in range(len(rows)):
                real = np.flatnonzero(places[number] >= 0)
                yield coord[number, real], kinds[real], real, boxes[number] if self.system.is_periodic else None

    def fingerprint(self, cutoff: float) -> str:
        """A hash of all that neighbours depend on: every position, box and type, and the cutoff."""
        digest = hashlib.sha256(repr((float(cutoff), self.atoms, self.system.is_periodic, len(self))).encode())
        # where frames have types of their own, the model's numbers follow from the stored ones
        digest.update((self._kinds if self._fixed is None else self._fixed).tobytes())
        for key in ("coord", "box", "types"):
            if key in self.system.columns:
                column = self.system.columns[key]
                digest.update(f"{key} {column.dtype} {column.row_shape}".encode())
                for rows in _blocks(0, len(self), row_bytes(column)):
                    digest.update(np.ascontiguousarray(column.take(rows)).data)
        return digest.hexdigest()[:32]

    def check(self, start: int, stop: int) -> None:
        """Refuse frames in which a position, box or label is not a finite number, or a box has no volume."""
        for key in ("coord", "box", *LABELS):
            if key in self.system.columns:
                for rows in _blocks(start, stop, row_bytes(self.system.columns[key])):
                    self._check(key, rows)

    def _check(self, key: str, rows: Rows) -> None:
        values = self.system.columns[key].take(rows)
        bad = ~np.isfinite(values.reshape(len(rows), -1)).all(1)
        problem = f"{key} is not a finite number"
        if key == "box" and not bad.any():
            volumes = np.abs(np.linalg.det(values.astype(np.float64)))
            bad = volumes <= 1e-6 * np.linalg.norm(values, axis=2).prod(1)
            problem = "the box has no volume (its three vectors lie in a plane); without periodicity, add a file nopbc"
        if bad.any():
            frame = int(rows[np.flatnonzero(bad)[0]])
            raise UserError(
                f"{self.system.locate(frame)}: {problem} ({self.system.file_of(key, frame)}). "
                f"Repair the file, or leave the frame out"
            )

    def _all_types(self) -> Iterator[Integers]:
        if self._fixed is not None:
            yield self._fixed
            return
        for rows in _blocks(0, len(self), row_bytes(self.system.columns["types"])):
            yield self._types(rows)

    def _count(self, kinds: Integers) -> tuple[Integers, bool]:
        counts = (kinds[:, :, None] == np.arange(len(self.types))).sum(1)
        return counts.max(0), bool((counts.sum(1) > 0).all())

    def _types(self, rows: Rows) -> Integers:
        """The model's types (frames, atoms) of stored atoms; VIRTUAL for what is no atom."""
        stored = self.system.types_of(rows)
        beyond = (stored >= len(self._kinds)) | (stored < VIRTUAL)
        kinds = np.where(stored < 0, VIRTUAL, self._kinds[np.where(beyond, 0, stored)])
        wrong = beyond | ((stored >= 0) & (kinds < 0))
        if wrong.any():
            frame, atom = np.argwhere(wrong)[0]
            where = "real_atom_types.npy" if "types" in self.system.columns else "type.raw"
            place = f"frame {rows[frame]}, atom {atom}" if "types" in self.system.columns else f"atom {atom}"
            raise UserError(self._wrong_type(f"{self.system.name}, {place}", where, int(stored[frame, atom])))
        return kinds

    def _wrong_type(self, place: str, file: str, number: int) -> str:
        names = self.system.type_names
        if names is not None and 0 <= number < len(names):
            return (
                f"{place} is {names[number]}, which the model does not know: its types are {', '.join(self.types)}; "
                f"add {names[number]} to task.model.types, or leave the system out"
            )
        there = "task.model.types (there is no type_map.raw)" if names is None else "type_map.raw"
        count = len(self.types if names is None else names)
        return f"{place} has type {number} in {file}, but {there} has {count} types, 0 to {count - 1}"


def _blocks(start: int, stop: int, bytes_per_row: int) -> Iterator[Rows]:
    size = max(1, BLOCK_BYTES // 4 // max(1, bytes_per_row))
    for first in range(start, stop, size):
        yield np.arange(first, min(stop, first + size))


class StoredTables(NamedTuple):
    """The neighbours of all frames of a system."""

    layout: Layout
    columns: Mapping[str, Column]
    """Neighbours, shifts and reverse, a row per frame."""


class FrameSource:
    """The frames of a system, with their neighbours: what a batch of a potential is made of."""

    on_disk = True
    is_rows = True
    sample_unit = "atoms"

    def __init__(self, frames: SortedSystem, tables: StoredTables) -> None:
        """The system and its tables."""
        self._frames, self._tables = frames, tables
        self.system = frames.system
        self.name, self.names = frames.system.name, [frames.system.name]
        self.labels = frames.system.labels
        self.layout = tables.layout
        self.num_atoms = self.sample_size = frames.system.num_atoms
        self.most_neighbours = list(tables.layout.slots)
        """Of each type of the model, at any atom."""

    def __len__(self) -> int:
        """Number of frames."""
        return len(self._frames)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all frames, as they are fetched."""
        return len(self) * _bytes(self.fetch(torch.zeros(1, dtype=torch.int64)))

    def fetch(self, indices: Tensor) -> dict[str, Tensor]:
        """The frames at `indices`, in the order asked."""
        return as_batch(self.frames(indices.numpy()), self.layout)

    def frames(self, rows: Rows) -> Frames:
        """The arrays of some frames, neighbours of all types side by side."""
        places = self._frames.places(rows)
        found = {key: self._frames.sort(key, rows, places) for key in ("coord", *sorted(self.labels))}
        tables = {key: column.take(rows) for key, column in self._tables.columns.items()}
        return {**found, "box": self._frames.boxes(rows), **tables, "places": places}

    def locate(self, index: int) -> str:
        """Where a frame is, for people."""
        return self.system.locate(index)

    def count_over(self, sel: Sequence[int]) -> Over | None:
        """Atoms with more neighbours of some type than `sel` has room for; None if there are none."""
        if all(most <= room for most, room in zip(self.most_neighbours, sel, strict=True)):
            return None
        num_atoms = num_frames = 0
        worst, excess = Over(0, 0, 0, 0, 0, 0), 0
        column = self._tables.columns["neighbours"]
        for rows in _blocks(0, len(self), row_bytes(column)):
            table = column.take(rows) >= 0
            counts = np.stack([table[:, :, slots].sum(2) for slots in self.layout.of_slots], 2)
            more = counts - np.asarray(sel)
            num_atoms += int((more > 0).any(2).sum())
            num_frames += int((more > 0).any((1, 2)).sum())
            frame, place, kind = np.unravel_index(int(more.argmax()), more.shape)
            if more[frame, place, kind] > excess:
                excess, row = int(more[frame, place, kind]), rows[frame : frame + 1]
                atom = int(self._frames.places(row)[0, place])
                worst = Over(0, 0, int(row[0]), atom, int(kind), int(counts[frame, place, kind]))
        return worst._replace(num_atoms=num_atoms, num_frames=num_frames)


class MixedFrames:
    """Frames of several systems that may stand in one batch: each has places for the most atoms of any of them."""

    on_disk = True
    is_rows = True
    sample_unit = "atoms"

    def __init__(self, sources: Sequence[FrameSource]) -> None:
        """Frames are numbered one source after the other; a label that only some have comes with `has_<label>`."""
        self.sources = list(sources)
        layouts = [source.layout for source in sources]
        self.layout = Layout(_most([each.atoms for each in layouts]), _most([each.slots for each in layouts]))
        self.names = [source.name for source in sources]
        self.name = self.names[0] if len(sources) == 1 else f"{self.names[0]} and {len(sources) - 1} more"
        self.labels = frozenset[str]().union(*(source.labels for source in sources))
        self.num_atoms = self.sample_size = max(source.num_atoms for source in sources)
        self.most_neighbours = list(self.layout.slots)
        self._partial = sorted(label for label in self.labels if any(label not in each.labels for each in sources))
        self._starts = np.cumsum([0, *map(len, sources)])
        self._types = _common_types([source.frames(np.zeros(1, np.int64)) for source in sources])

    def __len__(self) -> int:
        """Number of frames of all systems."""
        return int(self._starts[-1])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all frames, as they are fetched."""
        return len(self) * _bytes(self.fetch(torch.zeros(1, dtype=torch.int64)))

    def fetch(self, indices: Tensor) -> dict[str, Tensor]:
        """The frames at `indices`, in the order asked."""
        rows = indices.numpy()
        found = self._empty(len(rows))
        which = np.searchsorted(self._starts, rows, "right") - 1
        for number in np.unique(which):
            mine = np.flatnonzero(which == number)
            self._place(found, mine, self.sources[number], rows[mine] - self._starts[number])
        return as_batch(found, self.layout)

    def locate(self, index: int) -> str:
        """Where a frame is, for people."""
        number, frame = self._whose(index)
        return self.sources[number].locate(frame)

    def count_over(self, sel: Sequence[int]) -> Over | None:
        """Atoms with more neighbours of some type than `sel` has room for; None if there are none."""
        found = [(start, over) for start, source in zip(self._starts, self.sources, strict=False)
                 if (over := source.count_over(sel)) is not None]  # fmt: skip
        if not found:
            return None
        start, worst = max(found, key=lambda each: each[1].found - sel[each[1].type])
        counts = [sum(over[place] for _, over in found) for place in (0, 1)]
        return worst._replace(num_atoms=counts[0], num_frames=counts[1], frame=int(start) + worst.frame)

    def _whose(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._starts, index, "right")) - 1
        return number, index - int(self._starts[number])

    def _empty(self, count: int) -> Frames:
        """Layout for frames without atoms."""
        num_atoms, num_slots = sum(self.layout.atoms), sum(self.layout.slots)
        shapes = {"coord": (num_atoms, 3), "box": (3, 3), "energy": (), "force": (num_atoms, 3), "virial": (3, 3),
                  "atom_energy": (num_atoms,), "shifts": (num_atoms, num_slots, 3)}  # fmt: skip
        found = {key: np.zeros((count, *shapes[key]), dtype) for key, dtype in self._types.items()}
        found |= {f"has_{label}": np.zeros(count, np.uint8) for label in self._partial}
        found["places"] = np.full((count, num_atoms), -1, np.int64)
        found["neighbours"] = np.full((count, num_atoms, num_slots), -1, np.int32)
        itself = np.arange(num_atoms * num_slots, dtype=np.int32).reshape(num_atoms, num_slots)
        found["reverse"] = np.tile(itself, (count, 1, 1))
        return found

    def _place(self, found: Frames, mine: Rows, source: FrameSource, rows: Rows) -> None:
        """Write frames of a source into theirs, each atom and slot at its place in the larger layout."""
        frames, width = source.frames(rows), max(1, sum(source.layout.slots))
        atoms = _moved(source.layout.atoms, self.layout.atoms)
        slots = _moved(source.layout.slots, self.layout.slots)
        frame, atom = np.ix_(mine, atoms)
        edges = np.ix_(mine, atoms, slots)
        for key in ("coord", "force", "atom_energy", "places"):
            if key in frames:
                found[key][frame, atom] = frames[key]
        for key in ("box", "energy", "virial"):
            if key in frames:
                found[key][mine] = frames[key]
        for label in self._partial:
            found[f"has_{label}"][mine] = label in source.labels
        neighbours, reverse = frames["neighbours"], frames["reverse"]
        found["neighbours"][edges] = np.where(neighbours >= 0, atoms[np.maximum(neighbours, 0)], -1)
        found["shifts"][edges] = frames["shifts"]
        found["reverse"][edges] = atoms[reverse // width] * sum(self.layout.slots) + slots[reverse % width]


def _bytes(batch: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in batch.values())


def _most(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(max, zip(*counts, strict=True)))


def _common_types(frames: Sequence[Frames]) -> dict[str, np.dtype[Any]]:
    """A type for each array of numbers that holds those of all systems."""
    keys = {key for each in frames for key in each} - {"places", "neighbours", "reverse"}
    return {key: np.result_type(*(each[key].dtype for each in frames if key in each)) for key in sorted(keys)}


def _moved(small: Sequence[int], large: Sequence[int]) -> Integers:
    """For each place of a layout, its place in another that has at least as many of each type."""
    starts = np.cumsum(large) - np.asarray(large)
    return np.concatenate([start + np.arange(count) for start, count in zip(starts, small, strict=True)]).astype(int)
