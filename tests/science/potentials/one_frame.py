"""Atoms that were never stored, as a batch of one frame."""

import numpy as np
from torch import Tensor

from isoscale.science.atoms.neighbours import Floats, Integers, shift_type
from isoscale.science.potentials.geometry import Layout
from isoscale.science.potentials.neighbours import (
    arranged,
    as_batch,
    fill_tables,
    find_pairs,
)


def frame_batch(
    positions: Floats, types: Integers, box: Floats | None, cutoff: float, num_types: int
) -> dict[str, Tensor]:
    """One frame as a batch of one: what a model needs to know of atoms that were never stored."""
    types = np.asarray(types, np.int64)
    atoms = tuple(np.bincount(types, minlength=num_types).tolist())
    places = arranged(types[None], atoms)
    coord, kinds = np.asarray(positions, np.float64)[places[0]], types[places[0]]
    pairs = find_pairs(coord, kinds, box, cutoff)
    layout = Layout(atoms, tuple(pairs.counts(kinds, num_types).max(0, initial=0).tolist()))
    kind = shift_type(int(np.abs(pairs.shifts).max(initial=0)))
    found = fill_tables(pairs, kinds, np.arange(len(kinds)), layout, kind)
    values = {"coord": coord, "box": np.zeros((3, 3)) if box is None else np.asarray(box, np.float64)}
    frame = {key: value[None] for key, value in (values | found._asdict()).items()}
    return as_batch({**frame, "places": places}, layout)
