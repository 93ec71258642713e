"""Physical errors: what they are, what they do where they cannot be known, and what they steer."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import isoscale
from isoscale.engine.dataset_metrics import EvaluatedDataset, Occasion, Seen
from isoscale.science.electronic import Snapshots
from isoscale.science.electronic.integrals import EnergyGrid
from isoscale.science.electronic.physics import METRICS, Measurement
from tests.helpers import timeless, train
from tests.ranks import train_on
from tests.science.electronic import made


def trained(folder: Path, path: Path, **keys: Any) -> isoscale.Run:
    return train(path, made.RECIPE, data__path=str(folder), **keys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return made.write(tmp_path / "data")


def raw_predictions(run: isoscale.Run, folder: Path, name: str) -> tuple[np.ndarray, float]:
    """What the network itself predicts for a snapshot, and the scale that it was trained in, by hand."""
    source, target = np.load(folder / "a.in.npy").reshape(-1, 4), np.load(folder / "a.out.npy")
    inputs = (np.load(folder / f"{name}.in.npy").reshape(-1, 4) - source.mean(0)) / source.std(0)
    with torch.no_grad():
        outputs = run.model()(torch.from_numpy(inputs).float()).numpy()
    scale = target.max() - target.min()
    return outputs * scale + target.min(), float(scale)


class Predicted(EvaluatedDataset):
    """A look at snapshots b and c, as if their LDOS had been predicted but for a factor."""

    device = torch.device("cpu")

    def __init__(self, folder: Path, **factors: float) -> None:
        source = Snapshots(test=["b", "c"], path=str(folder), columns=None).test
        self.data, self.occasion, self._factors = SimpleNamespace(source=source), Occasion(shows=False), factors
        self.make_reducer = lambda: None

    def look(self) -> Iterator[Seen]:
        samples = torch.arange(len(self.source))
        batch = self.source.fetch(samples)
        factors = torch.tensor([*self._factors.values()])[self.source.snapshot_of(samples)]
        yield Seen(0, samples, batch, batch["target"] * factors[:, None])

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> tuple[isoscale.Run, Path, dict[str, float]]:
    """A run that was not asked for any physics, its data, and what a test measures."""
    folder = made.write(tmp_path_factory.mktemp("data"))
    run = trained(folder, tmp_path_factory.mktemp("run") / "a", train__epochs=4, task__physics=None)
    return run, folder, isoscale.test(run)


class TestValues:
    def test_every_metric_of_every_snapshot_is_what_plain_sums_give(self, tested: Any) -> None:
        run, folder, found = tested
        for name in "bc":
            predicted, scale = raw_predictions(run, folder, name)
            assert (predicted < 0).any(), "what is below zero should make a difference here"
            expected = made.errors(predicted, np.load(folder / f"{name}.out.npy").reshape(-1, made.SIZE), scale)
            assert expected.keys() == METRICS.keys()
            for metric, value in expected.items():
                assert found[f"test/{metric}/{name}"] == pytest.approx(value, rel=2e-4), metric

    def test_all_are_measured_though_the_recipe_asks_for_none_and_the_mean_is_of_absolute_values(
        self, tested: Any
    ) -> None:
        for metric in METRICS:
            each = [tested[2][f"test/{metric}/{name}"] for name in "bc"]
            assert tested[2][f"test/{metric}"] == pytest.approx(np.abs(each).mean())

    def test_the_scaled_error_is_the_loss_that_the_network_is_trained_with(self, tested: Any) -> None:
        assert tested[2]["test/ldos_scaled"] == pytest.approx(tested[2]["test/loss"], rel=1e-5)


class TestUnknown:
    def test_a_prediction_without_a_fermi_level_leaves_out_what_follows_from_it(
        self, folder: Path, tmp_path: Path
    ) -> None:
        run = trained(folder, tmp_path / "a", optimizer__lr=1e-12, task__physics={"metrics": list(METRICS), "every": 1})
        named = {name.removeprefix("val/") for name in run.metrics if name.startswith("val/")}
        gone = {"band_energy", "fermi_energy", "entropy", "density", "density_relative"}
        assert named & METRICS.keys() == METRICS.keys() - gone
        assert all(np.isfinite(value) for value in run.metrics.values())
        said = (run.path / "log.txt").read_text()
        assert "the predicted states have no Fermi level between -4 and 8 eV" in said
        assert "b has 3 electrons, and they hold " in said

    def test_a_prediction_that_leaves_one_snapshot_unknown_has_no_mean_and_the_others_have_their_values(
        self, folder: Path
    ) -> None:
        dataset = Predicted(folder, b=1.01, c=0.1)
        measurement = Measurement(dataset, EnergyGrid(made.SIZE, made.SPACING, made.OFFSET), True, list(METRICS))
        expected = made.errors(1.01 * made.ldos(1), made.ldos(1))
        for metric in ("band_energy", "density"):
            mean, b, c = (value for _, value in measurement.named(metric))
            assert math.isnan(mean) and math.isnan(c) and b == pytest.approx(expected[metric], rel=1e-3)
        assert all(not math.isnan(value) for _, value in measurement.named("dos"))
        (note,) = measurement.notes()
        assert "the predicted states" in note and "c has 3 electrons" in note and "b has" not in note

    def test_a_snapshot_that_never_has_one_does_not_count_in_the_mean(self, tmp_path: Path) -> None:
        made.write(tmp_path, c={"number_of_electrons_exact": 100})
        found = isoscale.test(trained(tmp_path, tmp_path / "run"))
        assert found["test/band_energy"] == abs(found["test/band_energy/b"])
        assert "test/band_energy/c" not in found and "test/dos/c" in found

    def test_what_watches_a_metric_that_is_never_there_waits_for_ever(self, tmp_path: Path) -> None:
        made.write(tmp_path, **{name: {"number_of_electrons_exact": 100} for name in "bc"})
        watch = {
            "checkpoint__monitor": "val/band_energy",
            "train__early_stopping": {"monitor": "val/band_energy", "patience": 1},
            "schedule": {"name": "plateau", "monitor": "val/band_energy", "patience": 0},
            "task__physics": {"metrics": ["band_energy"], "every": 1},
        }
        run = trained(tmp_path, tmp_path / "run", **watch)
        assert run.status == "done" and run.summary()["epoch"] == 6 and not run.has_best
        assert {value for _, value in run.history("lr")} == {1e-2}
        said = (run.path / "log.txt").read_text()
        assert "the true states have no Fermi level" in said and "b has 100 electrons" in said

    def test_without_any_calculation_the_errors_of_the_ldos_remain(self, tmp_path: Path) -> None:
        made.write(tmp_path, a=None, b=None, c=None)
        run = trained(tmp_path, tmp_path / "run", task__physics={"metrics": ["ldos"], "every": 1})
        assert "val/ldos/b" in run.metrics
        measured = {name.split("/")[1] for name in isoscale.test(run)}
        assert measured == {"loss", "ldos", "ldos_mae", "ldos_scaled"}

    def test_one_snapshot_without_a_calculation_leaves_the_others_as_they_are(self, tmp_path: Path) -> None:
        made.write(tmp_path, c=None)
        run = trained(tmp_path, tmp_path / "run", data__test=["b"], data__val=None, task__physics=None)
        both = isoscale.test(run, data=Snapshots(test=["c", "b"], path=str(tmp_path), columns=None))
        assert both["test/band_energy/b"] == pytest.approx(isoscale.test(run)["test/band_energy/b"])
        assert both["test/band_energy"] == abs(both["test/band_energy/b"])
        assert "test/ldos/c" in both and "test/dos/c" not in both

    def test_a_part_of_a_snapshot_has_no_energies_and_that_is_said(self, folder: Path, tmp_path: Path) -> None:
        run = trained(folder, tmp_path / "a", train__limit_val_batches=4)
        assert "val/band_energy/b" in run.metrics and "val/band_energy/c" not in run.metrics
        assert run.metrics["val/band_energy"] == abs(run.metrics["val/band_energy/b"])
        assert "only a part of c is looked at" in (run.path / "log.txt").read_text()


class TestWatching:
    """With `every: 5`, whoever watches an energy sees it at epochs 5, 10, …; 3 steps per epoch."""

    def test_the_best_weights_are_chosen_among_the_epochs_that_measure(self, folder: Path, tmp_path: Path) -> None:
        run = trained(folder, tmp_path / "a", train__epochs=12, checkpoint__monitor="val/band_energy")
        history = dict(run.history("val/band_energy"))
        assert list(history)[-3:] == [15, 30, 36]  # epochs 5, 10 and the last
        best = run.summary()["best"]
        watched = {step: value for step, value in history.items() if step}
        assert best["value"] == min(watched.values()) and watched[best["step"]] == best["value"]

    def test_patience_counts_measurements_and_not_epochs(self, folder: Path, tmp_path: Path) -> None:
        stop = {"monitor": "val/band_energy", "patience": 2, "min_delta": 1e9}
        run = trained(folder, tmp_path / "a", train__epochs=40, train__early_stopping=stop)
        assert run.summary()["epoch"] == 15  # the first at 5, then two that are not better

    def test_plateau_counts_measurements_and_not_epochs(self, folder: Path, tmp_path: Path) -> None:
        plateau = {"name": "plateau", "monitor": "val/band_energy", "patience": 1, "threshold": 0.999999, "gamma": 0.5}
        run = trained(folder, tmp_path / "a", train__epochs=18, schedule=plateau, observe__every=3)
        rates = dict(run.history("lr"))
        assert rates[45] == 1e-2 and rates[48] == 5e-3  # after epochs 5, 10 and 15

    def test_the_last_measurement_of_a_training_that_stops_early_can_be_the_best(
        self, folder: Path, tmp_path: Path
    ) -> None:
        keys = {
            "train__epochs": 9, "train__early_stopping": {"monitor": "val/loss", "patience": 2, "min_delta": 1e9},
            "checkpoint__monitor": "val/band_energy", "train__ema": 0.5,
        }  # fmt: skip
        run = trained(folder, tmp_path / "a", **keys)
        assert run.summary()["epoch"] == 3
        assert run.summary()["best"]["step"] == 9 and run.has_best
        assert isoscale.test(run, split="val")["val/band_energy"] == pytest.approx(run.metrics["val/band_energy"])

    def test_evaluations_in_the_middle_of_an_epoch_measure_once_in_a_while_too(
        self, folder: Path, tmp_path: Path
    ) -> None:
        keys = {"train__evaluate": "2 steps", "task__physics": {"metrics": ["ldos"], "every": 2}}
        run = trained(folder, tmp_path / "a", train__epochs=5, **keys)
        measured = [step for step, _ in run.history("val/ldos") if step]
        assert measured == [6, 12, 15]  # an epoch is 3 steps


class TestAnywhere:
    def test_it_does_not_depend_on_where_the_data_lives(self, folder: Path, tmp_path: Path) -> None:
        physics = {"metrics": list(METRICS), "every": 2}
        runs = [
            trained(folder, tmp_path / place, train__epochs=2, data__residency=place, task__physics=physics)
            for place in ("device", "host", "disk")
        ]
        assert timeless(runs[0]) == timeless(runs[1]) == timeless(runs[2])
        assert "val/density/c" in runs[0].metrics

    @pytest.mark.full
    def test_all_of_it_is_the_same_on_two_ranks(self, folder: Path, tmp_path: Path) -> None:
        keys = {
            "data__path": str(folder), "parallel__reduce": "tree", "observe__tensorboard": 2,
            "task__physics": {"metrics": list(METRICS), "every": 1}, "train__ema": 0.9,
        }  # fmt: skip
        runs = [train_on(world, tmp_path / str(world), made.RECIPE, **keys) for world in (1, 2)]
        assert timeless(runs[0]) == timeless(runs[1])
        assert {f"val/{metric}/{name}" for metric in METRICS for name in "bc"} <= runs[0].metrics.keys()
