"""Physics of predicted fields beside the true ones: correlations, power spectra, densities and temperatures.

Power spectra are those of crops, which are not periodic: each is faded out towards its faces (Hann window), the truth
in the same way. That of the density is the one of the density contrast ρ/ρ̄ - 1, as cosmologists have it, and not of
the logarithm that is stored; other fields are taken as they are stored.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from isoscale.config import Config
from isoscale.data.sources import Source, whole
from isoscale.data.volumes import Crops
from isoscale.engine.dataset_metrics import EvaluatedDataset
from isoscale.observe.figures import Band, Bands, Curves, JointHistograms, Slices
from isoscale.science.cosmology.fields import COMPONENTS
from isoscale.science.cosmology.loss import LOG_RANGE
from isoscale.science.cosmology.statistics import (
    Spectra,
    error_sums,
    finish_errors,
    finish_spectra,
    histogram_sums,
    joint_histogram_sums,
    spectra_sums,
)

UNITS = {"power_error": "%"}
PERCENT = 100.0
NUM_BINS = 256
"""Of histograms, over all that a stored field is to be: from -1 to 1."""
STORED = (-1.0, 1.0)
LARGEST = 28.0
"""Logarithm of the largest density that a prediction is taken to mean, so that its square is a number."""
NOISE = 1e-12
"""Power, as a share of a field's mean square, below which there is nothing but rounding: a field is constant then."""
CONSTANT = 1e-6
"""Variance, as a share of the mean square, below which sums in single precision cannot tell it from 0."""
CELLS_AT_ONCE = {"cpu": 1 << 18}
MOST_CELLS_AT_ONCE = 1 << 22
"""Of crops that are measured together, 16 of 64³; fewer where a kind of device is faster with what fits its cache."""
INSIDE = 0.99
"""Share of cells that a histogram has to hold between its ends to be shown."""
MOST_CROPS = 4
"""Shown of the training data."""


class Physics(Config):
    """When power spectra and correlations are measured during a training: each time takes a second look at the data."""

    every: Annotated[int, Field(ge=1)] = 5
    """Epochs between two measurements."""
    before: bool = False
    """Whether to measure before the first step."""
    after: bool = True
    """Whether to measure after the last step, whatever `every` says."""


@dataclass(frozen=True)
class Fields:
    """The predicted fields of boxes: what they are called, and what is known of their units."""

    names: Sequence[str]
    cell_size: float | None = None
    """Comoving Mpc/h, where the boxes say so."""
    attributes: Mapping[str, Any] | None = None
    """Of the files, where these say how to undo the scaling of fields."""

    @classmethod
    def of(cls, source: Source, key: str = "target") -> "Fields | None":
        """Those of a source of crops; numbers where they have no names."""
        crops = whole(source)
        if not isinstance(crops, Crops) or key not in crops.num_fields:
            return None
        volume = crops.volumes[0]
        names = volume.fields.get(key) or [str(number) for number in range(crops.num_fields[key])]
        return cls(list(names), volume.cell_size, getattr(volume.arrays[key], "attributes", {}))

    @property
    def groups(self) -> dict[str, list[int]]:
        """Fields whose power is shown together: the components of a vector, and every other one alone."""
        found: dict[str, list[int]] = {}
        for place, name in enumerate(self.names):
            stem = name[:-2]
            is_vector = name[-2:] in COMPONENTS and all(stem + each in self.names for each in COMPONENTS)
            found.setdefault(stem if is_vector else name, []).append(place)
        return found

    def place(self, name: str) -> int | None:
        """The channel of a field, if there is one of this name."""
        return self.names.index(name) if name in self.names else None

    def in_units(self, name: str) -> tuple[float, float, str]:
        """What to multiply a stored field by and to add to have it in units, and what it is then called."""
        known = self.attributes or {}
        words = _words(name)
        if name == "density":
            return LOG_RANGE / math.log(10), 0.0, "log₁₀(1 + δ)"
        if name == "temperature" and {"scale_temperature", "scale_temperature_unit"} <= known.keys():
            unit = math.log10(float(known["scale_temperature_unit"]))
            return float(known["scale_temperature"]) / math.log(10), unit, "log₁₀ T (K)"
        if name.startswith("velocity") and "scale_velocity" in known:
            return float(known["scale_velocity"]), 0.0, f"{words} (km/s)"
        return 1.0, 0.0, words


