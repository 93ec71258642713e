"""The simulation against theory: linear power, growth, a pancake, conserved quantities, and gas against dark matter."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isoscale.errors import UserError
from isoscale.science.cosmology.particle_mesh import deposit, derivative, inverse_laplacian, wave_numbers
from isoscale.science.cosmology.simulation import (
    DENSITY_FLOOR,
    Simulation,
    Species,
    density_and_velocity,
    evolve,
    initial_conditions,
    kick,
    linear_spectrum,
    simulate,
)
from isoscale.science.cosmology.statistics import finish_power, finish_spectra, power_sums, spectra_sums
from isoscale.science.cosmology.theory import top_hat

CPU = torch.device("cpu")
SMALL = Simulation(cells=16, particles_per_cell=1, steps=5)
LARGE_SCALES = Simulation(cells=32, particles_per_cell=1, cell_size=8.0)
"""A box of 256 Mpc/h, whose long waves are linear to the end."""


def linear_field(simulation: Simulation) -> Tensor:
    m = simulation.lattice
    return torch.fft.irfftn(linear_spectrum(simulation, CPU), s=(m, m, m))


def start(simulation: Simulation) -> Species:
    return initial_conditions(simulation, linear_spectrum(simulation, CPU))


def copy(species: Species) -> Species:
    return Species(*(each.clone() for each in species))


def expected_power(simulation: Simulation) -> Tensor:
    """The mean of the theory over the waves of each bin, which is steep where a bin is wide."""
    m = simulation.lattice
    x, y, z = (k.double() for k in wave_numbers(m, CPU))
    k = (x * x + y * y + z * z).sqrt()
    power = simulation.cosmology.power(k * (2 * math.pi / simulation.box_size))
    highest = torch.maximum(torch.maximum(x.abs(), y.abs()), z) * 2 == m
    weight = torch.where((z > 0) & (2 * z < m), 2.0, 1.0).double().expand_as(k)
    bins, power = k.round().long().flatten(), torch.where(highest, 0, power)
    sums, counts = (torch.bincount(bins, each.flatten()) for each in (weight * power, weight))
    return (sums / counts)[1 : m // 2 + 1]


def test_the_linear_field_has_the_power_of_the_theory_within_the_error_of_a_sample():
    simulation = replace(LARGE_SCALES, cells=64)
    fields = torch.stack([linear_field(replace(simulation, seed=seed)) for seed in range(4)])
    sums, counts = power_sums(fields[:, None])
    _, power = finish_power(sums, counts, simulation.box_size, 64)
    spread = (2 / counts[1:33]).sqrt()
    deviation = (power[0] / expected_power(simulation) - 1) / spread
    assert deviation.abs().max() < 4
    assert deviation.square().mean() < 2


def test_spheres_of_the_linear_field_have_the_wanted_sigma_8():
    simulation = replace(LARGE_SCALES, cells=64, cell_size=4.0)
    x, y, z = wave_numbers(64, CPU)
    sphere = top_hat((x * x + y * y + z * z).sqrt() * (2 * math.pi / simulation.box_size * 8))
    found = []
    for seed in range(4):
        field = torch.fft.irfftn(linear_spectrum(replace(simulation, seed=seed), CPU) * sphere, s=(64, 64, 64))
        found.append(field.double().square().mean())
    assert math.sqrt(sum(found) / 4) == pytest.approx(0.83, rel=0.03)


def test_a_wave_is_the_same_on_a_finer_lattice():
    coarse, fine = (linear_spectrum(replace(SMALL, particles_per_cell=count), CPU) for count in (1, 8))
    k = [0, 1, 2, 3, 4, 5, 6, 7, -7, -6, -5, -4, -3, -2, -1]
    inner = fine[k][:, k][:, :, :8] / 8
    assert torch.allclose(coarse[k][:, k][:, :, :8], inner, rtol=1e-5)
    half = replace(SMALL, cells=32, cell_size=SMALL.cell_size / 2)
    assert torch.equal(linear_spectrum(half, CPU), fine)


def test_the_linear_field_is_real():
    spectrum = linear_spectrum(SMALL, CPU)
    again = torch.fft.rfftn(torch.fft.irfftn(spectrum, s=(16, 16, 16)))
    assert torch.allclose(again, spectrum, rtol=1e-4, atol=1e-4 * spectrum.abs().max().item())


def test_the_same_seed_gives_the_same_bits_and_another_one_another_box():
    one, again, other = (simulate(replace(SMALL, seed=seed), CPU) for seed in (3, 3, 4))
    assert all(torch.equal(first, second) for first, second in zip(one, again, strict=True))
    assert not any(torch.equal(first, second) for first, second in zip(one, other, strict=True))


@pytest.mark.slow
def test_the_number_of_threads_does_not_change_bits():
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(simulate(replace(SMALL, cells=32, steps=1), CPU))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def against_linear(simulation: Simulation, spectrum: Tensor, positions: Tensor, growth: float) -> tuple[Tensor, Tensor]:
    """Amplitude in units of linear theory, and correlation with it, of the density in each bin of wave numbers.

    The linear field is seen as the particles are: half a cell beside the mesh, and through the window of a deposit.
    """
    n = simulation.cells
    numbers = wave_numbers(n, CPU)
    seen = spectrum * growth * torch.exp(-1j * math.pi / n * sum(numbers))
    for k in numbers:
        seen = seen * torch.sinc(k / n) ** 2
    linear = torch.fft.irfftn(seen, s=(n, n, n))[None, None]
    density = deposit(positions, n).float()[None, None]
    spectra = finish_spectra(*spectra_sums(density, linear), simulation.box_size, n)
    return spectra.ratio[0].sqrt(), spectra.correlation[0]


def test_initial_conditions_have_the_linear_density_and_velocity():
    simulation = LARGE_SCALES
    spectrum = linear_spectrum(simulation, CPU)
    found = initial_conditions(simulation, spectrum)
    a, cosmology = 0.02, simulation.cosmology
    amplitude, correlation = against_linear(simulation, spectrum, found.positions, cosmology.growth(a))
    assert (amplitude[:4] - 1).abs().max() < 0.01 and correlation[:4].min() > 0.999
    velocity = -derivative(inverse_laplacian(spectrum), 0).flatten()
    factor = a**2 * cosmology.expansion(a) * cosmology.growth_rate(a) * cosmology.growth(a)
    assert (found.momenta[0] - factor * velocity).std() < 0.03 * (factor * velocity).std()


def test_second_order_displacements_are_those_of_two_crossed_waves():
    """For φ = A cos(kx) + B cos(ky), φ_xx φ_yy - φ_xy² is A B k⁴ cos(kx) cos(ky)."""
    simulation = replace(SMALL, cells=16)
    k, growth = 2 * math.pi / 16, simulation.cosmology.growth(0.02)
    x = torch.arange(16.0)[:, None, None].expand(16, 16, 16)
    y = x.transpose(0, 1)
    density = 8.0 * torch.cos(k * x) + 6.0 * torch.cos(k * y)
    found = initial_conditions(simulation, torch.fft.rfftn(density)).positions.view(3, 16, 16, 16)[0]
    first = -growth * 8.0 / k * torch.sin(k * x)
    second = -3 / 7 * growth**2 * 8.0 * 6.0 / (2 * k) * torch.sin(k * x) * torch.cos(k * y)
    apart = found - (x + 0.5) - first
    apart -= 16 * torch.round(apart / 16)
    assert second.abs().max() > 0.01
    assert torch.allclose(apart, second, atol=1e-2 * second.abs().max().item())


@pytest.mark.slow
def test_long_waves_grow_by_the_linear_growth_factor():
    """To 2 %, for waves of 8 to 32 cells; what is missing is the mesh's."""
    simulation = LARGE_SCALES
    spectrum = linear_spectrum(simulation, CPU)
    dark, _ = evolve(simulation, initial_conditions(simulation, spectrum))
    growth = simulation.cosmology.growth(1 / (1 + simulation.redshift))
    amplitude, correlation = against_linear(simulation, spectrum, dark.positions, growth)
    assert (amplitude[:4] - 1).abs().max() < 0.02 and abs(amplitude[0] - 1) < 0.005
    assert correlation[:4].min() > 0.995


