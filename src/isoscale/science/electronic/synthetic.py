"""A made-up material whose descriptors and local density of states follow from the atoms, at any size and in no time.

Around a point, atoms are counted with Gaussian weights of a few widths, and with first and second moments of their
directions; what does not change when everything is rotated (`invariants`) decides both the descriptors and the states,
so that one can be learnt from the other. A Gaussian is a product over the three directions, and so is a sum over atoms
on a grid a product of matrices. The material is the same for every seed and size: a seed only moves the atoms.
"""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from isoscale.science.electronic.integrals import EnergyGrid

NUM_DESCRIPTORS = 91
VOLUME = 8.0
"""Å³ for each atom."""
ATOMIC_NUMBER = 4
VALENCE = 2.0
"""Electrons of each atom."""
TEMPERATURE = 300.0
"""K."""
WIDTHS = (0.45, 0.65, 0.95, 1.4)
"""Å, of the Gaussians."""
REACH = 5.0
"""Widths after which a Gaussian is nothing."""
JITTER = 0.12
"""How far atoms are off their lattice, in distances between neighbours."""
LOWEST, HIGHEST = -5.0, 20.0
"""eV, of the energy grid."""
FILLED = 7.5
"""eV, up to which the states of the material hold its electrons, or nearly so."""
NUM_BANDS = 8
BAND_WIDTH = 3.0
"""eV."""
NUM_SUMS = len(WIDTHS) + len(WIDTHS) * (len(WIDTHS) + 1)


def energy_grid(size: int) -> EnergyGrid:
    """The energies of the material's states, however many."""
    return EnergyGrid(size, (HIGHEST - LOWEST) / (size - 1), LOWEST)


@dataclass(frozen=True)
class Box:
    """Atoms in a periodic box with a grid of points."""

    grid: tuple[int, int, int]
    positions: Tensor
    """(atoms, 3), in Å and float64."""

    @property
    def cell(self) -> list[float]:
        """The edges, in Å: of the shape of the grid, as large as its atoms need."""
        scale = (VOLUME * len(self.positions) / math.prod(self.grid)) ** (1 / 3)
        return [scale * count for count in self.grid]


def make_box(grid: tuple[int, int, int], num_atoms: int, seed: int) -> Box:
    """Atoms near some of the places of a lattice, where the seed says."""
    generator = torch.Generator().manual_seed(seed)
    empty = Box(grid, torch.zeros(num_atoms, 3))
    counts = _lattice(grid, num_atoms)
    places = torch.cartesian_prod(*(torch.arange(count, dtype=torch.float64) for count in counts))
    chosen = torch.randperm(len(places), generator=generator)[:num_atoms].sort().values
    jitter = JITTER * torch.randn(num_atoms, 3, generator=generator, dtype=torch.float64)
    cell = torch.tensor(empty.cell, dtype=torch.float64)
    positions = (places[chosen] + 0.5 + jitter) * cell / torch.tensor(counts)
    return Box(grid, positions.remainder(cell))


def _lattice(grid: tuple[int, int, int], num_atoms: int) -> list[int]:
    """Places in each direction, of a lattice as cubic as it gets with room for all atoms."""
    scale = (num_atoms / math.prod(grid)) ** (1 / 3)
    counts = [max(1, round(scale * count)) for count in grid]
    while math.prod(counts) < num_atoms:
        sparsest = min(range(3), key=lambda axis: counts[axis] / grid[axis])
        counts[sparsest] += 1
    return counts


class Sums:
    """Sums over the atoms of a box, at the points of one plane after the other."""

    def __init__(self, box: Box, device: torch.device) -> None:
        """Gaussians along each direction, which all points share."""
        self._grid = box.grid
        self._factors = [_Factors(box, width, device) for width in WIDTHS]

    def invariants(self, plane: int, start: int, stop: int) -> Tensor:
        """What is around the points of some lines of a plane: (sums, points)."""
        moments = [factors.moments(plane, start, stop) for factors in self._factors]
        found = [zeroth for zeroth, _, _ in moments]
        for one, other in combinations_with_replacement(moments, 2):
            found += [(one[1] * other[1]).sum(0), (one[2] * other[2]).sum(0)]
        return torch.stack(found)