@dataclass(frozen=True)
class Scatter:
    """How crops differ from each other, for each group of fields and each wave number (groups, bins)."""

    ratio: Tensor
    """Standard deviation of ln(P_pred/P_true)."""
    correlation: Tensor
    """Standard deviation of r."""


class Shown(NamedTuple):
    """What is only looked at; first the truth, then the prediction."""

    pdf: Tensor
    """(2, bins of the density): numbers of cells."""
    joint: Tensor
    """(2, bins of the density, bins of the temperature)."""
    slices: Tensor
    """(2, fields, n, n), of the first crop."""


class Measurement:
    """The physics of all crops of a stage, from sums that are the same on any number of ranks."""

    def __init__(self, dataset: EvaluatedDataset, fields: Fields) -> None:
        """Look at all crops once."""
        self.fields = fields
        crops = whole(dataset.source)
        assert isinstance(crops, Crops)
        self.crop = crops.crop
        self._dataset, self._shows = dataset, dataset.occasion.shows
        sums: dict[int, list[Tensor]] = {}
        for seen in dataset.look():
            for found in self._parts(seen.samples, seen.output, seen.batch["target"]):
                if seen.shard in sums:
                    torch._foreach_add_(sums[seen.shard], found)
                else:
                    sums[seen.shard] = found
        total = dataset.add(sums, self._zeros)
        spectra, waves, squares, scatter, errors, num_cells, *pictures = total
        self.spectra = self._finished(spectra, waves, squares)
        self.scatter = _spread(scatter)
        self.error, self.correlation = finish_errors(errors, num_cells)[0], _correlation(errors, num_cells)
        self.num_cells = num_cells
        self.shown = Shown(*pictures) if pictures else None

    def metrics(self, every: bool = True) -> dict[str, float]:
        """Of the mean of fields and of every field; NaN where the truth has nothing to compare with.

        Without `every`, spectra are only judged as a mean and by the density. The mean absolute error of each field
        is measured in every evaluation; that of all, which is mostly the loss, is here.
        """
        low = slice(0, max(1, self.crop // 4))  # up to half the Nyquist wave number
        values = {
            "correlation": self.correlation,
            "power_error": PERCENT * (self.spectra.ratio[:, low] - 1).abs().nanmean(1),
            "cross_correlation": self.spectra.correlation[:, low].nanmean(1),
        }
        found = {name: float(each.nanmean()) for name, each in values.items()}
        if every:
            found["l1"] = float(self.error.mean())
        for name, each in values.items():
            of_fields = zip(self.fields.names, each.tolist(), strict=True)
            found |= {f"{name}/{field}": value for field, value in of_fields
                      if every or name == "correlation" or field == "density"}  # fmt: skip
        return found

    def _parts(self, samples: Tensor, output: Tensor, target: Tensor) -> list[list[Tensor]]:
        """Sums over a few crops at a time."""
        count = max(1, CELLS_AT_ONCE.get(output.device.type, MOST_CELLS_AT_ONCE) // self.crop**3)
        chunks = (each.split(count) for each in (samples, output, target))
        return [self._sums(*each) for each in zip(*chunks, strict=True)]

    def _sums(self, samples: Tensor, predicted: Tensor, true: Tensor) -> list[Tensor]:
        predicted, true = predicted.float(), true.float()
        both = self._contrasts(predicted), self._contrasts(true)
        # as if every crop were a field, so that each has a spectrum of its own
        one, other = (each.flatten(0, 1)[None] for each in both)
        sums, waves = spectra_sums(one, other, hann=True)
        sums = sums.view(3, *predicted.shape[:2], -1)
        squares = torch.stack([each.square().mean((2, 3, 4), dtype=torch.float64) for each in both])
        scatter = self._scatter(sums, waves, squares)
        found = [sums.sum(1), len(samples) * waves, squares.sum(1), scatter, *error_sums(predicted, true)]
        return [*found, *self._pictures(samples, predicted, true)] if self._shows else found

    def _contrasts(self, stored: Tensor) -> Tensor:
        """The fields whose power is measured: the density itself, up to its mean, and others as they are stored."""
        place = self.fields.place("density")
        if place is None:
            return stored
        fields = stored.clone()
        fields[:, place] = (LOG_RANGE * stored[:, place]).clamp_(max=LARGEST).exp_()
        return fields

    def _scatter(self, sums: Tensor, waves: Tensor, squares: Tensor) -> Tensor:
        """Number of crops, and sums over them of ln(P_pred/P_true), of r, and of the squares of both (5, groups, bins).

        Crops without power in the truth or in the prediction are left out.
        """
        groups = list(self.fields.groups.values())
        power = torch.stack([sums[:, :, group].sum(2) for group in groups], 2)
        floor = torch.stack([squares[:, :, group].sum(2) for group in groups], 2)
        predicted, true, cross = power
        there = _is_there(power[:2], waves, floor, self.crop).all(0)
        ratio = torch.where(there, predicted / true, 1.0).log()
        r = torch.where(there, cross / (predicted * true).sqrt(), 0.0)
        return torch.stack([each.sum(0) for each in (there.double(), ratio, r, ratio * ratio, r * r)])

    def _pictures(self, samples: Tensor, predicted: Tensor, true: Tensor) -> list[Tensor]:
        """Histograms of the density, and of density and temperature; and slices of the first crop, if it is here."""
        pdf, joint, slices = self._no_pictures()
        density, temperature = self.fields.place("density"), self.fields.place("temperature")
        for row, fields in enumerate((true, predicted)):
            if density is not None:
                pdf[row] = histogram_sums(fields[:, density], *STORED, NUM_BINS)[0]
            if density is not None and temperature is not None:
                pair = fields[:, density], fields[:, temperature]
                joint[row] = joint_histogram_sums(*pair, STORED, STORED, NUM_BINS)[0]
        for place in (samples == 0).nonzero().flatten().tolist():
            # through the densest cell, where there is most to see
            densest = 0 if density is None else int(true[place, density].argmax())
            plane = self.crop // 2 if density is None else densest // self.crop**2
            slices += torch.stack([fields[place, :, plane] for fields in (true, predicted)])
        return [pdf, joint, slices]

    def _no_pictures(self) -> list[Tensor]:
        shapes = (2, NUM_BINS), (2, NUM_BINS, NUM_BINS), (2, len(self.fields.names), self.crop, self.crop)
        return [self._new(*shape) for shape in shapes]

    def _zeros(self) -> list[Tensor]:
        count, n = len(self.fields.names), self.crop
        bins = round(math.sqrt(3) * (n // 2)) + 1
        shapes = (3, count, bins), (bins,), (2, count), (5, len(self.fields.groups), bins), (count, 6), ()
        return [*(self._new(*shape) for shape in shapes), *(self._no_pictures() if self._shows else [])]

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self._dataset.device)

    def _finished(self, sums: Tensor, waves: Tensor, squares: Tensor) -> Spectra:
        """Of all crops together. Where the truth has no power, nothing is known; where the prediction has none, r is 0.

        Wave numbers are in h/Mpc, or without the size of a cell in 2π per cell.
        """
        size = self.fields.cell_size
        found = finish_spectra(sums, waves, self.crop * (size or 1.0), self.crop)
        waves = waves / waves[0]  # of a crop: one of its waves is the mean
        predicted, true = _is_there(sums[:2], waves, squares, self.crop)[..., 1 : len(found.k) + 1]
        r = torch.where(predicted | found.predicted.isnan(), found.correlation, 0.0)
        return found._replace(
            k=found.k if size else found.k / (2 * math.pi),
            ratio=torch.where(true, found.ratio, torch.nan),
            correlation=torch.where(true, r, torch.nan),
        )


def _is_there(power: Tensor, waves: Tensor, squares: Tensor, n: int) -> Tensor:
    """Whether power (…, fields, bins) is more than the rounding of fields with these mean squares (…, fields)."""
    return power / waves * n**3 > NOISE * squares[..., None]


def _spread(sums: Tensor) -> Scatter:
    number, *moments = sums
    ratio, r, ratio_squared, r_squared = (each / number.clamp(min=1) for each in moments)
    return Scatter(
        (ratio_squared - ratio * ratio).clamp(min=0).sqrt(),
        (r_squared - r * r).clamp(min=0).sqrt(),
    )


def _correlation(sums: Tensor, counts: Tensor) -> Tensor:
    """Pearson's coefficient of each field: NaN where the truth is constant, 0 where only the prediction is."""
    _, predicted, true, predicted_squared, true_squared, _ = (sums / counts).unbind(1)
    is_constant = [squared - mean * mean <= CONSTANT * squared
                   for mean, squared in ((predicted, predicted_squared), (true, true_squared))]  # fmt: skip
    found = torch.where(is_constant[0], 0.0, finish_errors(sums, counts)[1])
    return torch.where(is_constant[1], torch.nan, found)


def show(measurement: Measurement, dataset: EvaluatedDataset) -> None:
    """Show all that there is to look at: spectra, distributions of density and temperature, slices."""
    fields, shown = measurement.fields, measurement.shown
    assert shown is not None
    k = f"k ({'h/Mpc' if fields.cell_size else '2π/cell'})"
    has_density = fields.place("density") is not None
    if len(measurement.spectra.k) > 1:
        if has_density:
            dataset.show("power/density", _power(measurement, k))
        dataset.show("spectra", _agreement(measurement, k))
    if has_density and _is_inside(shown.pdf):
        dataset.show("pdf/density", _distribution(measurement, shown.pdf))
        if fields.place("temperature") is not None and _is_inside(shown.joint):
            dataset.show("temperature-density", _phases(measurement, shown.joint))
    elif has_density and dataset.occasion.is_full:
        dataset.note("densities are not ln(ρ/mean ρ)/14, or not between -1 and 1: their distribution is not shown")
    dataset.show("slices", _slices(fields, shown.slices))


def show_inputs(fields: Fields, batch: Tensor) -> Slices:
    """Slices through the middles of some crops (batch, fields, n, n, n), as the network sees them."""
    shown = _array(batch[:MOST_CROPS, :, batch.shape[2] // 2])
    rows = [f"crop {number + 1}" for number in range(len(shown))]
    return Slices(shown, rows, [_words(name) for name in fields.names], _signed(fields), _extent(fields, shown))


def _power(measurement: Measurement, k: str) -> Curves:
    """P(k) of the density contrast, and how much of it is predicted."""
    fields, found = measurement.fields, measurement.spectra
    place, group = fields.place("density"), list(fields.groups).index("density")
    assert place is not None
    factor = measurement.scatter.ratio[group, 1 : len(found.k) + 1].exp()
    ratio = found.ratio[place]
    values = {"truth": _array(found.true[place]), "prediction": _array(found.predicted[place])}
    unit = "(Mpc/h)³" if fields.cell_size else "cells³"
    return Curves(
        _array(found.k), values, k, f"P(k) of the density contrast ({unit})", logarithmic="xy", below="ratio",
        bands={"prediction": (_array(ratio / factor), _array(ratio * factor))},
    )  # fmt: skip


def _agreement(measurement: Measurement, k: str) -> Bands:
    """P_pred/P_true and r of all fields, those of a vector's components together, with the scatter of crops."""
    found, scatter = measurement.spectra, measurement.scatter
    ratios, correlations = {}, {}
    cross = found.correlation * (found.predicted * found.true).sqrt()
    for number, (name, group) in enumerate(measurement.fields.groups.items()):
        predicted, true = found.predicted[group].sum(0), found.true[group].sum(0)
        known = ~found.ratio[group].isnan().all(0)
        ratio = torch.where(known, predicted / true, torch.nan)
        r = (cross[group].nansum(0) / (predicted * true).sqrt()).nan_to_num(0.0)
        r = torch.where(known, r, torch.nan)
        factor, apart = (each[number, 1 : len(found.k) + 1] for each in (scatter.ratio.exp(), scatter.correlation))
        words = _words(name)
        ratios[words] = Band(*map(_array, (ratio, ratio / factor, ratio * factor)))
        correlations[words] = Band(*map(_array, (r, (r - apart).clamp(min=-1), (r + apart).clamp(max=1))))
    half = float(found.k[max(1, measurement.crop // 4) - 1])
    panels = {"P(k), predicted / true": ratios, "cross-correlation r(k)": correlations}
    return Bands(_array(found.k), panels, k, "± 1 σ between crops", ("k Nyquist / 2", half))


def _distribution(measurement: Measurement, counts: Tensor) -> Curves:
    """How much of the volume has which density."""
    places, kept = _occupied(counts.sum(0), *measurement.fields.in_units("density")[:2])
    density = counts / measurement.num_cells / (places[1] - places[0])
    true, predicted = _array(density[:, kept])
    return Curves(
        places[kept], {"truth": true, "prediction": predicted}, "log₁₀(1 + δ)", "share of the volume per dex",
        logarithmic="y", below="ratio",
    )  # fmt: skip


def _phases(measurement: Measurement, counts: Tensor) -> JointHistograms:
    """How much of the volume has which density and temperature."""
    kept, edges, words = [], [], []
    for name, axis in (("density", 2), ("temperature", 1)):
        scale, offset, label = measurement.fields.in_units(name)
        places, inside = _occupied(counts.sum((0, axis)), scale, offset)
        half = (places[1] - places[0]) / 2
        kept.append(inside)
        edges.append((float(places[inside][0] - half), float(places[inside][-1] + half)))
        words.append(label)
    shares = _array(counts / measurement.num_cells)[:, kept[0], kept[1]]
    return JointHistograms(
        shares, ["truth", "prediction"], edges[0], edges[1], words[0], words[1], "share of the volume"
    )  # fmt: skip


def _slices(fields: Fields, stored: Tensor) -> Slices:
    """A slice of one crop, in the units that people know."""
    values, known = _array(stored), [fields.in_units(name) for name in fields.names]
    for place, (scale, offset, _) in enumerate(known):
        values[:, place] = scale * values[:, place] + offset
    columns = [words for *_, words in known]
    return Slices(values, ["truth", "prediction"], columns, _signed(fields), _extent(fields, values), difference=True)


def _signed(fields: Fields) -> list[bool]:
    return [name[-2:] in COMPONENTS for name in fields.names]


def _extent(fields: Fields, shown: NDArray[np.float64]) -> str:
    cells = shown.shape[-1]
    width = f"{cells * fields.cell_size:.3g} Mpc/h" if fields.cell_size else f"{cells} cells"
    return f"{width} wide, one cell thick"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _occupied(counts: Tensor, scale: float, offset: float) -> tuple[NDArray[np.float64], slice]:
    """The middles of all bins in units, and those between the first and the last that hold something."""
    edges = np.linspace(*STORED, NUM_BINS + 1)
    found = np.flatnonzero(_array(counts))
    return scale * (edges[1:] + edges[:-1]) / 2 + offset, slice(int(found[0]), int(found[-1]) + 1)


def _is_inside(counts: Tensor) -> bool:
    """Whether nearly all of the truth lies between the ends of a histogram: else fields are scaled otherwise."""
    true = counts[0]
    inside = true[(slice(1, -1),) * true.dim()].sum()
    return bool(inside > INSIDE * true.sum())


def _array(values: Tensor) -> NDArray[np.float64]:
    return values.double().cpu().numpy()
