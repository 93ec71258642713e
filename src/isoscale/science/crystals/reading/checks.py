"""Are the units what they are taken for? Evidence from the numbers themselves.

Between two similar structures the energy changes by the work of the forces and of the stress, in the mean of both ends:
exactly so where the energy is quadratic, nearly so in a solid. The slope of energies over works is 1 where all units
agree, 1/n where energies are per atom, and the ratio of the units otherwise. Where there are no such pairs, energies
that do not grow with the number of atoms give themselves away.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isoscale.science.crystals.reading.table import StructureTable
from isoscale.science.crystals.reading.units import PRESSURES

MOST_STRUCTURES, BLOCK = 2000, 20
"""Of larger tables, so many are looked at, in blocks from all over it: neighbours are often alike."""
MOST_ALIKE, MOST_ATOMS = 150, 300_000
"""Of structures of the same atoms, so many are compared with each other, and not many more atoms."""
FARTHEST = 1.5
"""Å: two structures whose atoms are farther apart than that, in the mean, are not similar."""
LEAST_PAIRS = 6
STRONG = 0.6
"""A correlation that is no accident."""
ROOM = 3.0
"""A slope within this factor of what is expected is taken for it."""
MOST_VIRIAL = 50.0
"""eV per atom: pressure times volume beyond that is found in no condensed matter, but by accident."""
HIGH = 0.95
"""The part of all pressures that is not beyond it."""

Verdict = Literal["wrong", "odd", "right", "unknown"]


@dataclass(frozen=True)
class Finding:
    """What the numbers say of the unit of a target."""

    target: str
    verdict: Verdict
    evidence: str
    unit: str | None = None
    """The unit that they speak for, as a recipe would declare it, relative to what is taken now."""


class _Slope(NamedTuple):
    """A line through the origin."""

    value: float
    correlation: float
    num_pairs: int

    @property
    def is_clear(self) -> bool:
        return self.num_pairs >= LEAST_PAIRS and abs(self.correlation) >= STRONG


class _Pairs(NamedTuple):
    """Differences between similar structures, a row a pair."""

    energy: NDArray[np.float64]
    work: NDArray[np.float64]  # of forces, eV where units are ASE's
    strain_work: NDArray[np.float64]  # of the stress
    counts: NDArray[np.float64]


def examine(table: StructureTable) -> list[Finding]:
    """What the numbers say of the units of energy, forces and stress, as far as they say anything."""
    chosen = table
    if len(table) > MOST_STRUCTURES:
        firsts = np.linspace(0, len(table) - BLOCK, MOST_STRUCTURES // BLOCK).astype(int)
        chosen = table.subset(np.unique(firsts[:, None] + np.arange(BLOCK)))
    findings = [*_fractional(chosen)]
    if "energy" not in table.targets:
        return findings + ([*_virial_size(chosen), *_volume_trend(chosen)] if "stress" in table.targets else [])
    chosen = chosen.subset(np.flatnonzero(chosen.targets["energy"].has))
    pairs = _pairs(chosen, strained=False)
    by_work = _of_work(pairs, pairs.energy) if pairs is not None else None
    energy = _energy(chosen, pairs, by_work)
    findings += [energy, *_forces(by_work, pairs)]
    if "stress" in chosen.targets:
        findings += _stress(chosen, is_per_atom=energy.unit == "eV/atom")
    return findings


def _energy(table: StructureTable, pairs: _Pairs | None, by_work: _Slope | None) -> Finding:
    """Whether energies are totals or per atom."""
    votes: dict[str, str] = {}
    counts = f"{table.counts.min()} to {table.counts.max()} atoms"
    if pairs is not None and by_work is not None and by_work.is_clear:
        typical = float(np.exp(np.log(pairs.counts).mean()))
        per_atom = _of_work(pairs, pairs.energy * pairs.counts)
        said = (
            f"between {by_work.num_pairs} pairs of similar structures the energy changes by {by_work.value:.2g} of the "
            f"work of the forces (correlation {by_work.correlation:.2f})"
        )
        if 1 / ROOM < by_work.value < ROOM and typical > ROOM**2:
            votes["total"] = f"{said}, as totals do"
        elif per_atom.is_clear and 1 / ROOM < per_atom.value < ROOM and typical > ROOM**2:
            votes["per atom"] = f"{said}, which is one part in {1 / by_work.value:.0f}, with {typical:.0f} atoms each"
    scaling = _scaling(table)
    if scaling is not None:
        as_total, as_per_atom = scaling
        if as_per_atom > ROOM * as_total:
            votes.setdefault("total", f"energies grow with the number of atoms ({counts})")
        elif as_total > ROOM * as_per_atom:
            found = f"energies do not grow with the number of atoms ({counts})"
            votes["per atom"] = f"{votes['per atom']}; {found}" if "per atom" in votes else found
    if len(votes) == 2:
        return Finding("energy", "odd", f"total or per atom? {votes['total']}, but {votes['per atom']}")
    if "per atom" in votes:
        return Finding("energy", "wrong", f"it is per atom, not a total: {votes['per atom']}", "eV/atom")
    if "total" in votes:
        return Finding("energy", "right", f"it is a total: {votes['total']}", "eV")
    smallest, largest = int(table.counts.min()), int(table.counts.max())
    if largest == 1:
        return Finding("energy", "right", "of one atom, a total is per atom", "eV")
    why = f"all have {smallest} atoms" if smallest == largest else f"they have {counts}"
    return Finding("energy", "unknown", f"whether it is a total or per atom cannot be told ({why}); taken for a total")


def _scaling(table: StructureTable) -> tuple[float, float] | None:
    """How badly the composition explains energies per atom, if they are totals, and as they are, if they are not."""
    elements, rows = np.unique(table.numbers, return_inverse=True)
    if len(table) < max(8, 2 * len(elements)) or np.ptp(table.counts) == 0:
        return None
    flat = np.bincount(table.structure_of * len(elements) + rows, minlength=len(table) * len(elements))
    fractions = flat.reshape(len(table), len(elements)) / table.counts[:, None]
    energies = table.targets["energy"].values
    return _unexplained(fractions, energies / table.counts), _unexplained(fractions, energies)


def _unexplained(known: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """What least squares leave of the values, relative to their size."""
    fitted = known @ np.linalg.lstsq(known, values, rcond=None)[0]
    return float(np.sqrt(np.mean((values - fitted) ** 2)) / max(float(np.sqrt(np.mean(values**2))), 1e-300))


def _forces(by_work: _Slope | None, pairs: _Pairs | None) -> Iterator[Finding]:
    """Forces that do not go with the energies: another sign or other units."""
    if pairs is None or by_work is None or not by_work.is_clear:
        return
    per_atom = _of_work(pairs, pairs.energy * pairs.counts)
    if any(1 / ROOM < slope.value < ROOM for slope in (by_work, per_atom)):
        return
    said = (
        f"between {by_work.num_pairs} pairs of similar structures the energy changes by {by_work.value:.3g} of the "
        f"work of the forces (correlation {by_work.correlation:.2f})"
    )
    if any(-ROOM < slope.value < -1 / ROOM for slope in (by_work, per_atom)):
        yield Finding("forces", "wrong", f"they are gradients, of the other sign than forces: {said}", "-eV/Å")
    else:
        yield Finding("forces", "odd", f"their unit does not go with that of the energies: {said}")


def _stress(table: StructureTable, is_per_atom: bool) -> list[Finding]:
    """The unit and sign of the stress, by its work, or else by its size and its trend with the volume."""
    pairs = _pairs(table, strained=True)
    if pairs is not None:
        energy = pairs.energy * (pairs.counts if is_per_atom else 1.0)
        slope = _slope(pairs.strain_work, energy - pairs.work)
        name, expected = _nearest_unit(slope.value)
        if slope.is_clear and 1 / 2 < slope.value / expected < 2:
            said = (
                f"between {slope.num_pairs} pairs of similar structures with different cells the energy changes by "
                f"{slope.value:.3g} of the work of the stress (correlation {slope.correlation:.2f})"
            )
            right = name == "eV/Å^3"
            meant = f"it is in {name}{', so of the other sign than ASE has it' if name[0] == '-' else ''}"
            return [Finding("stress", "right" if right else "wrong", f"{meant}: {said}", name)]
    trend = _volume_trend(table)
    pressures, _ = _pressures(table)
    middle = float(np.median(np.abs(pressures))) / PRESSURES["GPa"] if len(pressures) else 0.0
    unknown = Finding(
        "stress", "unknown",
        "its unit and sign cannot be told, for lack of similar structures with different cells; taken for eV/Å^3, half "
        f"of all pressures are below {middle:.2g} GPa",
    )  # fmt: skip
    return [*_virial_size(table), *trend] or [unknown]


def _nearest_unit(slope: float) -> tuple[str, float]:
    """The unit that a slope speaks for, and the slope that it would have."""
    factors = {"eV/Å^3": 1.0, "Hartree/Bohr^3": 183.631, "GPa": PRESSURES["GPa"], "kbar": PRESSURES["kbar"]}
    name = min(factors, key=lambda each: abs(float(np.log(max(abs(slope), 1e-300) / factors[each]))))
    return (f"-{name}", -factors[name]) if slope < 0 else (name, factors[name])


def _virial_size(table: StructureTable) -> list[Finding]:
    """Stresses too large for eV/Å³; which other unit they are in nobody can tell from that."""
    pressures, volumes = _pressures(table)
    large = float(np.quantile(np.abs(pressures) * volumes, HIGH)) if len(pressures) else 0.0
    if large < MOST_VIRIAL:
        return []
    middle = float(np.median(np.abs(pressures)))
    said = (
        f"it is not in eV/Å^3: one pressure in {1 / (1 - HIGH):.0f}, times the volume, would be beyond {large:,.0f} eV "
        f"per atom. Half of all pressures are below {middle:.2g}: {middle / 10:.2g} GPa if that is in kbar"
    )
    return [Finding("stress", "wrong", said)]


def _volume_trend(table: StructureTable) -> list[Finding]:
    """A stress that falls with the volume among structures of like composition has the sign of a pressure."""
    pressures, volumes = _pressures(table, same_place=True)
    kinds: dict[bytes, list[int]] = {}
    for at, composition in enumerate(_compositions(table)):
        kinds.setdefault(composition, []).append(at)
    ranks = []
    for rows in (np.array(kind) for kind in kinds.values() if len(kind) >= LEAST_PAIRS):
        rows = rows[np.isfinite(pressures[rows])]
        if len(rows) >= LEAST_PAIRS and np.ptp(volumes[rows]) > 0.02 * volumes[rows].mean():
            ranks.append([_ranks(pressures[rows]), _ranks(volumes[rows])])
    if not ranks:
        return []
    first, second = np.concatenate(ranks, axis=1)
    correlation = float(np.corrcoef(first, second)[0, 1]) if np.ptp(first) and np.ptp(second) else 0.0
    if correlation > -STRONG or len(first) < 10:
        return []
    said = (
        f"its sign looks like that of a pressure, not like ASE's: among {len(first)} structures of like composition it "
        f"falls as the volume grows (rank correlation {correlation:.2f})"
    )
    return [Finding("stress", "odd", said, "-eV/Å^3")]


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.argsort(np.argsort(values)) / max(1, len(values) - 1) - 0.5)


def _compositions(table: StructureTable) -> Iterator[bytes]:
    for start, count in zip(table.starts[:-1].tolist(), table.counts.tolist(), strict=True):
        elements, amounts = np.unique(table.numbers[start : start + count], return_counts=True)
        yield elements.tobytes() + (amounts // np.gcd.reduce(amounts)).tobytes()


def _pressures(table: StructureTable, same_place: bool = False) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A third of the trace of each stress, and the volume per atom, of what is periodic in all directions."""
    stress = table.targets["stress"]
    volumes = np.abs(np.linalg.det(table.cells)) / table.counts
    usable = stress.has & table.pbc.all(1) & (volumes > 0)
    pressures = np.where(usable, np.trace(stress.values, axis1=1, axis2=2) / 3, np.nan)
    return (pressures, volumes) if same_place else (pressures[usable], volumes[usable])


