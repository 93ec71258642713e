"""Hydro-particle-mesh simulation of dark matter and gas: pairs of boxes to learn one from the other.

A Gaussian random field with the linear power spectrum displaces a lattice of particles by second-order Lagrangian
perturbation theory; a particle mesh moves them on under gravity. Gas starts where the dark matter does and feels the
gradient of its enthalpy as well, with a temperature that follows its density (hydro-PM, Gnedin & Hui 1998): smooth
where the dark matter is clumped. Steps are equal in the scale factor, and kicks and drifts are those that move
particles exactly as Zel'dovich's approximation where that is right (Feng et al. 2016, FastPM), so that 20 of them do.

Inside, lengths are in cells and times in 1/H0; momenta are a² dx/dt. The same settings give the same bits on one kind
of device, and the waves of a seed are the same in a box of the same size with another number of cells.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isoscale.data.hashing import MASK, derive_key, fold
from isoscale.errors import UserError
from isoscale.science.cosmology.particle_mesh import (
    deposit,
    derivative,
    in_parts,
    interpolate,
    inverse_laplacian,
    smooth,
    wave_numbers,
)
from isoscale.science.cosmology.theory import Cosmology

HUBBLE = 100.0
"""km/s for each Mpc/h."""
BOLTZMANN_PER_PROTON = 8.254e-3
"""Boltzmann's constant over the mass of a proton, in (km/s)² for each K."""
DENSITY_FLOOR = 1e-2
"""In mean densities: emptier cells hold no particles, or a corner of one, because there are so few of them."""
SMOOTHING = 2.0
"""Cells, of the surroundings that empty cells move with."""


@dataclass(frozen=True)
class Simulation:
    """Settings of a simulation; all that decides its result on a kind of device."""

    cells: int = 64
    """Cells along an edge of the box; even."""
    seed: int = 0
    cell_size: float = 0.04
    """Comoving Mpc/h; the gas is smooth on about 0.3, and with larger cells it is a copy of the dark matter."""
    particles_per_cell: int = 8
    """Of each species: 1, 8 or 27; each of them takes 24 bytes of the device, and as much again at the beginning."""
    start_redshift: float = 49.0
    redshift: float = 3.0
    steps: int = 20
    temperature: float = 1.2e4
    """K, of gas of mean density; 0 makes the gas move as the dark matter."""
    gamma: float = 1.55
    """Slope of the temperature: T = T0 Δ^(γ - 1)."""
    molecular_weight: float = 0.59
    """Mean mass of a particle of the gas, in masses of a proton."""
    cosmology: Cosmology = field(default_factory=Cosmology)

    @classmethod
    def of(cls, **settings: Any) -> "Simulation":
        """A simulation of settings that somebody wrote; `cosmology` is a mapping of its parameters."""
        given = dict(settings)
        for kind, part, where in ((cls, given, "a simulation"), (Cosmology, given.get("cosmology", {}), "a cosmology")):
            known = [each.name for each in fields(kind)]
            for name in part:
                if name not in known:
                    raise UserError(f"{where} has no setting {name!r}; it has {', '.join(known)}")
        if "cosmology" in given:
            given["cosmology"] = Cosmology(**given["cosmology"])
        return cls(**given)

    def __post_init__(self) -> None:
        if self.cells < 2 or self.cells % 2:
            raise UserError(f"cells={self.cells}: an even number of at least 2 is needed")
        if self.per_axis**3 != self.particles_per_cell or self.per_axis < 1:
            raise UserError(f"particles_per_cell={self.particles_per_cell}: expected 1, 8 or 27")
        if not self.start_redshift > self.redshift > -1:
            raise UserError(
                f"redshift={self.redshift} has to be less than start_redshift={self.start_redshift}, and more than -1"
            )
        if self.steps < 1 or self.cell_size <= 0 or self.temperature < 0 or self.gamma <= 1:
            raise UserError("steps >= 1, cell_size > 0, temperature >= 0 and gamma > 1 are needed")

    @property
    def per_axis(self) -> int:
        """Particles of a cell along an axis."""
        return round(self.particles_per_cell ** (1 / 3))

    @property
    def lattice(self) -> int:
        """Particles along an edge of the box."""
        return self.cells * self.per_axis

    @property
    def box_size(self) -> float:
        """Comoving Mpc/h."""
        return self.cells * self.cell_size

    @property
    def speed(self) -> float:
        """km/s in a cell per 1/H0."""
        return HUBBLE * self.cell_size

    def scale_factors(self) -> list[float]:
        """At the beginning and after each step."""
        first, last = 1 / (1 + self.start_redshift), 1 / (1 + self.redshift)
        return [first + (last - first) * step / self.steps for step in range(self.steps)] + [last]


class Species(NamedTuple):
    """Particles of equal mass."""

    positions: Tensor
    """(3, particles) in cells, float32; the box is periodic."""
    momenta: Tensor
    """(3, particles): a² dx/dt in cells and 1/H0, float32."""