def pancake_errors(n: int) -> tuple[float, float]:
    """Deviations of positions and momenta at 80 % of the way to collapse, in amplitudes of a wave as long as the box.

    The analytic solution is x = q + D ψ(q) with ψ = -A/k sin(kq), for a linear density A cos(kq) with D A < 1.
    """
    simulation = Simulation(cells=n, particles_per_cell=1, temperature=0)
    cosmology, k = simulation.cosmology, 2 * math.pi / n
    growth = cosmology.growth(0.25)
    q = torch.arange(n, dtype=torch.float64)
    density = 0.8 / growth * torch.cos(k * q)[:, None, None].expand(n, n, n)
    displacement = (-0.8 / k * torch.sin(k * q))[:, None, None]
    dark, _ = evolve(simulation, initial_conditions(simulation, torch.fft.rfftn(density.float())))
    x, momenta = dark.positions.view(3, n, n, n)[0].double(), dark.momenta.view(3, n, n, n).double()
    apart = x - (q + 0.5)[:, None, None] - displacement
    apart -= n * torch.round(apart / n)
    rate = 0.25**2 * cosmology.expansion(0.25) * cosmology.growth_rate(0.25)
    assert momenta[1:].abs().max() < 1e-4 * momenta[0].abs().max()
    amplitude = float(displacement.abs().max())
    return float(apart.std()) / amplitude, float((momenta[0] / rate - displacement).std()) / amplitude


