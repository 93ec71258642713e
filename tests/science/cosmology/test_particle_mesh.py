"""Deposits and interpolation: mass is kept exactly, order does not matter, and a particle does not pull itself."""

import math

import pytest
import torch

from isoscale.science.cosmology import particle_mesh
from isoscale.science.cosmology.particle_mesh import (
    WHOLE,
    corners,
    deposit,
    derivative,
    interpolate,
    inverse_laplacian,
    smooth,
)

N = 8


def particles(count: int = 5000, seed: int = 0) -> torch.Tensor:
    return N * torch.rand(3, count, generator=torch.Generator().manual_seed(seed))


def test_the_weights_of_a_particle_are_whole():
    positions = torch.cat(
        [particles(), torch.tensor([[0.0, 7.9999, 8.0], [0.5, 7.99999999, 0.0], [3.0, 1e-7, 7.5]])], 1
    )
    points, weights = corners(positions, N)
    assert (weights.sum(0) == WHOLE).all() and (weights >= 0).all()
    assert points.min() >= 0 and points.max() < N**3


def test_mass_is_kept_exactly():
    assert deposit(particles(), N).sum().item() == 5000


def test_a_particle_is_shared_by_the_points_around_it():
    mesh = deposit(torch.tensor([[1.25], [7.5], [3.0]]), N)
    expected = torch.zeros(N, N, N, dtype=torch.float64)
    expected[1, 7, 3] = expected[1, 0, 3] = 0.375
    expected[2, 7, 3] = expected[2, 0, 3] = 0.125
    assert torch.equal(mesh, expected)


def test_sums_have_the_same_bits_in_any_order_and_any_chunks(monkeypatch: pytest.MonkeyPatch):
    positions, values = particles(), torch.randn(5000, generator=torch.Generator().manual_seed(1))
    shuffled = torch.randperm(5000, generator=torch.Generator().manual_seed(2))
    whole = deposit(positions, N), deposit(positions, N, values)
    monkeypatch.setattr(particle_mesh, "CPU_CHUNK", 77)
    again = deposit(positions[:, shuffled], N), deposit(positions[:, shuffled], N, values[shuffled])
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))


def test_values_are_kept_to_rounding_whatever_their_size():
    for size in (1e-6, 1.0, 3e5):
        values = size * torch.randn(5000, generator=torch.Generator().manual_seed(1))
        assert deposit(particles(), N, values).sum().item() == pytest.approx(values.double().sum().item(), rel=1e-8)
    assert deposit(particles(), N, torch.zeros(5000)).abs().max() == 0


def test_interpolation_is_the_transpose_of_a_deposit():
    generator = torch.Generator().manual_seed(3)
    mesh = torch.randn(N, N, N, 3, generator=generator)
    values = torch.randn(5000, generator=generator)
    found = interpolate(mesh, particles()).double() @ values.double()
    expected = torch.einsum("xyz,xyzc->c", deposit(particles(), N, values), mesh.double())
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_derivatives_and_potentials_of_a_wave_are_those_of_calculus():
    x = torch.arange(N, dtype=torch.float64)
    k = 2 * math.pi / N
    wave = torch.sin(k * (x[:, None, None] + 2 * x))[:, :].expand(N, N, N).contiguous()
    spectrum = torch.fft.rfftn(wave)
    slope = torch.cos(k * (x[:, None, None] + 2 * x)).expand(N, N, N)
    assert torch.allclose(derivative(spectrum, 0), k * slope, atol=1e-6)
    assert torch.allclose(derivative(spectrum, 2), 2 * k * slope, atol=1e-6)
    assert torch.allclose(derivative(spectrum, 1), torch.zeros_like(wave), atol=1e-6)
    potential = torch.fft.irfftn(inverse_laplacian(spectrum), s=(N, N, N))
    assert torch.allclose(potential, -wave / (5 * k * k), atol=1e-6)


def test_smoothing_keeps_the_mean_and_damps_a_wave():
    x = torch.arange(N, dtype=torch.float64)
    wave = 3 + torch.cos(2 * math.pi / N * x)[:, None, None].expand(N, N, N)
    expected = 3 + (wave - 3) * math.exp(-0.5 * (2 * math.pi / N * 1.5) ** 2)
    assert torch.allclose(smooth(wave, 1.5), expected, atol=1e-6)
