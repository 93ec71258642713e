"""Physics of predicted fields: what plain numpy finds, the same on any number of ranks, and defined where it can be."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import isoscale
from isoscale.data.volumes import Crops, Volume
from isoscale.engine.dataset_metrics import EvaluatedDataset, Occasion, Seen
from isoscale.observe.drawing import draw
from isoscale.observe.figures import Bands, Curves, JointHistograms, Slices
from isoscale.observe.style import png
from isoscale.science.cosmology import FieldRegression
from isoscale.science.cosmology.fields import HYDRO
from isoscale.science.cosmology.physics import Fields, Measurement
from tests.helpers import cli, timeless, train
from tests.ranks import train_on
from tests.science.cosmology import made_boxes

N = 8
CELL = 0.25
FIELDS = list(HYDRO)


def fields(count: int = 5, batch: int = 6, seed: int = 0, n: int = N) -> Tensor:
    """Fields with some structure on all scales, about as large as stored ones."""
    noise = torch.randn(batch, count, n, n, n, generator=torch.Generator().manual_seed(seed))
    return 0.05 * (noise + noise.roll(1, 2) + noise.roll(1, 3) + noise.roll(1, 4))


class Predicted(EvaluatedDataset):
    """A look at crops with given truths and predictions, some at a time."""

    device = torch.device("cpu")

    def __init__(
        self, predicted: Tensor, true: Tensor, names: Sequence[str] = FIELDS, cell_size: float | None = CELL,
        size: int = 4, **occasion: Any,
    ) -> None:  # fmt: skip
        box = torch.zeros(len(names), *true.shape[2:])
        source = Crops([Volume("box", {"target": box}, {"target": list(names)}, cell_size)], true.shape[2], wrap=True)
        self.data, self.occasion = SimpleNamespace(source=source), Occasion(**occasion)
        self.stage, self.figures, self.notes = "test", {}, []
        self.make_reducer, self.note = (lambda: None), self.notes.append
        self._pair, self._size = (predicted, true), size

    def look(self) -> Iterator[Seen]:
        predicted, true = self._pair
        for places in torch.arange(len(true)).split(self._size):
            yield Seen(0, places, {"target": true[places]}, predicted[places])

    def measured(self) -> dict[str, float]:
        return FieldRegression(nn.Identity()).evaluate_dataset(self)

    def measurement(self) -> Measurement:
        found = Fields.of(self.source)
        assert found is not None
        return Measurement(self, found)


def by_hand(predicted: Tensor, true: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """k, P_pred/P_true, r and the scatter of the former's logarithm and of the latter (fields, bins), by full FFTs."""
    n = true.shape[-1]
    window = np.sin(np.pi * (np.arange(n) + 0.5) / n) ** 2
    window = window[:, None, None] * window[:, None] * window
    waves = []
    for stored in (predicted, true):
        values = stored.double().numpy().copy()
        values[:, 0] = np.exp(14 * values[:, 0]) - 1
        mean = (values * window).sum((2, 3, 4), keepdims=True) / window.sum()
        waves.append(np.fft.fftn((values - mean) * window, axes=(2, 3, 4)))
    k = np.fft.fftfreq(n, 1 / n)
    length = np.rint(np.sqrt(k[:, None, None] ** 2 + k[:, None] ** 2 + k**2)).astype(int)
    products = [(one * other.conj()).real for one, other in ((waves[0],) * 2, (waves[1],) * 2, waves)]
    power = np.stack([np.stack([each[..., length == bin_].sum(-1) for bin_ in range(1, n // 2 + 1)], -1)
                      for each in products])  # fmt: skip
    total = power.sum(1)
    ratios, r = np.log(power[0] / power[1]), power[2] / np.sqrt(power[0] * power[1])
    place = np.arange(1, n // 2 + 1) * 2 * np.pi / (n * CELL)
    return place, total[0] / total[1], total[2] / np.sqrt(total[0] * total[1]), ratios.std(0), r.std(0)


class TestValues:
    def test_spectra_correlations_and_errors_are_what_plain_numpy_finds(self) -> None:
        true = fields()
        predicted = 0.8 * true + 0.3 * fields(seed=1)
        found = Predicted(predicted, true).measurement()
        k, ratio, r, _, _ = by_hand(predicted, true)
        np.testing.assert_allclose(found.spectra.k, k)
        np.testing.assert_allclose(found.spectra.ratio, ratio, rtol=1e-4)
        np.testing.assert_allclose(found.spectra.correlation, r, atol=1e-4)
        metrics = found.metrics()
        for place, name in enumerate(FIELDS):
            pair = [each[:, place].flatten().double().numpy() for each in (predicted, true)]
            assert metrics[f"correlation/{name}"] == pytest.approx(np.corrcoef(*pair)[0, 1], abs=1e-7)
            low = slice(0, N // 4)
            assert metrics[f"power_error/{name}"] == pytest.approx(100 * np.abs(ratio[place, low] - 1).mean(), rel=1e-4)
            assert metrics[f"cross_correlation/{name}"] == pytest.approx(r[place, low].mean(), abs=1e-4)
        assert metrics["l1"] == pytest.approx((predicted - true).abs().mean().item(), rel=1e-5)
        for name in ("correlation", "power_error", "cross_correlation"):
            assert metrics[name] == pytest.approx(np.mean([metrics[f"{name}/{field}"] for field in FIELDS]))

    def test_bands_are_the_scatter_between_crops(self) -> None:
        true = fields()
        predicted = 0.8 * true + 0.3 * fields(seed=1)
        found = Predicted(predicted, true).measurement().scatter
        *_, ratio, r = by_hand(predicted, true)
        for place, group in ((0, 0), (4, 2)):  # density and temperature, which are groups of their own
            np.testing.assert_allclose(found.ratio[group, 1 : N // 2 + 1], ratio[place], rtol=1e-3)
            np.testing.assert_allclose(found.correlation[group, 1 : N // 2 + 1], r[place], rtol=1e-3)

    def test_a_network_that_returns_the_truth_has_no_error(self) -> None:
        true = fields()
        metrics = Predicted(true, true).measured()
        for name, value in metrics.items():
            assert value == pytest.approx(0 if name.startswith(("power_error", "l1")) else 1, abs=1e-12), name
        found = Predicted(true, true).measurement()
        assert found.scatter.ratio.abs().max() == 0 and found.scatter.correlation.abs().max() < 1e-7

    def test_the_size_of_batches_changes_rounding_alone(self) -> None:
        true, predicted = fields(), fields(seed=1)
        one, other = (Predicted(predicted, true, size=size).measured() for size in (1, 6))
        assert one == pytest.approx(other, rel=1e-12)

    def test_a_density_without_bounds_is_still_a_number(self) -> None:
        found = Predicted(50 * fields(seed=1), fields(), shows=False).measured()
        assert "power_error/density" in found and all(map(math.isfinite, found.values()))


class TestUnknown:
    @pytest.mark.parametrize("value", [0.0, 0.3, -0.123, 0.777])
    def test_what_a_constant_truth_does_not_say_is_left_out(self, value: float) -> None:
        true, predicted = fields(), fields(seed=1)
        true[:, 4] = value
        found = Predicted(predicted, true).measured()
        assert {name.partition("/")[2] for name in found} == {"", *FIELDS[:4]}
        assert all(map(math.isfinite, found.values()))

    @pytest.mark.parametrize("value", [0.0, 0.3])
    def test_a_constant_prediction_has_no_power_and_no_correlation(self, value: float) -> None:
        predicted = torch.full_like(fields(), value)
        found = Predicted(predicted, fields()).measured()
        assert found.pop("l1") > 0
        for name, each in found.items():
            assert each == pytest.approx(100 if name.startswith("power_error") else 0, abs=1e-6), name

    @pytest.mark.slow
    def test_nothing_but_zeros_leaves_nothing_to_measure_and_still_slices_to_see(self) -> None:
        dataset = Predicted(torch.zeros(2, 5, N, N, N), torch.zeros(2, 5, N, N, N))
        assert dataset.measured() == {"l1": 0}
        assert {"spectra", "slices"} <= dataset.figures.keys()
        assert all(png(draw(name, shown)) for name, shown in dataset.figures.items())

    @pytest.mark.slow
    def test_a_network_that_predicts_no_numbers_can_still_be_looked_at(self) -> None:
        dataset = Predicted(torch.full((2, 5, N, N, N), torch.nan), fields(batch=2))
        assert dataset.measured() == {}
        assert all(png(draw(name, shown)) for name, shown in dataset.figures.items())

    def test_a_rehearsal_has_all_names(self) -> None:
        zeros = torch.zeros(2, 5, N, N, N)
        found = Predicted(zeros, zeros, is_rehearsal=True, is_full=False, shows=False).measured()
        metrics = ("correlation", "power_error", "cross_correlation")
        assert found.keys() == {
            *metrics, *(f"{name}/density" for name in metrics), *(f"correlation/{field}" for field in FIELDS)
        }  # fmt: skip


class TestFigures:
    def test_all_five_are_there_and_can_be_drawn(self) -> None:
        dataset = Predicted(fields(seed=1), fields())
        dataset.measured()
        kinds = {name: type(figure) for name, figure in dataset.figures.items()}
        assert kinds == {
            "power/density": Curves, "spectra": Bands, "pdf/density": Curves, "temperature-density": JointHistograms,
            "slices": Slices,
        }  # fmt: skip
        assert all(png(draw(name, shown)) for name, shown in dataset.figures.items())
        assert not dataset.notes

    @pytest.mark.parametrize(
        ("names", "gone"),
        [
            (["density", "metals"], {"temperature-density"}),
            (["temperature", "metals"], {"temperature-density", "power/density", "pdf/density"}),
            (["0", "wind_x"], {"temperature-density", "power/density", "pdf/density"}),
        ],
    )
    def test_what_needs_a_field_that_is_not_there_is_left_out(self, names: list[str], gone: set[str]) -> None:
        dataset = Predicted(fields(2, seed=1), fields(2), names)
        assert f"power_error/{names[1]}" in dataset.measured()
        every = {"power/density", "spectra", "pdf/density", "temperature-density", "slices"}
        assert dataset.figures.keys() == every - gone

    def test_densities_on_another_scale_are_named(self) -> None:
        dataset = Predicted(fields(seed=1), 100 * fields())
        dataset.measured()
        assert "pdf/density" not in dataset.figures
        assert dataset.notes == [
            "densities are not ln(ρ/mean ρ)/14, or not between -1 and 1: their distribution is not shown"
        ]

    def test_wave_numbers_are_in_units_of_the_cell_where_its_size_is_not_known(self) -> None:
        dataset = Predicted(fields(seed=1), fields(), cell_size=None)
        dataset.measured()
        spectra = dataset.figures["spectra"]
        assert isinstance(spectra, Bands) and spectra.across == "k (2π/cell)"
        np.testing.assert_allclose(spectra.places, np.arange(1, N // 2 + 1) / N)

    def test_components_of_a_vector_are_one_curve(self) -> None:
        dataset = Predicted(fields(seed=1), fields())
        dataset.measured()
        spectra = dataset.figures["spectra"]
        assert isinstance(spectra, Bands)
        assert all(list(curves) == ["density", "velocity", "temperature"] for curves in spectra.panels.values())

    def test_the_density_has_a_distribution_whose_integral_is_1(self) -> None:
        dataset = Predicted(fields(seed=1), fields())
        dataset.measured()
        shown = dataset.figures["pdf/density"]
        assert isinstance(shown, Curves)
        for values in shown.values.values():
            assert values.sum() * (shown.places[1] - shown.places[0]) == pytest.approx(1)
        true = fields()[:, 0].double().numpy() * 14 / np.log(10)
        mean = (shown.places * shown.values["truth"]).sum() / shown.values["truth"].sum()
        assert mean == pytest.approx(true.mean(), abs=0.03)

    def test_slices_are_those_of_the_first_crop_through_its_densest_cell(self) -> None:
        predicted, true = fields(seed=1), fields()
        dataset = Predicted(predicted, true, names=["density", "a", "b", "c", "d"])
        dataset.measured()
        shown = dataset.figures["slices"]
        plane = np.unravel_index(int(true[0, 0].argmax()), (N, N, N))[0]
        assert isinstance(shown, Slices) and shown.difference
        np.testing.assert_allclose(shown.values[:, 1:], np.stack([true[0, 1:, plane], predicted[0, 1:, plane]]))

    def test_nobody_looks_and_nothing_is_shown(self) -> None:
        dataset = Predicted(fields(seed=1), fields(), shows=False)
        assert dataset.measured() and not dataset.figures


class Blur(nn.Module):
    """A network that any crop fits into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv3d(2, 2, 3, padding=1)

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input)


def make(physics: dict[str, Any] | None = None) -> tuple[FieldRegression, isoscale.Sources]:
    box = fields(2, 1, seed=3, n=12)[0]
    names = {"input": ["density", "temperature"], "target": ["density", "temperature"]}
    crops = Crops([Volume("box", {"input": box, "target": box.roll(1, 1)}, names, CELL)], N, wrap=True)
    task = FieldRegression(Blur(), physics={"every": 1} if physics is None else physics)
    return task, isoscale.Sources(train=crops.draw(32), val=crops.draw(19, seed=1), test=crops.draw(19, seed=2))


def fit(path: Path, physics: dict[str, Any] | None = None, **keys: Any) -> isoscale.Run:
    torch.manual_seed(0)
    settings = {"train.epochs": 4, "data.batch_size": 8, "observe.level": "error", **keys}
    return isoscale.Trainer(run=path, **settings).fit(*make(physics))


class TestTraining:
    @pytest.mark.slow
    @pytest.mark.parametrize("reduce", ["tree", "flat"])
    def test_several_ranks_measure_the_same(self, reduce: str, tmp_path: Path) -> None:
        recipe = made_boxes.recipe(tmp_path)
        keys = {"train__epochs": 1, "task__physics": {"every": 1}, "parallel__reduce": reduce}
        one, two = train(tmp_path / "1", recipe, **keys), train_on(2, tmp_path / "2", recipe, **keys)
        first, second = ({line["name"]: line["value"] for line in timeless(run)} for run in (one, two))
        assert {"val/l1/density", "val/correlation/temperature", "val/power_error"} <= first.keys()
        assert first == second if reduce == "tree" else first == pytest.approx(second, rel=1e-3)

    def test_errors_are_measured_each_time_and_spectra_when_they_are_due(self, tmp_path: Path) -> None:
        lines = timeless(fit(tmp_path / "a", {"every": 3, "before": True}))
        at = {name: [line["step"] for line in lines if line["name"] == name]
              for name in ("val/l1/density", "val/power_error/density")}  # fmt: skip
        assert at == {"val/l1/density": [4, 8, 12, 16], "val/power_error/density": [0, 12, 16]}

    def test_a_test_measures_all_and_the_mean_error_of_fields_is_the_loss(self, tmp_path: Path) -> None:
        run = fit(tmp_path / "a", {"every": 100, "after": False}, **{"train.epochs": 1})
        assert not any("power_error" in name for name in run.metrics)
        _, data = make()
        found = isoscale.test(run, data=data)
        assert found["test/l1"] == pytest.approx(found["test/loss"], rel=1e-5)
        batch = data.test.fetch(torch.arange(19))
        with torch.no_grad():
            apart = (run.model()(batch["input"]) - batch["target"]).abs().mean((0, 2, 3, 4))
        for name, error in zip(("density", "temperature"), apart.tolist(), strict=True):
            assert found[f"test/l1/{name}"] == pytest.approx(error, rel=1e-5)
            assert {f"test/{metric}/{name}" for metric in ("correlation", "power_error", "cross_correlation")} <= set(
                found
            )

    @pytest.mark.slow
    def test_pictures_reach_tensorboard(self, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        run = fit(tmp_path / "a", **{"observe.tensorboard": 2, "train.epochs": 1})
        for stage, tags in (
            ("val", ["pdf/density", "power/density", "slices", "spectra", "temperature-density"]),
            ("train", ["inputs"]),
        ):
            events = EventAccumulator(str(run.path / "tensorboard" / stage), {"images": 0})
            events.Reload()
            assert sorted(events.Tags()["images"]) == tags
            assert all(len(events.Images(tag)) == 1 for tag in tags)

    def test_a_setting_that_does_not_exist_is_named(self) -> None:
        with pytest.raises(isoscale.UserError, match=r"task\.physics\.evry"):
            FieldRegression(nn.Identity(), physics={"evry": 2})
        with pytest.raises(isoscale.UserError, match=r"task\.physics\.every: .*greater than or equal to 1"):
            FieldRegression(nn.Identity(), physics={"every": 0})


@pytest.mark.full
def test_the_preset_shows_tables_pictures_and_a_report(tmp_path: Path) -> None:
    small = {
        "task__model": {"class": "unet3d", "width": 4, "depth": 2}, "train__epochs": 1, "data__cells": 16,
        "data__crop": 16, "data__eval_samples": 4, "data__samples_per_epoch": 8,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOSCALE_DATA", str(tmp_path / "data"))
        run = train(tmp_path / "a", "cosmology/small", **small)
    done = cli("test", str(run.path), cwd=tmp_path, ISOSCALE_DATA=str(tmp_path / "data"))
    assert "mean of fields" in done.stdout and "velocity_x" in done.stdout, done.stderr
    written = sorted(path.name for path in (run.path / "test").glob("*.png"))
    assert written == ["pdf-density.png", "power-density.png", "slices.png", "spectra.png", "temperature-density.png"]
    done = cli("report", str(run.path), cwd=tmp_path, ISOSCALE_DATA=str(tmp_path / "data"))
    page = (run.path / "report.html").read_text()
    assert done.returncode == 0 and "cross-correlation r(k) against k (h/Mpc)" in page