def _fractional(table: StructureTable) -> Iterator[Finding]:
    """Positions that all lie between 0 and 1, in cells that are larger."""
    several = np.repeat(table.counts > 1, table.counts)
    inside = (table.positions >= 0) & (table.positions <= 1)
    edges = np.linalg.norm(table.cells, axis=2)
    large = (edges > 2).all() if len(edges) else False
    if large and several.any() and inside.all():
        yield Finding("positions", "odd", "all lie between 0 and 1, as fractions of the cell do; Å are expected")


def _slope(given: NDArray[np.float64], values: NDArray[np.float64]) -> _Slope:
    """Least squares through the origin, without the largest tenth, where one outlier would be all there is."""
    keep = np.abs(given) <= np.quantile(np.abs(given), 0.9) if len(given) > 10 else np.full(len(given), True)
    x, y = given[keep], values[keep]
    squares = float(x @ x), float(y @ y)
    if min(squares) <= 0:
        return _Slope(0.0, 0.0, len(x))
    return _Slope(float(x @ y) / squares[0], float(x @ y) / float(np.sqrt(squares[0] * squares[1])), len(x))


def _of_work(pairs: _Pairs, energy: NDArray[np.float64]) -> _Slope:
    """The slope of energies over the work of forces, apart from what goes with the work of the stress."""
    known = pairs.strain_work
    squares = float(known @ known)
    if squares <= 0:
        return _slope(pairs.work, energy)
    return _slope(pairs.work - known * (known @ pairs.work / squares), energy - known * (known @ energy / squares))