@pytest.mark.slow
def test_a_plane_wave_moves_as_zeldovich_says_until_it_collapses():
    place, momentum = pancake_errors(32)
    assert place < 0.025 and momentum < 0.025
    coarse_place, coarse_momentum = pancake_errors(16)
    assert place < coarse_place / 2 and momentum < coarse_momentum / 2  # what is left is the mesh's


def test_mass_is_kept_exactly_to_the_end():
    dark, gas = evolve(SMALL, start(SMALL))
    for species in (dark, gas):
        assert deposit(species.positions, 16).sum().item() == 16**3


@pytest.mark.parametrize("temperature", [0.0, 1.2e4])
def test_a_kick_does_not_push_the_whole_box(temperature: float):
    simulation = replace(SMALL, temperature=temperature)
    dark, gas = evolve(simulation, start(simulation))
    before = [copy(species) for species in (dark, gas)]
    kick(simulation, dark, gas, gravity=0.1, duration=0.0)
    baryons = simulation.cosmology.omega_b / simulation.cosmology.omega_m
    changes = [
        share * (now.momenta - then.momenta).double()
        for share, now, then in zip((1 - baryons, baryons), (dark, gas), before, strict=True)
    ]
    total = sum(change.sum(1) for change in changes)
    size = sum(change.abs().sum() for change in changes)
    assert size > 0 and total.abs().max() < 1e-6 * size


def test_momentum_is_kept_from_the_beginning_to_the_end():
    simulation = replace(SMALL, temperature=0)
    dark, _ = evolve(simulation, start(simulation))
    assert dark.momenta.double().sum(1).abs().max() < 1e-5 * dark.momenta.double().abs().sum()


def test_gas_without_pressure_is_dark_matter_to_the_bit():
    dark, gas = evolve(replace(SMALL, temperature=0), start(SMALL))
    assert torch.equal(dark.positions, gas.positions) and torch.equal(dark.momenta, gas.momenta)


def test_pressure_drives_gas_out_of_a_dense_place():
    simulation = replace(SMALL, particles_per_cell=8)
    n = simulation.cells
    spectrum = torch.zeros(32, 32, 17, dtype=torch.complex64)
    at_rest = initial_conditions(simulation, spectrum)
    middle = (at_rest.positions - n / 2).square().sum(0) < 9
    squeezed = torch.where(middle, n / 2 + 0.8 * (at_rest.positions - n / 2), at_rest.positions)
    dark, gas = copy(at_rest), Species(squeezed, torch.zeros_like(squeezed))
    kick(simulation, dark, gas, gravity=0.0, duration=1e-3)
    outward = ((squeezed - n / 2) * gas.momenta).sum(0)
    assert outward[middle].mean() > 0 and dark.momenta.abs().max() == 0
    sound = simulation.gamma * 8.254e-3 * simulation.temperature / simulation.molecular_weight
    assert math.sqrt(sound) == pytest.approx(16.1, rel=0.01)  # km/s in gas of 12,000 K


def gas_against_dark_matter(simulation: Simulation) -> tuple[Tensor, Tensor]:
    """Ratio of power and correlation in each bin of wave numbers."""
    n = simulation.cells
    both = evolve(simulation, start(simulation))
    dark, gas = (deposit(species.positions, n).float()[None, None] for species in both)
    spectra = finish_spectra(*spectra_sums(gas, dark), simulation.box_size, n)
    return spectra.ratio[0], spectra.correlation[0]


