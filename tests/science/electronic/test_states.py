"""Fermi level, electrons, band energy and entropy of densities of states: real ones, and ones with a known answer."""

import json
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoscale.science.electronic.calculation import read_calculation
from isoscale.science.electronic.integrals import BOLTZMANN, EnergyGrid, Quadrature
from isoscale.science.electronic.states import fill, fill_with

BERYLLIUM = EnergyGrid(11, 2.5, -5.0)
EXPECTED = [
    (10.240735437299623, 12.447077138958328, -0.0006551579581015896),
    (10.149207154844254, 12.279480141239915, -0.0006617246962307811),
    (10.225296014348924, 12.417710872861285, -0.0006561152508533014),
    (10.228526936788498, 12.424254288595503, -0.0006559579698050969),
]
"""Fermi level, band energy and entropy term of the four snapshots, in eV, as MALA 1.4.0 computes them."""


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("number", range(4))
def test_the_real_snapshots_have_the_energies_that_the_field_s_code_finds(number: int, shared: Path):
    folder = shared / "data/electronic/Be2"
    known = read_calculation(folder / f"Be_snapshot{number}.info.json")
    ldos = np.load(folder / f"Be_snapshot{number}.out.npy").astype(np.float64).reshape(-1, 11)
    dos = torch.as_tensor(ldos.sum(0) * known.volume / len(ldos))[None]
    found = fill_with(dos, column(known.num_electrons), Quadrature(BERYLLIUM, [known.temperature]))
    values = (found.fermi.item(), found.band_energy.item(), found.entropy.item())
    assert values == pytest.approx(EXPECTED[number], abs=1e-9)
    assert found.num_electrons.item() == pytest.approx(known.num_electrons, abs=1e-12)


def exact(grid: EnergyGrid, number: int, fermi: float, temperature: float) -> tuple[float, float, float]:
    """The integrals of one hat to many digits."""
    kt = BOLTZMANN * temperature
    middle = grid.offset + number * grid.spacing
    around = [fermi + kt * x for x in range(-60, 61, 4) if abs(fermi + kt * x - middle) < grid.spacing]
    edges = sorted({middle - grid.spacing, middle, middle + grid.spacing, *around})

    def integral(function):
        hat = lambda energy: 1 - abs(energy - middle) / grid.spacing  # noqa: E731
        return float(mpmath.quad(lambda energy: hat(energy) * function(energy), edges))

    def occupation(energy):
        return 1 / (1 + mpmath.exp((energy - fermi) / kt))

    def entropy(energy):
        f = occupation(energy)
        return kt * (f * mpmath.log(f) + (1 - f) * mpmath.log(1 - f)) if 0 < f < 1 else mpmath.mpf(0)

    return integral(occupation), integral(lambda energy: energy * occupation(energy)), integral(entropy)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [300.0, 3000.0, 30000.0])
@pytest.mark.parametrize("grid", [EnergyGrid(6, 2.5, -5.0), EnergyGrid(40, 0.1, -1.0)])
def test_the_weights_are_the_integrals_of_hats(grid: EnergyGrid, temperature: float):
    fermi = grid.offset + 0.37 * grid.spacing * (grid.size - 1)
    weights = Quadrature(grid, [temperature]).weights(column(fermi))
    with mpmath.workdps(30):
        for number in range(0, grid.size, max(1, grid.size // 5)):
            found = [w[0, number].item() for w in (weights.electrons, weights.band_energy, weights.entropy)]
            assert found == pytest.approx(exact(grid, number, fermi, temperature), abs=1e-12)


@pytest.mark.slow
def test_energies_move_with_the_density_of_states_as_their_derivative_says():
    quadrature = Quadrature(EnergyGrid(11, 0.5, -2.0), [1000.0, 5000.0])
    dos = torch.rand(2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    electrons = column(1.0, 2.0)
    for what in ("fermi", "band_energy", "entropy"):
        assert torch.autograd.gradcheck(
            lambda states: getattr(fill_with(states, electrons, quadrature), what),  # noqa: B023
            dos.requires_grad_(),
            atol=1e-7,
        )


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(0.01, 10), min_size=3, max_size=30), st.floats(0.02, 0.98), st.floats(10, 50000),
    st.floats(0.05, 3),
)  # fmt: skip
def test_states_hold_the_electrons_that_they_are_filled_with(
    values: list[float], share: float, temperature: float, spacing: float
):
    grid = EnergyGrid(len(values), spacing, -1.0)
    quadrature = Quadrature(grid, [temperature])
    dos = column(*values)[None]
    ends = column(grid.offset), column(grid.offset + grid.spacing * (grid.size - 1))
    fewest, most = (fill(dos, end, quadrature).num_electrons.item() for end in ends)
    wanted = column(fewest + share * (most - fewest))
    found = fill_with(dos, wanted, quadrature)
    assert found.num_electrons.item() == pytest.approx(wanted.item(), rel=1e-10)
    assert found.entropy.item() <= 0


@pytest.mark.parametrize("electrons", [0.0, 1e3])
def test_a_fermi_level_that_is_not_on_the_grid_is_not_made_up(electrons: float):
    found = fill_with(torch.ones(1, 11, dtype=torch.float64), column(electrons), Quadrature(BERYLLIUM, [300.0]))
    assert found.fermi.isnan().all() and found.band_energy.isnan().all()


def test_a_gap_is_filled_up_to_somewhere_in_it():
    dos = column(*[1.0] * 8, *[0.0] * 8, *[1.0] * 8)[None].requires_grad_()
    quadrature = Quadrature(EnergyGrid(24, 0.5, -4.0), [300.0])
    below = fill(dos.detach(), column(1.5), quadrature)
    found = fill_with(dos, below.num_electrons, quadrature)
    assert 0.0 < found.fermi.item() < 4.0
    assert found.band_energy.item() == pytest.approx(below.band_energy.item(), abs=1e-12)
    (slope,) = torch.autograd.grad(found.band_energy.sum(), dos)
    assert slope.isfinite().all()


def test_systems_are_filled_together_as_they_are_alone():
    generator = torch.Generator().manual_seed(1)
    dos = torch.rand(3, 11, dtype=torch.float64, generator=generator) + 0.1
    temperatures, electrons = [300.0, 900.0, 12000.0], column(2.0, 5.0, 3.0)
    together = fill_with(dos, electrons, Quadrature(BERYLLIUM, temperatures))
    for number, temperature in enumerate(temperatures):
        alone = fill_with(dos[[number]], electrons[[number]], Quadrature(BERYLLIUM, [temperature]))
        assert together.band_energy[number].item() == pytest.approx(alone.band_energy.item(), abs=1e-11)


def test_a_calculation_is_read_from_either_file(shared: Path):
    folder = shared / "data/electronic/Be2"
    info, output = (read_calculation(folder / name) for name in ("Be_snapshot0.info.json", "Be_snapshot0.out"))
    assert (info.num_atoms, info.num_electrons, info.grid) == (output.num_atoms, output.num_electrons, output.grid)
    assert info.volume == pytest.approx(output.volume, rel=1e-5)
    assert info.temperature == pytest.approx(output.temperature, rel=1e-6)
    assert json.loads((folder / "Be_snapshot0.info.json").read_text())["temperature"] == info.temperature