class _Factors:
    """Gaussians of one width along each direction, times the distance to the power 0, 1 and 2."""

    def __init__(self, box: Box, width: float, device: torch.device) -> None:
        self._box, self._width = box, width
        rows = [_along(box, axis, width).to(device, torch.float32) for axis in range(3)]
        self._x, self._y = rows[0].contiguous(), rows[1].contiguous()  # (powers, points, atoms)
        self._z = rows[2].transpose(1, 2).contiguous()  # (powers, atoms, points)
        self._device = device

    def moments(self, plane: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """The number of atoms, their mean direction and its traceless square: (points), (3, points), (6, points)."""
        near = self._near(plane, start, stop)
        x, y = self._x[:, plane, near], self._y[:, start:stop][..., near]
        z = self._z[:, near]
        planar = {(i, j): x[i] * y[j] for i in range(3) for j in range(3 - i)}
        flat = {}
        for power in range(3):
            keys = [key for key in planar if sum(key) + power <= 2]
            products = (torch.cat([planar[key] for key in keys]) @ z[power]).chunk(len(keys))
            flat.update({(*key, power): part.flatten() for key, part in zip(keys, products, strict=True)})
        second = [flat[2, 0, 0], flat[0, 2, 0], flat[0, 0, 2]]
        third = (second[0] + second[1] + second[2]) / 3
        mixed = [flat[1, 1, 0], flat[1, 0, 1], flat[0, 1, 1]]
        square = torch.stack([*(one - third for one in second), *(math.sqrt(2) * one for one in mixed)])
        return flat[0, 0, 0], torch.stack([flat[1, 0, 0], flat[0, 1, 0], flat[0, 0, 1]]), square

    def _near(self, plane: int, start: int, stop: int) -> Tensor:
        """The atoms that can be felt on these lines."""
        edges, grid, reach = self._box.cell, self._box.grid, REACH * self._width
        place = plane * edges[0] / grid[0]
        middle, half = (start + stop - 1) / 2 * edges[1] / grid[1], (stop - 1 - start) / 2 * edges[1] / grid[1]
        along_x = _nearest(self._box.positions[:, 0] - place, edges[0]).abs() <= reach
        along_y = _nearest(self._box.positions[:, 1] - middle, edges[1]).abs() <= reach + half
        return (along_x & along_y).nonzero().flatten().to(self._device)


def _along(box: Box, axis: int, width: float) -> Tensor:
    """Gaussians of all atoms and their images along an axis, times powers of the distance: (3, points, atoms)."""
    edge, count = box.cell[axis], box.grid[axis]
    points = torch.arange(count, dtype=torch.float64) * edge / count
    apart = _nearest(box.positions[:, axis] - points[:, None], edge)
    found = torch.zeros(3, *apart.shape, dtype=torch.float64)
    num_images = math.ceil(REACH * width / edge)
    for image in range(-num_images, num_images + 1):
        distance = (apart + image * edge) / width
        gaussian = torch.exp(-distance.square() / 2)
        found += torch.stack([gaussian, distance * gaussian, distance.square() * gaussian])
    return found


def _nearest(distance: Tensor, edge: float) -> Tensor:
    """The distance to the nearest image."""
    return distance - edge * torch.round(distance / edge)


@dataclass(frozen=True)
class Material:
    """What descriptors and states are at a point, given its invariants."""

    mean: Tensor
    scale: Tensor
    mixing: Tensor
    """(sums, descriptors)."""
    offset: Tensor
    size: Tensor
    bands: Tensor
    """(sums, bands)."""
    level: Tensor
    density: float
    """States at a point for each eV, on average."""

    def to(self, device: torch.device) -> "Material":
        """The same on a device."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Material(**tensors, density=self.density)

    def standard(self, invariants: Tensor) -> Tensor:
        """Invariants with mean 0 and deviation 1: (points, sums)."""
        return ((invariants - self.mean) * self.scale).T

    def descriptors(self, standard: Tensor, mixed: Tensor, bent: Tensor, out: Tensor) -> None:
        """Put the descriptors into `out`; all three are (points, descriptors)."""
        torch.mm(standard, self.mixing, out=mixed)
        # x/√(1+x²) bends like a hyperbolic tangent, at a quarter of its price
        torch.mul(mixed, mixed, out=bent).add_(1).rsqrt_().mul_(mixed)
        torch.addcmul(self.offset, bent, self.size, out=out)

    def amplitudes(self, standard: Tensor) -> Tensor:
        """How much of each band is at a point: (points, bands)."""
        return self.density * torch.nn.functional.softplus(standard @ self.bands + self.level)


@cache
def material() -> Material:
    """The material, with the spread of invariants and the number of states taken from a small box of it."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    box = make_box((24, 24, 24), 64, seed=0)
    sums = Sums(box, torch.device("cpu"))
    seen = torch.cat([sums.invariants(plane, 0, 24) for plane in range(24)], 1).double()
    others = 0.5 * draw(NUM_SUMS, NUM_DESCRIPTORS - NUM_SUMS) / math.sqrt(NUM_SUMS)
    made = Material(
        mean=seen.mean(1, keepdim=True).float(),
        scale=(1 / seen.std(1, keepdim=True)).float(),
        mixing=torch.cat([torch.eye(NUM_SUMS) / 3, others], 1),
        offset=10 ** draw(NUM_DESCRIPTORS),
        size=10 ** (draw(NUM_DESCRIPTORS) / 2),
        bands=0.4 * draw(NUM_SUMS, NUM_BANDS) / math.sqrt(NUM_SUMS),
        level=1 + 0.3 * draw(NUM_BANDS),
        density=1.0,
    )
    return _filled(made, seen.float())


def _filled(made: Material, seen: Tensor) -> Material:
    """The material with as many states below `FILLED` as it has electrons."""
    fine = energy_grid(2001)
    states = made.amplitudes(made.standard(seen)).double().mean(0) @ band_shapes(fine).double()
    below = states[fine.energies() <= FILLED].sum() * fine.spacing
    return Material(**{**vars(made), "density": VALENCE / VOLUME / float(below)})


def band_shapes(energies: EnergyGrid) -> Tensor:
    """How the states of each band are spread over the energies: (bands, energies)."""
    centres = torch.linspace(LOWEST, HIGHEST, NUM_BANDS, dtype=torch.float64)
    distance = (energies.energies() - centres[:, None]) / BAND_WIDTH
    return torch.exp(-distance.square() / 2).float()


@dataclass(frozen=True)
class Tile:
    """Some lines of a plane of the grid: what is computed at once, whatever else is going on."""

    plane: int
    start: int
    stop: int
    first_row: int
    num_rows: int


def tiles(grid: tuple[int, int, int], most_rows: int) -> Iterator[Tile]:
    """All of a grid, in the order of its rows."""
    lines = max(1, most_rows // grid[2])
    for plane in range(grid[0]):
        for start in range(0, grid[1], lines):
            stop = min(grid[1], start + lines)
            yield Tile(plane, start, stop, (plane * grid[1] + start) * grid[2], (stop - start) * grid[2])


class Fields:
    """Descriptors and states on the grid of a box."""

    def __init__(self, box: Box, energies: EnergyGrid, device: torch.device) -> None:
        """Whatever all tiles share, on the device."""
        self._sums, self._material = Sums(box, device), material().to(device)
        self._shapes = band_shapes(energies).to(device)
        places = [torch.arange(count) * edge / count for count, edge in zip(box.grid, box.cell, strict=True)]
        self._places = [place.to(device, torch.float32) for place in places]
        self._kept = threading.local()

    def compute(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The place and the descriptors (points, 3 + descriptors), and the states (points, energies).

        They are good until this thread computes the next tile.
        """
        standard = self._material.standard(self._sums.invariants(tile.plane, tile.start, tile.stop))
        rows = self._room("rows", tile.num_rows, 3 + NUM_DESCRIPTORS)
        mixed, bent = (self._room(name, tile.num_rows, NUM_DESCRIPTORS) for name in ("mixed", "bent"))
        self._put_places(tile, rows)
        self._material.descriptors(standard, mixed, bent, out=rows[:, 3:])
        states = self._room("states", tile.num_rows, self._shapes.shape[1])
        return rows, torch.mm(self._material.amplitudes(standard), self._shapes, out=states)

    def _room(self, name: str, num_rows: int, width: int) -> Tensor:
        """Memory that is used again: to get it anew from the system takes as long as to fill it."""
        kept = vars(self._kept)
        if name not in kept or len(kept[name]) < num_rows:
            kept[name] = torch.empty(num_rows, width, device=self._shapes.device)
        return kept[name][:num_rows]

    def _put_places(self, tile: Tile, rows: Tensor) -> None:
        x, y, z = self._places
        lines = y[tile.start : tile.stop]
        rows[:, 0] = x[tile.plane]
        rows[:, 1] = lines.repeat_interleave(len(z))
        rows[:, 2] = z.repeat(len(lines))