@pytest.mark.slow
def test_gas_is_dark_matter_on_large_scales_and_smoother_on_small_ones():
    ratio, correlation = gas_against_dark_matter(Simulation(cells=32, particles_per_cell=1))
    assert ratio[0] > 0.8 and correlation[0] > 0.99
    assert (ratio[1:8].diff() < 0).all() and ratio[8:].max() < 0.2
    ratio, correlation = gas_against_dark_matter(Simulation(cells=32, particles_per_cell=1, cell_size=0.5))
    assert ratio[0] > 0.99 and correlation[0] > 0.9999


@pytest.mark.slow
def test_pressure_smooths_small_waves_as_linear_theory_says():
    """δ_gas/δ_dark = 1 - 0.3 x + 0.043 x² with x = k²/k_J², in a universe of matter with gas of one temperature.

    That is the growing solution of δ'' + 2Hδ' = 3/2 H² (δ_dark - x δ_gas): x grows as the scale factor does.
    """
    simulation = Simulation(cells=32, particles_per_cell=1, cell_size=0.1)
    waves = torch.arange(1, 5)
    phases = 2 * math.pi / 32 * waves[:, None] * torch.arange(32)
    density = 0.05 * torch.cos(phases + waves[:, None]).sum(0)[:, None, None].expand(32, 32, 32)
    species = evolve(simulation, initial_conditions(simulation, torch.fft.rfftn(density)))
    dark, gas = (torch.fft.rfft(deposit(each.positions, 32).mean((1, 2))).abs()[1:5] for each in species)
    sound = simulation.gamma * 8.254e-3 * simulation.temperature / simulation.molecular_weight
    jeans = math.sqrt(1.5 * 0.31 * 100**2 / 0.25 / sound)
    x = (2 * math.pi / simulation.box_size * waves / jeans) ** 2
    assert x[0] < 0.06 and x[3] > 0.8
    error = (1 - gas / dark) / (0.3 * x - 0.043 * x**2) - 1
    assert abs(error[0]) < 0.03 and error.abs().max() < 0.1  # a wave of 8 cells feels less of its pressure


def test_fields_are_finite_and_have_mass_velocities_and_temperatures_that_make_sense():
    simulation = replace(SMALL, cells=24)
    nbody, hydro = simulate(simulation, CPU)
    assert nbody.shape == (4, 24, 24, 24) and hydro.shape == (5, 24, 24, 24)
    assert nbody.dtype == hydro.dtype == torch.float32
    for fields in (nbody, hydro):
        assert fields.isfinite().all() and fields[0].min() >= DENSITY_FLOOR * 0.999
        assert fields[0].mean().item() == pytest.approx(1, abs=5e-3)  # the floor adds a little
        assert fields[1:4].abs().max() < 500
    polytrope = 1.2e4 * hydro[0] ** 0.55
    assert (hydro[4] >= 0.999 * polytrope).all() and hydro[4].max() < 1e8


def test_velocities_of_a_uniform_flow_are_its_own_without_dispersion():
    simulation = SMALL
    at_rest = initial_conditions(simulation, torch.zeros(16, 16, 9, dtype=torch.complex64))
    flow = torch.tensor([3.0, -2.0, 1.0])[:, None].expand_as(at_rest.momenta).contiguous()
    thin = (at_rest.positions[0] - 8).abs() > 2  # leaves cells empty, which move along
    density, velocity, dispersion = density_and_velocity(simulation, Species(at_rest.positions[:, thin], flow[:, thin]))
    expected = flow[:, :1, None, None] * (simulation.speed / 0.25)
    assert (density <= DENSITY_FLOOR).any()
    assert torch.allclose(velocity, expected.expand_as(velocity), rtol=1e-4)
    assert dispersion.abs().max() < 1e-3


def test_streams_that_meet_have_the_dispersion_of_their_velocities():
    at_rest = initial_conditions(SMALL, torch.zeros(16, 16, 9, dtype=torch.complex64))
    speed = torch.tensor([1.0, 0.0, 0.0])[:, None].expand_as(at_rest.momenta)
    both = Species(torch.cat([at_rest.positions] * 2, 1), torch.cat([speed, -speed], 1))
    _, velocity, dispersion = density_and_velocity(SMALL, both)
    assert velocity.abs().max() < 1e-6
    assert torch.allclose(dispersion, torch.full_like(dispersion, (SMALL.speed / 0.25) ** 2 / 3))


@pytest.mark.parametrize(
    "wrong", [{"cells": 15}, {"particles_per_cell": 2}, {"redshift": 50}, {"steps": 0}, {"gamma": 1.0}, {"cells": 0}]
)
def test_what_cannot_be_simulated_is_refused_by_name(wrong: dict):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Simulation(**wrong)
