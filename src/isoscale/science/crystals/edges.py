"""Edges of one structure: all neighbours within a cutoff, through periodic images, sorted by where messages go."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isoscale.errors import UserError
from isoscale.science.atoms.neighbours import Floats, Integers, Once, find_once

STEP = 0.5
"""By how much an adaptive cutoff grows at a time, in Å."""
SHELL = 0.01
"""Neighbours whose distances differ by no more (Å) are of one shell, of which `max_neighbors` takes all or none."""
TOO_NEAR = 1e-3
"""Atoms that are nearer to each other (Å) are one atom that was written twice."""
SMALLEST = 0.05
"""A periodic structure with less room per atom (Å³, Å² or Å) has a cell that is singular, or in other units."""

Where = Callable[[], str]


class GraphSettings(NamedTuple):
    """Which atoms of a structure are joined by edges."""

    cutoff: float
    """In Å."""
    adaptive_cutoff: bool = False
    """Whether the cutoff of a structure in which an atom has no neighbour grows until each has one."""
    max_neighbors: int | None = None
    """How many of the nearest neighbours send messages to an atom; a shell of equal distances is not broken."""
    limit: float = 30.0
    """How far an adaptive cutoff may grow, in Å."""
    allow_isolated: bool = False
    """Whether atoms may have no neighbours."""
    periodic: bool = True
    """Whether neighbours are looked for in periodic images too."""

    def checked(self) -> "GraphSettings":
        """The same, if it can be."""
        for name in ("cutoff", "limit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UserError(f"{name} is {value!r}, but it is a distance in Å: a number above 0, such as 6.0")
        if self.adaptive_cutoff and self.limit < self.cutoff:
            raise UserError(
                f"an adaptive cutoff grows from {self.cutoff:g} Å up to limit={self.limit:g} Å: set limit to more"
            )
        most = self.max_neighbors
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise UserError(f"max_neighbors is {most!r}, but it is a number of neighbours, 1 or more, or null for all")
        return self._replace(cutoff=float(self.cutoff), limit=float(self.limit))

    def as_numbers(self) -> list[int]:
        """The same as whole numbers, which no precision of training changes; distances in 1e-6 Å."""
        cutoff, adaptive, most, limit, isolated, periodic = self
        return [round(1e6 * cutoff), int(adaptive), most or 0, round(1e6 * limit), int(isolated), int(periodic)]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> "GraphSettings":
        """What `as_numbers` has been made of."""
        cutoff, adaptive, most, limit, isolated, periodic = numbers
        return cls(cutoff / 1e6, bool(adaptive), most or None, limit / 1e6, bool(isolated), bool(periodic))


class Edges(NamedTuple):
    """Edges sorted by target, then by source, then by image; the vector is pos[source] + shift @ cell - pos[target]."""

    source: NDArray[np.int32]
    target: NDArray[np.int32]
    shift: NDArray[np.int16]
    """(edges, 3): in which image of the cell the source is."""
    by_source: NDArray[np.int32]
    """The order that sorts edges by their source, and keeps it otherwise."""
    cutoff: float
    """Up to which neighbours were looked for, in Å."""

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """What is stored of each edge."""
        return self.source, self.target, self.shift, self.by_source


def find_edges(
    positions: Floats,
    cell: Floats,
    pbc: NDArray[np.bool_],
    settings: GraphSettings,
    where: Where = lambda: "the structure",
) -> Edges:
    """All edges of a structure; `where` says which one it is, for errors."""
    periodic = np.asarray(pbc, np.bool_) & settings.periodic
    _check_cell(positions, cell, periodic, where)
    cutoff, pairs = _neighbours(positions, cell, periodic, settings, where)
    target, source = np.concatenate([pairs.first, pairs.second]), np.concatenate([pairs.second, pairs.first])
    shift, distance = np.concatenate([pairs.shifts, -pairs.shifts]), np.concatenate([pairs.distances] * 2)
    if len(pairs.shifts) and max(pairs.shifts.max(), -pairs.shifts.min()) > np.iinfo(np.int16).max:
        raise UserError(f"{where()}: neighbours are more than 32,767 cells apart; bring the atoms back into their "
                        "cell, such as by atoms.wrap() of ASE")  # fmt: skip
    order = _sorted(target, source, shift, len(positions))
    if settings.max_neighbors is not None:
        order = order[_nearest(target[order], distance[order], len(positions), settings.max_neighbors)]
    source = source[order].astype(np.int32)
    small = source.astype(np.uint16) if len(positions) <= 1 << 16 else source  # 16 bits are sorted by radix
    by_source = np.argsort(small, kind="stable").astype(np.int32)
    return Edges(source, target[order].astype(np.int32), shift[order].astype(np.int16), by_source, cutoff)


def _check_cell(positions: Floats, cell: Floats, periodic: NDArray[np.bool_], where: Where) -> None:
    """Refuse what has no neighbours that could be counted."""
    if not len(positions):
        raise UserError(f"{where()} has no atoms; leave it out")
    if not np.isfinite(positions).all():
        atom = int(np.argmin(np.isfinite(positions).all(1)))
        raise UserError(f"{where()}: the position of atom {atom} (counted from 0) is not a finite number")
    if not periodic.any():
        return
    vectors = np.asarray(cell, np.float64)[periodic]
    size = math.sqrt(max(0.0, float(np.linalg.det(vectors @ vectors.T)))) if np.isfinite(vectors).all() else math.nan
    if not size > SMALLEST * len(positions):
        named = " and ".join(name for name, is_used in zip("abc", periodic, strict=True) if is_used)
        unit = ("Å", "Å²", "Å³")[len(vectors) - 1]
        raise UserError(
            f"{where()}: the cell is singular: it is periodic along {named}, but {vectors.tolist()} span {size:.3g} "
            f"{unit} for {len(positions)} atoms. Give the cell in Å, or say along which vectors it is periodic (pbc)"
        )


def _neighbours(
    positions: Floats, cell: Floats, periodic: NDArray[np.bool_], settings: GraphSettings, where: Where
) -> tuple[float, Once]:
    """Every pair once, and the cutoff that it took."""
    pairs = _pairs(positions, cell, settings.cutoff, periodic, where)
    lonely = _lonely(pairs, len(positions))
    if lonely is None or (settings.allow_isolated and not settings.adaptive_cutoff):
        return settings.cutoff, pairs
    if not settings.adaptive_cutoff:
        raise UserError(
            f"{where()}: atom {lonely} (counted from 0) has no neighbour within {settings.cutoff:g} Å, and would learn "
            "nothing of its surroundings; take a larger cutoff, or allow it: "
            f'"data.transforms=[{{class: periodic_edges, cutoff: {settings.cutoff:g}, allow_isolated: true}}]"; '
            "adaptive_cutoff: true finds neighbours farther away, for networks that have no cutoff of their own"
        )
    has_others = len(positions) > 1 or bool(periodic.any())
    for step in range(1, 1 + math.ceil((settings.limit - settings.cutoff) / STEP) if has_others else 1):
        cutoff = min(settings.cutoff + step * STEP, settings.limit)
        wider = _pairs(positions, cell, cutoff, periodic, where)
        lonely = _lonely(wider, len(positions))
        if lonely is None:
            return cutoff, wider
    if settings.allow_isolated:
        return settings.cutoff, pairs
    raise UserError(
        f"{where()}: atom {lonely} (counted from 0) has no neighbour within limit={settings.limit:g} Å, up to which "
        "the cutoff may grow; leave the structure out, set a larger limit, or allow_isolated=true"
    )


def _pairs(positions: Floats, cell: Floats, cutoff: float, periodic: NDArray[np.bool_], where: Where) -> Once:
    pairs = find_once(positions, cell, cutoff, periodic, num_threads=1)
    if len(pairs.distances) and pairs.distances.min() < TOO_NEAR:
        nearest = int(pairs.distances.argmin())
        first, second = sorted((int(pairs.first[nearest]), int(pairs.second[nearest])))
        raise UserError(
            f"{where()}: atoms {first} and {second} (counted from 0) lie on top of each other, "
            f"{pairs.distances[nearest]:.2g} Å apart; leave the structure out, or one of the atoms"
        )
    return pairs


def _lonely(pairs: Once, num_atoms: int) -> int | None:
    """The first atom without neighbours."""
    has_any = np.zeros(num_atoms, np.bool_)
    has_any[pairs.first] = True
    has_any[pairs.second] = True
    return None if has_any.all() else int(has_any.argmin())


def _sorted(target: Integers, source: Integers, shift: NDArray[np.int32], num_atoms: int) -> Integers:
    """The order by target, source and image: of one number that holds all, as long as one can."""
    if not len(target):
        return np.zeros(0, np.int64)
    low = shift.min(0)
    span = [int(size) for size in shift.max(0) - low + 1]
    if num_atoms**2 * math.prod(span) >= 1 << 62:
        return np.lexsort((shift[:, 2], shift[:, 1], shift[:, 0], source, target))
    image = ((shift[:, 0] - low[0]).astype(np.int64) * span[1] + shift[:, 1] - low[1]) * span[2] + shift[:, 2] - low[2]
    return np.argsort((target * num_atoms + source) * math.prod(span) + image)


def _nearest(target: Integers, distance: Floats, num_atoms: int, most: int) -> NDArray[np.bool_]:
    """Which of the edges, sorted by target, are among the nearest of their target, or of a shell with one that is."""
    counts = np.bincount(target, minlength=num_atoms)
    reach = np.full(num_atoms, np.inf)
    has_more = counts > most
    last = (np.cumsum(counts) - counts)[has_more] + most - 1
    reach[has_more] = distance[np.lexsort((distance, target))[last]] + SHELL
    return distance <= reach[target]
