"""Neighbours of atoms within a cutoff, through periodic images: every pair once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isoscale.errors import UserError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Once(NamedTuple):
    """Every pair of neighbours of a frame, once."""

    first: Integers
    second: Integers
    shifts: NDArray[np.int32]
    """(pairs, 3): displacement = positions[second] + shifts @ box - positions[first]."""
    distances: Floats

    def counts(self, types: Integers, num_types: int) -> Integers:
        """Neighbours of each type (atoms, types) that every atom has."""
        there, back = self.first * num_types + types[self.second], self.second * num_types + types[self.first]
        keys = np.concatenate([there, back])
        return np.bincount(keys, minlength=len(types) * num_types).reshape(len(types), num_types)


def find_once(
    positions: Floats,
    box: Floats | None,
    cutoff: float,
    periodic: Sequence[bool] | NDArray[np.bool_] = (True, True, True),
    num_threads: int | None = None,
) -> Once:
    """Each pair once: the way back is then known, and not a matter of rounding; without a box nothing is periodic."""
    if num_threads is None:
        import torch  # processes that look for neighbours of one structure after the other do without

        num_threads = torch.get_num_threads()
    search = load_vesin().NeighborList(cutoff=cutoff, full_list=False, n_threads=num_threads)
    ends, shifts, distances = search.compute(
        points=np.asarray(positions, np.float64),
        box=np.zeros((3, 3)) if box is None else np.asarray(box, np.float64),
        periodic=False if box is None else np.asarray(periodic, np.bool_),
        quantities="PSd",
    )
    first, second = ends.astype(np.int64).T
    return Once(first, second, shifts, distances)


def load_vesin() -> Any:
    """The library that finds neighbours, or what to install."""
    try:
        import vesin
    except ImportError as error:
        raise UserError(
            f"neighbours are found by vesin: pip install 'isoscale[potentials]' or 'isoscale[crystals]' ({error})"
        ) from None
    return vesin


def shift_type(largest: int) -> np.dtype[Any]:
    """The smallest type for shifts: atoms that were never brought back into their box may be many boxes away."""
    kinds = (np.int8, np.int16, np.int32)
    return next(np.dtype(kind) for kind in kinds if largest <= np.iinfo(kind).max)
