"""Statistics of fields: power where it belongs, sums that add, and no dependence on how a batch is cut."""

import math

import pytest
import torch
from torch import Tensor

from isoscale.science.cosmology.statistics import (
    error_sums,
    finish_errors,
    finish_histogram,
    finish_power,
    finish_spectra,
    histogram_sums,
    joint_histogram_sums,
    power_sums,
    spectra_sums,
)

N = 16


def noise(batch: int = 4, fields: int = 2, n: int = N, seed: int = 0) -> Tensor:
    return torch.randn(batch, fields, n, n, n, generator=torch.Generator().manual_seed(seed))


def plane_wave(vector: tuple[int, int, int], n: int = N) -> Tensor:
    x = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    phase = vector[0] * x[:, None, None] + vector[1] * x[:, None] + vector[2] * x
    return torch.cos(phase + 0.3)[None, None]


@pytest.mark.parametrize("vector", [(1, 0, 0), (0, 3, 0), (0, 0, 5), (2, -3, 1), (-1, 2, -4)])
def test_a_plane_wave_has_its_power_in_the_bin_of_its_wave_number(vector: tuple[int, int, int]):
    sums, counts = power_sums(plane_wave(vector))
    bin_ = round(math.sqrt(sum(k * k for k in vector)))
    assert sums[0, bin_].item() == pytest.approx(0.5)
    assert sums[0].sum().item() == pytest.approx(0.5)
    assert counts.sum().item() == N**3


def test_all_waves_together_have_the_mean_square_of_the_field():
    fields = noise().double()
    sums, _ = power_sums(fields)
    assert torch.allclose(sums.sum(1), fields.square().mean((2, 3, 4)).sum(0), rtol=1e-12)


def test_an_odd_mesh_counts_every_wave_once():
    fields = noise(n=9).double()
    sums, counts = power_sums(fields)
    assert counts.sum().item() == 4 * 9**3
    assert torch.allclose(sums.sum(1), fields.square().mean((2, 3, 4)).sum(0), rtol=1e-12)


