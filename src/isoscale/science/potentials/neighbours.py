"""Who is near whom: all neighbours of every atom within a cutoff, in tables whose shape a step can be captured with."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoscale.science.atoms.neighbours import Floats, Integers, find_once
from isoscale.science.potentials.geometry import Layout

ROOM = 1.1
"""How many more neighbours a suggested `sel` has room for than were found."""


class Pairs(NamedTuple):
    """Every pair of neighbours of a frame, both ways, sorted by centre, by the neighbour's type and by distance."""

    centres: Integers
    neighbours: Integers
    shifts: NDArray[np.int32]
    """(pairs, 3): displacement = positions[neighbour] + shifts @ box - positions[centre]."""
    distances: Floats
    back: Integers
    """The place of the same pair seen from the other end."""

    def counts(self, types: Integers, num_types: int) -> Integers:
        """Neighbours of each type (atoms, types) that every atom has."""
        keys = self.centres * num_types + types[self.neighbours]
        return np.bincount(keys, minlength=len(types) * num_types).reshape(len(types), num_types)


class Tables(NamedTuple):
    """The neighbours of a frame."""

    neighbours: NDArray[np.int32]
    """(atoms, slots): place of the neighbour, -1 for an empty slot."""
    shifts: NDArray[np.signedinteger[Any]]
    """(atoms, slots, 3): in which image of the box it is."""
    reverse: NDArray[np.int32]
    """(atoms, slots): the place of the edge back among all atoms × slots; an empty slot is its own."""


def find_pairs(positions: Floats, types: Integers, box: Floats | None, cutoff: float) -> Pairs:
    """All pairs within the cutoff, of periodic images too; without a box nothing is periodic.

    Pairs of equal distance are sorted by the neighbour's number, then by its image.
    """
    half = find_once(positions, box, cutoff)
    count = len(half.first)
    centres, neighbours = np.concatenate([half.first, half.second]), np.concatenate([half.second, half.first])
    shifts, distances = np.concatenate([half.shifts, -half.shifts]), np.concatenate([half.distances] * 2)
    order = _sorted(centres * (int(types.max()) + 1) + types[neighbours], distances, neighbours, shifts)
    places = np.empty(2 * count, np.int64)
    places[order] = np.arange(2 * count)
    back = places[(order + count) % max(1, 2 * count)]
    return Pairs(centres[order], neighbours[order], shifts[order], distances[order], back)


def _sorted(keys: Integers, distances: Floats, neighbours: Integers, shifts: NDArray[np.int32]) -> Integers:
    """The order by key and distance; only where some are equal there, the slower one by all."""
    near_first = np.argsort(distances)
    by_distance = keys[near_first]
    small = by_distance.astype(np.uint16) if len(keys) and by_distance.max() < 1 << 16 else by_distance
    order = near_first[np.argsort(small, kind="stable")]  # for 16 bits a radix sort
    same = (np.diff(keys[order]) == 0) & (np.diff(distances[order]) == 0)
    if same.any():
        order = np.lexsort((shifts[:, 2], shifts[:, 1], shifts[:, 0], neighbours, distances, keys))
    return order


def fill_tables(pairs: Pairs, types: Integers, places: Integers, layout: Layout, shift_type: Any = np.int8) -> Tables:
    """The pairs of atoms at `places` of a layout, as tables."""
    slots, shape = np.asarray(layout.slots), (sum(layout.atoms), sum(layout.slots))
    size = math.prod(shape)
    kinds = types[pairs.neighbours]
    counts = pairs.counts(types, len(slots)).reshape(-1)
    before = np.cumsum(counts) - counts
    nth = np.arange(len(kinds)) - before[pairs.centres * len(slots) + kinds]
    flat = places[pairs.centres] * shape[1] + (np.cumsum(slots) - slots)[kinds] + nth
    neighbours, shifts = np.full(size, -1, np.int32), np.zeros((size, 3), shift_type)
    reverse = np.arange(size, dtype=np.int32)
    neighbours[flat], shifts[flat], reverse[flat] = places[pairs.neighbours], pairs.shifts, flat[pairs.back]
    return Tables(neighbours.reshape(shape), shifts.reshape(*shape, 3), reverse.reshape(shape))


def arranged(types: Integers, atoms: Sequence[int]) -> Integers:
    """For each place of frames that have `atoms` places of each type, the stored atom (frames, places); -1 for none.

    `types` (frames, atoms) are those of stored atoms, negative for virtual ones; atoms of one type keep their order.
    """
    num_types = len(atoms)
    kinds = np.where(types < 0, num_types, types)
    order = np.argsort(kinds, axis=1, kind="stable")
    kinds = np.take_along_axis(kinds, order, 1)
    counts = (kinds[:, :, None] == np.arange(num_types)).sum(1)
    before = np.pad(np.cumsum(counts, 1), ((0, 0), (1, 0)))
    nth = np.arange(types.shape[1]) - np.take_along_axis(before, kinds, 1)
    frames, real = np.nonzero(kinds < num_types)
    starts = np.cumsum(atoms) - np.asarray(atoms)
    places = np.full((len(types), sum(atoms)), -1, np.int64)
    places[frames, starts[kinds[frames, real]] + nth[frames, real]] = order[frames, real]
    return places


def as_batch(frames: dict[str, NDArray[Any]], layout: Layout) -> dict[str, Tensor]:
    """Frames as a step takes them: neighbours apart by type, and which atoms are real."""
    batch = {key: np.ascontiguousarray(values) for key, values in frames.items() if key != "neighbours"}
    batch["places"] = frames["places"].astype(np.int32)
    for kind, (of_atoms, of_slots) in enumerate(zip(layout.of_atoms, layout.of_slots, strict=True)):
        if layout.atoms[kind]:
            batch[f"atoms_{kind}"] = (frames["places"][:, of_atoms] >= 0).astype(np.uint8)
        if layout.slots[kind]:
            batch[f"neighbours_{kind}"] = np.ascontiguousarray(frames["neighbours"][:, :, of_slots])
    return {key: torch.from_numpy(values) for key, values in batch.items()}


def suggested_sel(most: Sequence[int]) -> list[int]:
    """A `sel` for the most neighbours that were found: a tenth more, rounded up to a multiple of four."""
    return [4 * -(-round(ROOM * count * 1000) // 4000) for count in most]