def _pairs(table: StructureTable, strained: bool) -> _Pairs | None:
    """Each structure and the most similar one of the same atoms: in another cell if `strained`, else in a like one."""
    if "forces" not in table.targets:
        return None
    usable = table.targets["forces"].has & table.targets["energy"].has
    if strained:
        usable = usable & table.targets["stress"].has & table.pbc.all(1)
    alike: dict[bytes, list[int]] = {}
    starts = table.starts
    for at in np.flatnonzero(usable).tolist():
        key = table.numbers[starts[at] : starts[at + 1]].tobytes() + table.pbc[at].tobytes()
        alike.setdefault(key, []).append(at)
    rows = [row for group in alike.values() if len(group) > 1 for row in _pairs_of(table, starts, group, strained)]
    return _Pairs(*np.array(rows).T) if rows else None


def _pairs_of(
    table: StructureTable, starts: NDArray[np.int64], group: list[int], strained: bool
) -> Iterator[tuple[float, float, float, float]]:
    """Of structures of the same atoms: energies, works and numbers of atoms."""
    count = int(table.counts[group[0]])
    most = max(20, min(MOST_ALIKE, MOST_ATOMS // count))
    group = group if len(group) <= most else group[: most // 2] + group[-most // 2 :]
    atoms = np.array([starts[at] + np.arange(count) for at in group])
    cells, positions, forces = table.cells[group], table.positions[atoms], table.targets["forces"].values[atoms]
    energies = table.targets["energy"].values[group]
    stress = table.targets.get("stress")
    stresses = np.zeros((len(group), 3, 3)) if stress is None else stress.values[group]
    bases = np.where(table.pbc[group][:, :, None], cells, np.eye(3)) if not table.pbc[group].all() else cells
    inverse = np.linalg.inv(bases)
    fractions = positions @ inverse
    seen: set[frozenset[int]] = set()
    for one in range(len(group)):
        steps = fractions - fractions[one]
        steps -= np.round(steps) * table.pbc[group[one]]
        strain = inverse[one] @ (bases - bases[one])
        strains = np.abs(strain).max((1, 2))
        apart = np.sqrt(((steps @ bases[one]) ** 2).sum(-1).mean(-1))
        distance = np.where((strains > 1e-3) & (strains < 0.1) if strained else strains < 0.03, apart, np.inf)
        distance = distance + 10 * strains
        distance[one] = np.inf
        other = int(np.argmin(distance))
        pair = frozenset((one, other))
        if not distance[other] < FARTHEST or pair in seen or (apart[other] < 1e-6 and not strained):
            continue
        seen.add(pair)
        mean = (bases[one] + bases[other]) / 2
        work = -0.5 * float(((forces[one] + forces[other]) * (steps[other] @ mean)).sum())
        tensor = np.linalg.solve(mean, bases[other] - bases[one])
        volume = abs(float(np.linalg.det(mean)))
        strain_work = volume * 0.5 * float(((stresses[one] + stresses[other]) * (tensor + tensor.T) / 2).sum())
        yield float(energies[other] - energies[one]), work, strain_work, float(count)
