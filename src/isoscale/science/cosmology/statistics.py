"""Summary statistics of fields: power spectra, cross-correlation, histograms, errors and correlation coefficients.

Every measure is a pair of float64 tensors *(sums, counts)* on the device of the fields: pairs of batches, shards and
ranks are added, number by number, and a `finish_` function makes of the total what people plot. Fields are
(batch, fields, n, n, n). Sums are taken in a fixed order, so that they have the same bits every time.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class Spectra(NamedTuple):
    """How a prediction compares with the truth on each scale; all but `k` are (fields, bins)."""

    k: Tensor
    """Wave numbers (bins), in inverse units of the box size."""
    predicted: Tensor
    """Power spectrum P(k) of the prediction."""
    true: Tensor
    """That of the truth."""
    ratio: Tensor
    """P_pred/P_true: 1 where the prediction has as much structure."""
    correlation: Tensor
    """Cross-correlation r(k): 1 where the structure is in the right places."""


def power_sums(fields: Tensor, hann: bool = False) -> Pair:
    """Power spectrum of fields: sums (fields, bins) of |f_k|², and the number of waves (bins).

    Waves are binned by their integer wave number |k| L/2π, rounded; bin 0 is the mean. All bins together, up to the
    corners of the mesh, add up to the mean square of the field (Parseval).

    A crop of a box is not periodic, and its edges put power into all waves. `hann` takes the mean away and fades the
    field out towards the faces, sin²(πx/L) along each axis, scaled to leave the power of white noise as it is. Each
    wave is then a mean over its neighbours: bins below 3 hold power of each other and of the mean.
    """
    waves = _transform(fields, hann)
    return _binned(waves.real**2 + waves.imag**2, fields)


def spectra_sums(predicted: Tensor, true: Tensor, hann: bool = False) -> Pair:
    """Power spectra and cross power of a prediction and the truth: sums (3, fields, bins), the number of waves (bins).

    The rows are predicted, true and the real part of predicted times conjugate true; see `power_sums` for `hann`.
    """
    one, other = _transform(predicted, hann), _transform(true, hann)
    products = [first.real * second.real + first.imag * second.imag
                for first, second in ((one, one), (other, other), (one, other))]  # fmt: skip
    pairs = [_binned(product, predicted) for product in products]
    return torch.stack([sums for sums, _ in pairs]), pairs[0][1]


def finish_power(sums: Tensor, counts: Tensor, box_size: float, n: int) -> tuple[Tensor, Tensor]:
    """Wave numbers (bins) and the power spectrum P(k) (fields, bins) of an n³ mesh, from the longest wave to n/2."""
    bins = slice(1, n // 2 + 1)
    k = torch.arange(1, n // 2 + 1, dtype=torch.float64, device=sums.device) * (2 * math.pi / box_size)
    return k, sums[..., bins] / counts[bins] * box_size**3


def finish_spectra(sums: Tensor, counts: Tensor, box_size: float, n: int) -> Spectra:
    """Power spectra, their ratio and the cross-correlation on each scale of an n³ mesh."""
    k, power = finish_power(sums, counts, box_size, n)
    predicted, true, cross = power
    return Spectra(k, predicted, true, predicted / true, cross / (predicted * true).sqrt())


def _transform(fields: Tensor, hann: bool) -> Tensor:
    """Fourier transform over the last three axes, divided by the number of points; in float32 or better."""
    fields = fields.to(torch.promote_types(fields.dtype, torch.float32))
    if hann:
        n = fields.shape[-1]
        # At the middles of the cells, so that both faces fade alike; its mean square is 3/8.
        window = torch.sin(math.pi * (torch.arange(n, device=fields.device) + 0.5) / n) ** 2 / math.sqrt(3 / 8)
        window = (window[:, None, None] * window[:, None] * window).to(fields.dtype)
        mean = (fields * window).mean((-3, -2, -1), keepdim=True) / window.mean()
        fields = (fields - mean) * window
    return torch.fft.rfftn(fields, dim=(-3, -2, -1), norm="forward")


def _binned(values: Tensor, fields: Tensor) -> Pair:
    """Sums (fields, bins) over a batch and over the waves of each bin, and the number of waves."""
    order, multiplicity, lengths, num_waves = _shells(fields.shape[-1], str(fields.device))
    total = values.sum(0, dtype=torch.float64).flatten(1)[:, order] * multiplicity
    sums = torch.stack([part.sum(-1) for part in total.split(lengths, -1)], -1)
    return sums, num_waves * len(fields)


@cache
def _shells(n: int, device: str) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Waves of a real transform in the order of their bins, how often each counts, waves stored and waves of each bin.

    Those with a positive last wave number stand for their conjugates too.
    """
    full, half = torch.fft.fftfreq(n, 1 / n, dtype=torch.float64), torch.arange(n // 2 + 1, dtype=torch.float64)
    k = (full[:, None, None] ** 2 + full[:, None] ** 2 + half**2).sqrt().round().long().flatten()
    twice = torch.where((half > 0) & (2 * half < n), 2.0, 1.0).double().expand(n, n, -1).flatten()
    order = k.argsort(stable=True)
    num_waves = torch.bincount(k, twice)
    return order.to(device), twice[order].to(device), torch.bincount(k).tolist(), num_waves.to(device)


def histogram_sums(values: Tensor, low: float, high: float, bins: int) -> Pair:
    """Histogram: how many values lie in each of equal bins, and how many there are; outliers are in the outer bins."""
    return _counted(_bin(values, low, high, bins).flatten(), bins), _number(values)


def joint_histogram_sums(
    x: Tensor, y: Tensor, x_range: tuple[float, float], y_range: tuple[float, float], bins: int
) -> Pair:
    """Two-dimensional histogram (bins of x, bins of y), such as temperature against density; outliers as above."""
    joint = _bin(x, *x_range, bins) * bins + _bin(y, *y_range, bins)
    return _counted(joint.flatten(), bins * bins).view(bins, bins), _number(x)


def finish_histogram(sums: Tensor, counts: Tensor, *ranges: tuple[float, float]) -> Tensor:
    """Probability density of a histogram, one range (low, high) for each of its axes: its integral is 1."""
    area = math.prod((high - low) / bins for (low, high), bins in zip(ranges, sums.shape, strict=True))
    return sums / counts / area


def _bin(values: Tensor, low: float, high: float, bins: int) -> Tensor:
    places = ((values.double() - low) * (bins / (high - low))).floor_().clamp_(0, bins - 1)
    return places.nan_to_num_(0).long()  # what is not a number has no bin, and must not become an index


def _counted(indices: Tensor, size: int) -> Tensor:
    """How often each index is there; integers add up to the same in any order."""
    counts = torch.zeros(size, dtype=torch.int64, device=indices.device)
    return counts.index_add_(0, indices, torch.ones_like(indices)).double()


def _number(values: Tensor) -> Tensor:
    return torch.full((), values.numel(), dtype=torch.float64, device=values.device)


def error_sums(predicted: Tensor, true: Tensor) -> Pair:
    """Moments of a prediction and the truth: sums (fields, 6) and the number of voxels of a field.

    They are |p - t|, p, t, p², t² and pt, of which `finish_errors` makes mean absolute errors and correlations.
    """
    fields = zip(predicted.unbind(1), true.unbind(1), strict=True)  # one at a time, which stays in the cache
    moments = [_moments(p.double(), t.double()) for p, t in fields]
    return torch.stack(moments), _number(true[:, 0])


def _moments(p: Tensor, t: Tensor) -> Tensor:
    return torch.stack([each.sum() for each in ((p - t).abs(), p, t, p * p, t * t, p * t)])


def finish_errors(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean absolute error (L1) and Pearson's correlation coefficient, each (fields)."""
    error, p, t, pp, tt, pt = (sums / counts).unbind(1)
    return error, (pt - p * t) / ((pp - p * p) * (tt - t * t)).sqrt()