def linear_spectrum(simulation: Simulation, device: torch.device) -> Tensor:
    """A Gaussian random field: the Fourier transform (m, m, m/2 + 1) on the particle lattice of the density today.

    A wave is drawn by a hash of the seed and its integer wave vector: it does not depend on the size of the lattice.
    Waves k and -k are conjugate, because the field is real; the highest waves of the lattice are left out.
    """
    m, length = simulation.lattice, simulation.box_size
    keys = derive_key(simulation.seed, "cosmology/waves")
    spectrum = torch.empty(m, m, m // 2 + 1, dtype=torch.complex64, device=device)
    all_x, y, z = (k.double() for k in wave_numbers(m, device))
    planes = max(1, (1 << 22) // (m * m))
    for start in range(0, m, planes):
        x = all_x[start : start + planes]
        is_mirrored = (z == 0) & ((y < 0) | ((y == 0) & (x < 0)))
        sign = 1 - 2 * is_mirrored.double()
        radius, angle = (_hashed(key, sign * x, sign * y, z + 0 * sign) for key in keys)
        k = (x * x + y * y + z * z).sqrt()
        variance = simulation.cosmology.power(2 * math.pi / length * k) * (m**6 / length**3)
        is_kept = (k > 0) & (2 * torch.maximum(torch.maximum(x.abs(), y.abs()), z) < m)
        size = torch.where(is_kept, (-variance * torch.log1p(-radius)).sqrt(), 0)
        spectrum[start : start + planes] = torch.polar(size, 2 * math.pi * sign * angle)
    return spectrum


def _hashed(key: int, *numbers: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) in float64, one for each combination of integers."""
    word: Tensor = torch.tensor(key, device=numbers[0].device)
    for number in numbers:
        word = fold(word, number.long() & MASK)
    return word.double() * 2.0**-32


def initial_conditions(simulation: Simulation, spectrum: Tensor) -> Species:
    """Second-order Lagrangian perturbation theory at the start redshift, from the linear density today."""
    m, a, cosmology = simulation.lattice, simulation.scale_factors()[0], simulation.cosmology
    growth = cosmology.growth(a)
    second_growth = -3 / 7 * growth**2 * cosmology.matter_fraction(a) ** (-1 / 143)
    rate, second_rate = cosmology.growth_rate(a), 2 * cosmology.matter_fraction(a) ** (6 / 11)
    first = inverse_laplacian(spectrum)
    second = inverse_laplacian(torch.fft.rfftn(_second_order(first)))
    positions = torch.empty(3, m, m, m, device=spectrum.device)
    momenta = torch.empty_like(positions)
    # Between the points of the mesh: on them, a small displacement would give a density from one side only.
    lattice = (torch.arange(m, device=spectrum.device) + 0.5) / simulation.per_axis
    for axis in range(3):
        one = derivative(first, axis).mul_(-growth / simulation.per_axis)
        two = derivative(second, axis).mul_(second_growth / simulation.per_axis)
        shape = [m if other == axis else 1 for other in range(3)]
        positions[axis] = (one + two).add_(lattice.view(shape))
        momenta[axis] = one.mul_(rate).add_(two.mul_(second_rate)).mul_(a**2 * cosmology.expansion(a))
    return Species(positions.flatten(1).remainder_(simulation.cells), momenta.flatten(1))


def _second_order(potential: Tensor) -> Tensor:
    """The source of second-order displacements: the sum over i < j of φ_ii φ_jj - φ_ij²."""
    xx, yy = derivative(potential, 0, 0), derivative(potential, 1, 1)
    source = xx * yy
    source.addcmul_(xx.add_(yy), derivative(potential, 2, 2))
    del xx, yy
    for one, other in ((0, 1), (0, 2), (1, 2)):
        mixed = derivative(potential, one, other)
        source.addcmul_(mixed, mixed, value=-1)
    return source


def evolve(
    simulation: Simulation, start: Species, report: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Species, Species]:
    """Dark matter and gas at the end, from where both are at the start; `start` is used up.

    A leapfrog: momenta are known between the times of the positions, but for the first and the last.
    """
    cosmology, times = simulation.cosmology, simulation.scale_factors()
    between = [times[0], *((one + other) / 2 for one, other in pairwise(times)), times[-1]]
    dark, gas = start, Species(start.positions.clone(), start.momenta.clone())

    def momentum(a: float) -> float:
        """Of a linear displacement that is D now."""
        return a**2 * cosmology.expansion(a) * cosmology.growth_rate(a) * cosmology.growth(a)

    for step, a in enumerate(times):
        before, after = between[step], between[step + 1]
        gravity = (momentum(after) - momentum(before)) / cosmology.growth(a)
        kick(simulation, dark, gas, gravity, cosmology.time(after) - cosmology.time(before))
        if step < simulation.steps:
            drift = (cosmology.growth(times[step + 1]) - cosmology.growth(a)) / momentum(after)
            for species in (dark, gas):
                species.positions.add_(species.momenta, alpha=drift).remainder_(simulation.cells)
            report(step + 1, simulation.steps)
    return dark, gas


def kick(simulation: Simulation, dark: Species, gas: Species, gravity: float, duration: float) -> None:
    """Add to the momenta what gravity does, in linear displacements, and what pressure does in a duration."""
    n, cosmology = simulation.cells, simulation.cosmology
    baryons = cosmology.omega_b / cosmology.omega_m
    gas_density = deposit(gas.positions, n).div_(simulation.particles_per_cell)
    density = deposit(dark.positions, n).mul_((1 - baryons) / simulation.particles_per_cell)
    density.add_(gas_density, alpha=baryons)
    spectrum = torch.fft.rfftn(density.float())
    # To share particles among cells and forces among particles weakens a wave by 1 - k²/6: a sixth of the density,
    # which is k²/6 of the potential, makes up for it where it matters, and does not amplify noise where it does not.
    potential = inverse_laplacian(spectrum).sub_(spectrum, alpha=1 / 6).mul_(-gravity)
    del density, spectrum
    _push(dark, potential)
    if simulation.temperature:
        enthalpy = polytropic_temperature(simulation, gas_density).mul_(
            simulation.gamma / (simulation.gamma - 1) * BOLTZMANN_PER_PROTON / simulation.molecular_weight
        )
        potential.sub_(torch.fft.rfftn(enthalpy.float()), alpha=duration / simulation.speed**2)
    _push(gas, potential)


def _push(species: Species, potential: Tensor) -> None:
    """Add the gradient of a potential, given by its spectrum, to the momenta."""
    mesh = torch.stack([derivative(potential, axis) for axis in range(3)], -1)

    def push(chunks: list[slice]) -> None:
        for chunk in chunks:
            species.momenta[:, chunk] += interpolate(mesh, species.positions[:, chunk])

    in_parts(species.positions, push)


def polytropic_temperature(simulation: Simulation, density: Tensor) -> Tensor:
    """The temperature of gas in K that follows its density, in mean densities."""
    return simulation.temperature * density ** (simulation.gamma - 1)


def density_and_velocity(simulation: Simulation, species: Species) -> tuple[Tensor, Tensor, Tensor]:
    """Density in mean ones (n, n, n), mean velocity (3, n, n, n) in km/s, and its dispersion (n, n, n) in (km/s)².

    The velocity is peculiar and weighted by mass, the dispersion is that of one of three directions. Cells below the
    density floor are filled up to it with matter that moves as its surroundings do, without a dispersion of its own.
    """
    n, a = simulation.cells, 1 / (1 + simulation.redshift)
    mass = deposit(species.positions, n).div_(simulation.particles_per_cell)
    filling = (DENSITY_FLOOR - mass).clamp_(min=0)
    density = mass + filling
    around = smooth(mass, SMOOTHING).clamp_(min=DENSITY_FLOOR)
    velocity = torch.empty(3, n, n, n, device=mass.device)
    dispersion = torch.zeros_like(mass)
    for axis, momenta in enumerate(species.momenta):
        speeds = momenta * (simulation.speed / a)
        current = deposit(species.positions, n, speeds).div_(simulation.particles_per_cell)
        squares = deposit(species.positions, n, speeds.square()).div_(simulation.particles_per_cell)
        dispersion += (squares - current.square() / mass.clamp(min=1e-12)).clamp_(min=0) / density / 3
        velocity[axis] = (current + filling * smooth(current, SMOOTHING) / around) / density
    return density.float(), velocity, dispersion.float()


def simulate(
    simulation: Simulation, device: torch.device, report: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Tensor, Tensor]:
    """Fields of a box in physical units: dark matter (4, n, n, n) and gas (5, n, n, n), float32.

    Density in mean ones and three velocities in km/s of both; the temperature of the gas in K is that of its density
    plus what the dispersion of its velocities, where flows meet, would be as heat; it is never below that of the
    microwave background.
    """
    with torch.no_grad():
        start = initial_conditions(simulation, linear_spectrum(simulation, device))
        dark, gas = evolve(simulation, start, report)
        density, velocity, _ = density_and_velocity(simulation, dark)
        nbody = torch.cat([density[None], velocity])
        density, velocity, dispersion = density_and_velocity(simulation, gas)
        heat = dispersion.mul_(simulation.molecular_weight / BOLTZMANN_PER_PROTON)
        temperature = polytropic_temperature(simulation, density) + heat
        temperature.clamp_(min=simulation.cosmology.t_cmb * (1 + simulation.redshift))
        return nbody, torch.cat([density[None], velocity, temperature[None]])