def test_white_noise_has_the_same_power_on_all_scales_with_and_without_a_window():
    fields = noise(batch=16, fields=1)
    for hann in (False, True):
        sums, counts = power_sums(fields, hann)
        k, power = finish_power(sums, counts, box_size=2.0, n=N)
        expected = 2.0**3 / N**3
        assert k[0].item() == pytest.approx(math.pi) and len(k) == N // 2
        spread = (2 / counts[3 : N // 2 + 1]).sqrt() * (4 if hann else 1)  # a window makes neighbours alike
        assert ((power[0, 2:] / expected - 1).abs() < 4 * spread).all()


def test_a_window_keeps_a_slope_across_a_crop_out_of_short_waves():
    slope = torch.linspace(-1, 1, 32, dtype=torch.float64).view(1, 1, 32, 1, 1).expand(1, 1, 32, 32, 32)
    plain, windowed = (power_sums(slope, hann)[0][0, 8:].sum() for hann in (False, True))
    assert windowed < 1e-3 * plain


def test_a_window_leaves_nothing_of_a_constant():
    sums, _ = power_sums(torch.full((1, 1, N, N, N), 3.0, dtype=torch.float64), hann=True)
    assert sums.abs().max() < 1e-25


def test_equal_fields_correlate_on_all_scales_and_have_the_ratio_one():
    fields = noise()
    found = finish_spectra(*spectra_sums(fields, fields), box_size=1.0, n=N)
    assert torch.allclose(found.correlation, torch.ones_like(found.correlation), rtol=1e-12)
    assert torch.equal(found.ratio, torch.ones_like(found.ratio))


def test_scaled_and_opposed_fields_have_their_ratio_and_correlation():
    fields = noise().double()
    found = finish_spectra(*spectra_sums(-2 * fields, fields), box_size=1.0, n=N)
    assert torch.allclose(found.ratio, torch.full_like(found.ratio, 4.0))
    assert torch.allclose(found.correlation, torch.full_like(found.correlation, -1.0))


def test_independent_fields_do_not_correlate():
    found = finish_spectra(*(pair := spectra_sums(noise(seed=1), noise(seed=2))), box_size=1.0, n=N)
    spread = (2 / pair[1][1 : N // 2 + 1]).sqrt()
    assert (found.correlation.abs() < 4 * spread).all()


MEASURES = {
    "power": power_sums,
    "power in a window": lambda fields: power_sums(fields, hann=True),
    "spectra": lambda fields: spectra_sums(fields, fields.flip(1)),
    "histogram": lambda fields: histogram_sums(fields, -2, 2, 10),
    "joint histogram": lambda fields: joint_histogram_sums(fields[:, 0], fields[:, 1], (-2, 2), (-1, 3), 8),
    "errors": lambda fields: error_sums(fields, fields.flip(1)),
}


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_sums_over_two_parts_are_those_of_the_whole(measure):
    fields = noise(batch=5)
    whole, parts = measure(fields), [measure(fields[:2]), measure(fields[2:])]
    for total, one, other in zip(whole, *parts, strict=True):
        assert total.dtype == torch.float64
        assert torch.allclose(total, one + other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_measuring_twice_gives_the_same_bits(measure):
    fields = noise()
    for one, other in zip(measure(fields), measure(fields), strict=True):
        assert torch.equal(one, other)


def test_a_histogram_is_that_of_numpy_and_counts_outliers_at_its_ends():
    values = noise().clamp(-2.999, 2.999)
    sums, counts = histogram_sums(values, -3, 3, 12)
    assert torch.equal(sums, torch.histogram(values, 12, range=(-3, 3)).hist.double())
    assert finish_histogram(sums, counts, (-3, 3)).sum().item() * 0.5 == pytest.approx(1)
    ends, _ = histogram_sums(torch.tensor([-9.0, 9.0, 9.0]), -1, 1, 4)
    assert ends.tolist() == [1, 0, 0, 2]


def test_a_joint_histogram_has_those_of_both_fields_at_its_margins():
    x, y = noise(seed=1), noise(seed=2)
    sums, counts = joint_histogram_sums(x, y, (-2, 2), (-1, 3), 8)
    assert torch.equal(sums.sum(1), histogram_sums(x, -2, 2, 8)[0])
    assert torch.equal(sums.sum(0), histogram_sums(y, -1, 3, 8)[0])
    density = finish_histogram(sums, counts, (-2, 2), (-1, 3))
    assert density.sum().item() * 0.5 * 0.5 == pytest.approx(1)


def test_what_is_not_a_number_breaks_no_histogram_and_half_precision_no_spectrum():
    sums, counts = histogram_sums(torch.tensor([math.nan, math.inf, -math.inf]), 0, 1, 2)
    assert sums.tolist() == [2, 1] and counts == 3
    fields = noise()
    assert torch.equal(power_sums(fields.bfloat16())[0], power_sums(fields.bfloat16().float())[0])


def test_errors_and_correlation_are_those_of_their_definitions():
    true = noise(seed=1) + 5
    predicted = true + 0.3 * noise(seed=2)
    error, correlation = finish_errors(*error_sums(predicted, true))
    for field in range(2):
        pair = torch.stack([predicted[:, field].flatten(), true[:, field].flatten()]).double()
        assert error[field].item() == pytest.approx((pair[0] - pair[1]).abs().mean().item())
        assert correlation[field].item() == pytest.approx(torch.corrcoef(pair)[0, 1].item(), rel=1e-9)


def test_float64_sums_see_what_float32_would_lose():
    fields = torch.ones(1, 1, N, N, N)
    fields[0, 0, 0, 0, 0] = 1e8
    sums, _ = error_sums(fields, torch.zeros_like(fields))
    assert sums[0, 1].item() == 1e8 + N**3 - 1


def test_bins_end_at_the_corners_of_the_mesh():
    sums, counts = power_sums(noise())
    assert sums.shape == (2, round(math.sqrt(3) * N / 2) + 1) and len(counts) == sums.shape[1]
