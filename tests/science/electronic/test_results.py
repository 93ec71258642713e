"""What a scientist gets out of a trained network: tables, pictures and files."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

import isoscale
from isoscale.cli.main import run as command
from isoscale.observe.figures import Curves, Parity, ParityPoints
from isoscale.science.electronic.physics import METRICS
from tests.helpers import train
from tests.science.electronic import made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[isoscale.Run, Path]:
    """A run, and the folder of its data."""
    folder = made.write(tmp_path_factory.mktemp("data"))
    return train(tmp_path_factory.mktemp("run") / "a", made.RECIPE, data__path=str(folder)), folder


@pytest.fixture(scope="module")
def shown(trained: Any) -> dict[str, Any]:
    """The pictures of the validation snapshots."""
    return isoscale.figures(trained[0])


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command prints."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["isoscale", *words])
        with pytest.raises(SystemExit) as end:
            command()
        assert not end.value.code
        return capsys.readouterr().out

    return call


class TestFiles:
    def test_predictions_have_the_shape_of_the_grid_and_the_physics_follows_from_them(self, trained: Any) -> None:
        found = {name: tensor.numpy() for name, tensor in isoscale.predict(trained[0]).items()}
        np.testing.assert_array_equal(found["energies"], made.ENERGIES)
        for name in "bc":
            ldos = found[f"{name}.ldos"]
            assert ldos.shape == (*made.SHAPE, made.SIZE) and (ldos >= 0).all()
            physics = made.Physics(ldos)
            np.testing.assert_allclose(found[f"{name}.dos"], physics.dos, rtol=1e-6)
            np.testing.assert_allclose(found[f"{name}.density"].flatten(), physics.density, rtol=1e-5)
            assert found[f"{name}.density"].shape == made.SHAPE
            for value in ("band_energy", "entropy"):
                assert found[f"{name}.{value}"] == pytest.approx(getattr(physics, value), rel=1e-4)
            assert found[f"{name}.fermi_energy"] == pytest.approx(physics.fermi, rel=1e-5)
            assert found[f"{name}.electrons"] == pytest.approx(made.NUM_ELECTRONS)

    def test_what_is_written_is_what_is_measured(self, trained: Any) -> None:
        run, folder = trained
        ldos = isoscale.predict(run)["c.ldos"].double().numpy()
        error = np.abs(ldos - np.load(folder / "c.out.npy")).mean()
        assert isoscale.test(run)["test/ldos_mae/c"] == pytest.approx(error, rel=1e-6)

    def test_a_folder_gets_the_same_as_a_file(self, trained: Any, called: Any, tmp_path: Path) -> None:
        run = str(trained[0].path)
        called("predict", run, "--out", str(tmp_path / "all.npz"))
        assert f"written to {tmp_path / 'all'}" in called("predict", run, "--out", str(tmp_path / "all"))
        whole = np.load(tmp_path / "all.npz")
        numbers = json.loads((tmp_path / "all/numbers.json").read_text())
        arrays = {path.name.removesuffix(".npy"): np.load(path) for path in (tmp_path / "all").glob("*.npy")}
        assert {*arrays, *numbers} == {*whole.files}
        for name, values in {**arrays, **numbers}.items():
            np.testing.assert_array_equal(whole[name], values)

    def test_any_task_can_write_a_folder(self, called: Any, tmp_path: Path) -> None:
        run = train(tmp_path / "run", train__epochs=1)
        called("predict", str(run.path), "--out", str(tmp_path / "found"))
        np.testing.assert_array_equal(np.load(tmp_path / "found/class.npy"), isoscale.predict(run)["class"])

    def test_without_a_calculation_there_is_the_ldos(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        made.write(tmp_path, a=None, b=None, c=None)
        run = train(tmp_path / "run", made.RECIPE, data__path=str(tmp_path), task__physics=None)
        assert isoscale.predict(run).keys() == {"energies", "b.ldos", "c.ldos"}
        assert "no snapshot has a calculation" in capsys.readouterr().err

    def test_states_that_cannot_be_filled_are_written_and_nothing_that_follows(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        made.write(tmp_path, c={"number_of_electrons_exact": 100})
        run = train(tmp_path / "run", made.RECIPE, data__path=str(tmp_path))
        found = isoscale.predict(run)
        assert "c.dos" in found and "c.density" not in found and "b.density" in found
        assert "c has 100 electrons, and they hold " in capsys.readouterr().err


class TestTable:
    @pytest.mark.slow
    def test_every_snapshot_has_a_row_and_every_metric_a_column_with_its_unit(self, trained: Any, called: Any) -> None:
        lines = called("test", str(trained[0].path)).splitlines()
        assert max(map(len, lines)) <= 100
        metrics = isoscale.test(trained[0])
        numbers = {label: [line.split()[1:] for line in lines if line.startswith(f"  {label} ")] for label in "bc"}
        for name, rows in numbers.items():
            printed = [float(value) for row in rows for value in row]
            assert printed == pytest.approx([metrics[f"test/{metric}/{name}"] for metric in METRICS], rel=1e-3)
        means = [float(value) for line in lines if "mean |error|" in line for value in line.split()[2:]]
        assert means == pytest.approx([metrics[f"test/{metric}"] for metric in METRICS], rel=1e-3)
        units = [line for line in lines if "meV/atom" in line]
        assert units[0].split()[:4] == ["meV/atom", "meV/atom", "meV", "meV/atom"]

    def test_json_has_all_names_and_no_pictures(self, trained: Any, called: Any) -> None:
        found = json.loads(called("test", str(trained[0].path), "--json", "--role", "val"))
        names = {f"val/{metric}{end}" for metric in METRICS for end in ("", "/b", "/c")}
        assert found.keys() == {"val/loss", *names}

    def test_the_pictures_are_where_it_says(self, trained: Any, called: Any) -> None:
        printed = called("test", str(trained[0].path), "--role", "val").splitlines()
        paths = [Path(line.strip()) for line in printed[printed.index("pictures:") + 1 :]]
        assert {path.name for path in paths} == {
            "ldos_parity.png", "band_energy_parity.png", "dos-b.png", "dos-c.png",
        }  # fmt: skip
        assert all(imread(path).std() > 0.01 and path.parent.name == "val" for path in paths)


class TestPictures:
    def test_states_and_fermi_levels_are_those_of_the_predictions_and_of_the_data(
        self, shown: Any, trained: Any
    ) -> None:
        curves = shown["dos/b"]
        assert isinstance(curves, Curves)
        true, predicted = made.Physics(made.ldos(1)), made.Physics(isoscale.predict(trained[0])["b.ldos"].numpy())
        for name, physics in (("true", true), ("predicted", predicted)):
            np.testing.assert_allclose(curves.values[name], physics.dos, rtol=1e-6)
            assert curves.marks[name][1] == pytest.approx(physics.fermi, rel=1e-5)

    def test_the_histogram_counts_every_value_where_it_belongs(self, shown: Any, trained: Any) -> None:
        parity = shown["ldos_parity"]
        assert isinstance(parity, Parity)
        found = isoscale.predict(trained[0])
        predicted = np.concatenate([found[f"{name}.ldos"].double().numpy().flatten() for name in "bc"])
        true = np.concatenate([made.ldos(seed).astype(np.float64).flatten() for seed in (1, 2)])
        edges = np.linspace(parity.low, parity.high, len(parity.counts) + 1)
        expected = np.histogram2d(true, predicted, [edges, edges])[0]
        assert parity.counts.sum() == true.size
        assert np.abs(parity.counts - expected).sum() <= 4  # values on the edge of a bin
        assert (parity.low, parity.high) == pytest.approx((0.0, max(true.max(), predicted.max())), abs=1e-9)

    def test_band_energies_of_all_snapshots_are_points(self, trained: Any, shown: Any) -> None:
        points = shown["band_energy_parity"]
        assert isinstance(points, ParityPoints) and points.names == ["b", "c"]
        energies = [made.Physics(made.ldos(seed)).band_energy / made.NUM_ATOMS for seed in (1, 2)]
        np.testing.assert_allclose(points.true, energies, rtol=1e-5)
        predicted = isoscale.predict(trained[0], split="val")
        energies = [made.Physics(predicted[f"{name}.ldos"].numpy()).band_energy / made.NUM_ATOMS for name in "bc"]
        np.testing.assert_allclose(points.predicted, energies, rtol=1e-4)
        assert np.abs(points.predicted - points.true).max() > 1e-3

    @pytest.mark.slow
    def test_a_training_shows_them_where_they_are_wanted(self, trained: Any, tmp_path: Path) -> None:
        keys = {"data__path": str(trained[1]), "observe__tensorboard": 2}
        run = train(tmp_path / "run", made.RECIPE, **keys)
        lines = [line for line in (run.path / "log.txt").read_text().splitlines() if "to look at: val/" in line]
        assert len(lines) == 3 and "val/dos/b" in lines[1]  # before the first step, after epoch 5, and in the end
        assert "to look at" not in (trained[0].path / "log.txt").read_text()
