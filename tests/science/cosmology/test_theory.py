"""Linear theory against limits that are known, and numbers that others have published."""

import math

import pytest
import torch

from isoscale.science.cosmology.theory import Cosmology, top_hat

COSMOLOGY = Cosmology()


def test_the_power_spectrum_has_the_wanted_sigma_8():
    assert COSMOLOGY.sigma(8.0) == pytest.approx(0.83, rel=1e-12)
    k = torch.logspace(-4, 2, 200_001, dtype=torch.float64)
    variance = torch.trapezoid(k**2 / (2 * math.pi**2) * COSMOLOGY.power(k) * top_hat(8 * k) ** 2, k)
    assert math.sqrt(variance) == pytest.approx(0.83, rel=1e-4)


def test_the_power_spectrum_bends_from_its_primordial_slope_to_that_of_small_scales():
    k = torch.tensor([1e-5, 1.01e-5, 0.016, 30.0, 30.3, 0.0], dtype=torch.float64)
    power = COSMOLOGY.power(k)
    assert math.log(power[1] / power[0]) / math.log(1.01) == pytest.approx(0.96, abs=2e-3)
    assert -3 < math.log(power[4] / power[3]) / math.log(1.01) < -2.4
    around = COSMOLOGY.power(torch.logspace(-3, 0, 301, dtype=torch.float64))
    assert 0.01 < 10 ** (-3 + 0.01 * int(around.argmax())) < 0.025  # the horizon when matter came to dominate
    assert power[5] == 0


def test_growth_is_the_scale_factor_in_a_universe_of_matter():
    matter = Cosmology(omega_m=1 - 1e-12)
    for a in (0.02, 0.25, 1.0):
        assert matter.growth(a) == pytest.approx(a, rel=1e-6)
        assert matter.growth_rate(a) == pytest.approx(1, rel=1e-6)


def test_growth_today_is_that_of_the_fit_of_carroll_press_and_turner():
    m, v = 0.31, 0.69
    fit = 2.5 * m / (m ** (4 / 7) - v + (1 + m / 2) * (1 + v / 70))
    assert COSMOLOGY._growth_today == pytest.approx(fit, rel=5e-3)


def test_the_growth_rate_is_the_slope_of_growth_and_time_that_of_expansion():
    for a in (0.02, 0.25, 0.9):
        step = 1e-4 * a
        slope = (COSMOLOGY.growth(a + step) - COSMOLOGY.growth(a - step)) / (2 * step) * a / COSMOLOGY.growth(a)
        assert COSMOLOGY.growth_rate(a) == pytest.approx(slope, rel=1e-5)
        rate = (COSMOLOGY.time(a + step) - COSMOLOGY.time(a - step)) / (2 * step)
        assert rate == pytest.approx(1 / (a * COSMOLOGY.expansion(a)), rel=1e-6)


def test_the_growth_rate_is_a_power_of_the_matter_fraction():
    for a in (0.25, 1.0):
        assert COSMOLOGY.growth_rate(a) == pytest.approx(COSMOLOGY.matter_fraction(a) ** 0.55, rel=1e-2)  # Linder's fit


def test_a_small_sphere_is_a_point():
    assert top_hat(torch.tensor([0.0, 0.0099, 0.0101], dtype=torch.float64)).tolist() == pytest.approx(
        [1, 1, 1], abs=1e-4
    )
