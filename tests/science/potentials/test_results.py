"""What a scientist gets out of a trained potential: tables, pictures and files, of its own systems and of others."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import isoscale
from isoscale.cli.main import run as command
from isoscale.observe.figures import Parity
from isoscale.runs.inference import Measured, measure
from isoscale.science.atoms.parity import Counts
from isoscale.science.atoms.use import calculator
from isoscale.science.potentials import AtomicSystems
from isoscale.science.potentials.results import short_names
from tests.helpers import train
from tests.science.potentials import made_systems

ase = pytest.importorskip("ase")

SMALL, LARGE = (1, 0, 1), (0, 1, 1, 0, 1)
"""Types of the atoms of two systems, not in the order of the model."""
RECIPE: dict[str, Any] = {
    "task": {
        "class": "potential", "statistics_frames": 2,
        "model": {
            "class": "deep_potential", "types": ["O", "H"], "fitting_widths": [4],
            "descriptor": {"class": "se_e2_a", "sel": [90, 90], "cutoff": 2.5, "widths": [3], "axis_width": 2},
        },
    },
    "data": {"class": "atomic_systems", "batch_size": 2},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 2, "epochs": None, "precision": "64"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two systems of different sizes, one of them again without labels, and one whose frames differ."""
    found = tmp_path_factory.mktemp("systems")
    made_systems.write(found / "small", [made_systems.arrays(3, SMALL, seed=1)], SMALL)
    made_systems.write(found / "large", [made_systems.arrays(4, LARGE, seed=2)], LARGE)
    bare = {key: values for key, values in made_systems.arrays(4, LARGE, seed=2).items() if key in ("coord", "box")}
    made_systems.write(found / "bare", [bare], LARGE)
    arrays = made_systems.arrays(2, (0,) * 5, seed=3)
    for kind, values in (("real_atom_types", [[0, -1, 1, -1, 1], [-1, -1, -1, 1, 0]]),):
        arrays[kind] = np.array(values)
    made_systems.write(found / "virtual", [arrays], (0,) * 5)
    return found


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    """A run of two steps."""
    paths = [str(folder / "small"), str(folder / "large")]
    return train(tmp_path_factory.mktemp("run") / "a", RECIPE, data__train=paths, data__test=paths)


@pytest.fixture(scope="module")
def tested(run: isoscale.Run) -> Measured:
    """What a test of the run finds."""
    return measure(run)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command prints."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["isoscale", *words])
        with pytest.raises(SystemExit) as end:
            command()
        printed = capsys.readouterr()
        assert (end.value.code or 0) == code, printed.err
        return printed.out if code == 0 else printed.err

    return call


def stored(folder: Path, system: str, key: str) -> np.ndarray:
    values = np.load(folder / system / "set.000" / f"{key}.npy").astype(np.float64)
    return values.reshape(len(values), -1, 3) if key in ("coord", "force") else values


def wanted(folder: Path, found: dict[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    """Errors of some systems together, from their files and from predictions."""
    apart: dict[str, list[np.ndarray]] = {"energy": [], "force": []}
    for name in names:
        num_atoms = stored(folder, name, "force").shape[1]
        apart["energy"].append((found[f"{name}.energy"] - stored(folder, name, "energy")) / num_atoms)
        apart["force"].append((found[f"{name}.force"] - stored(folder, name, "force")).ravel())
    joined = {label: np.concatenate(values) for label, values in apart.items()}
    roots = {f"{label}_rmse": float(np.sqrt((values**2).mean())) for label, values in joined.items()}
    return roots | {f"{label}_mae": float(np.abs(values).mean()) for label, values in joined.items()}


class TestFiles:
    def test_forces_are_in_the_order_of_the_stored_atoms(self, run: isoscale.Run, folder: Path) -> None:
        found = isoscale.predict(run)
        for name, types in (("small", SMALL), ("large", LARGE)):
            symbols = ["OH"[kind] for kind in types]
            for frame, coord in enumerate(stored(folder, name, "coord")):
                box = stored(folder, name, "box")[frame].reshape(3, 3)
                atoms = ase.Atoms(symbols, positions=coord, cell=box, pbc=True, calculator=calculator(run))
                assert float(found[f"{name}.energy"][frame]) == pytest.approx(atoms.get_potential_energy(), abs=1e-9)
                np.testing.assert_allclose(found[f"{name}.force"][frame], atoms.get_forces(), atol=1e-10)
                np.testing.assert_allclose(
                    found[f"{name}.atom_energy"][frame], atoms.get_potential_energies(), atol=1e-10
                )
                virial = found[f"{name}.virial"][frame].numpy()
                stress = -(virial + virial.T) / 2 / atoms.get_volume()
                np.testing.assert_allclose(stress, atoms.get_stress(voigt=False), atol=1e-10)

    def test_frames_without_labels_can_be_predicted(
        self, run: isoscale.Run, folder: Path, called: Any, tmp_path: Path
    ) -> None:
        called("predict", str(run.path), "--systems", str(folder / "bare"), "--out", str(tmp_path / "a.npz"))
        own = isoscale.predict(run)
        with np.load(tmp_path / "a.npz") as found:
            np.testing.assert_allclose(found["bare.force"], own["large.force"], atol=1e-10)

    def test_a_test_measures_the_labels_that_there_are(self, run: isoscale.Run, folder: Path, tmp_path: Path) -> None:
        shutil.copytree(folder / "large", tmp_path / "lacking")
        (tmp_path / "lacking" / "set.000" / "force.npy").unlink()
        found = measure(run, data=AtomicSystems(test=[str(tmp_path / "lacking")])).metrics
        whole = measure(run, data=AtomicSystems(test=[str(folder / "large")])).metrics
        assert found == {name: value for name, value in whole.items() if "force" not in name} != whole

    def test_what_is_no_atom_has_no_force(self, run: isoscale.Run, folder: Path) -> None:
        data = AtomicSystems(test=[str(folder / "virtual")])
        force = isoscale.predict(run, data=data, split="predict")["virtual.force"]
        assert force.shape == (2, 5, 3)
        is_atom = force.abs().sum(2) > 0
        assert is_atom.tolist() == [[True, False, True, False, True], [False, False, False, True, True]]

    def test_mixed_batches_give_the_same(self, run: isoscale.Run, folder: Path) -> None:
        own = isoscale.predict(run)
        paths = [str(folder / name) for name in ("small", "large")]
        mixed = isoscale.predict(run, data=AtomicSystems(test=paths, batches="mixed"))
        assert mixed.keys() == own.keys()
        for name, values in own.items():
            torch.testing.assert_close(mixed[name], values, atol=1e-11, rtol=0)


class TestErrors:
    def test_every_system_has_its_own_and_all_have_theirs_together(
        self, run: isoscale.Run, tested: Measured, folder: Path
    ) -> None:
        found = {name: tensor.numpy() for name, tensor in isoscale.predict(run).items()}
        for name in ("small", "large"):
            for metric, value in wanted(folder, found, (name,)).items():
                assert tested.metrics[f"test/{metric}/{name}"] == pytest.approx(value, rel=1e-9)
        for metric, value in wanted(folder, found, ("small", "large")).items():
            assert tested.metrics[f"test/{metric}"] == pytest.approx(value, rel=1e-9)
        assert [tested.metrics[f"test/frames{end}"] for end in ("/small", "/large", "")] == [3, 4, 7]

    def test_labels_that_were_not_learned_are_measured_too(
        self, run: isoscale.Run, tested: Measured, folder: Path
    ) -> None:
        found = isoscale.predict(run)["small.virial"].numpy()
        apart = (found - stored(folder, "small", "virial").reshape(-1, 3, 3)) / len(SMALL)
        assert tested.metrics["test/virial_rmse/small"] == pytest.approx(float(np.sqrt((apart**2).mean())), rel=1e-9)
        assert "test/virial_mae" in tested.metrics

    def test_the_table_has_a_row_for_each_system_with_units(
        self, run: isoscale.Run, tested: Measured, folder: Path, called: Any, tmp_path: Path
    ) -> None:
        printed = called("test", str(run.path), "--systems", str(folder / "small"), str(folder / "large"))
        lines = printed.splitlines()
        rows = {line.split("  ")[1]: line.split()[-6:] for line in lines if line.startswith("  ") and "/" not in line}
        assert "eV/atom" in printed and "eV/Å" in printed
        assert {"small", "large", "all systems"} <= rows.keys()
        number = f"{tested.metrics['test/force_rmse/small']:.4g}"
        assert any(number[:4] in word for line in lines if line.startswith("  small") for word in line.split())
        pictures = [Path(line.strip()) for line in lines[lines.index("pictures:") + 1 :]]
        assert {path.name for path in pictures} == {"energy_parity.png", "force_parity.png"}
        assert all(imread(path).std() > 0.01 and path.parent.name == "systems" for path in pictures)

    def test_one_system_needs_no_table(self, run: isoscale.Run, folder: Path, called: Any) -> None:
        found = json.loads(called("test", str(run.path), "--systems", str(folder / "large"), "--json"))
        assert "test/force_mae" in found and not any(name.endswith("/large") for name in found)
        assert "eV/Å" in called("test", str(run.path), "--systems", str(folder / "large"))

    def test_a_role_of_the_run_and_other_systems_exclude_each_other(
        self, run: isoscale.Run, folder: Path, called: Any
    ) -> None:
        words = ["test", str(run.path), "--role", "train", "--systems", str(folder / "large")]
        assert "leave it out" in called(*words, code=2)

    def test_other_data_has_no_systems(self, called: Any, folder: Path, tmp_path: Path) -> None:
        images = train(tmp_path / "run", train__epochs=1, train__limit_train_batches=1)
        refused = called("test", str(images.path), "--systems", str(folder / "large"), code=2)
        assert "--data is for runs that learn from systems of atoms" in refused


class TestPictures:
    def test_all_energies_and_forces_are_counted(self, tested: Measured) -> None:
        energies, forces = (tested.figures[f"{label}_parity"] for label in ("energy", "force"))
        assert isinstance(energies, Parity) and isinstance(forces, Parity)
        assert energies.counts.sum() == 7
        assert forces.counts.sum() == 3 * (3 * 3 + 4 * 5)
        assert forces.low == -forces.high and forces.counts.shape[0] == forces.counts.shape[1]
        error = tested.metrics["test/force_rmse"]
        assert f"root mean square error {error:.3g}" in forces.words

    def test_counts_are_those_of_a_histogram_however_the_range_grew(self) -> None:
        random = np.random.default_rng(0)
        true, predicted = random.normal(size=(2, 4000)) * np.geomspace(0.01, 3, 4000)
        counts = Counts(torch.device("cpu"))
        for part in range(0, 4000, 100):
            counts.add(torch.tensor(true[part : part + 100]), torch.tensor(predicted[part : part + 100]))
        found, low, high = counts.cut()
        edges = np.linspace(low, high, len(found) + 1)
        np.testing.assert_array_equal(found, np.histogram2d(true, predicted, [edges, edges])[0])
        assert high < 1.1 * max(np.abs(true).max(), np.abs(predicted).max())


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/a/water/data_0"], ["data_0"]),
        (["/a/data_0", "/a/data_1"], ["data_0", "data_1"]),
        (["/a/ice/data_0", "/a/water/data_0"], ["ice/data_0", "water/data_0"]),
        (["all.hdf5#/ice", "all.hdf5#/water"], ["ice", "water"]),
        (["/a/data_0", "/a/data_0"], ["a/data_0 0", "a/data_0 1"]),
    ],
)
def test_systems_are_called_by_what_tells_them_apart(paths: list[str], names: list[str]) -> None:
    assert short_names(paths) == names


def slope(atoms: Any, shift: np.ndarray, strain: np.ndarray) -> float:
    """The derivative of the energy of atoms that move by `shift` in a cell that is strained by `strain`."""
    step, energies = 1e-4, []
    for sign in (1, -1):
        moved = atoms.copy()
        moved.set_cell(atoms.cell @ (np.eye(3) + sign * step * strain), scale_atoms=True)
        moved.positions += sign * step * shift
        moved.calc = atoms.calc
        energies.append(moved.get_potential_energy())
    return (energies[0] - energies[1]) / (2 * step)


@pytest.mark.slow
def test_an_exported_run_is_the_same_potential(run: isoscale.Run, folder: Path, called: Any, tmp_path: Path) -> None:
    box, coord = stored(folder, "large", "box")[0].reshape(3, 3), stored(folder, "large", "coord")[0]
    predicted = isoscale.predict(run)
    wanted = {label: predicted[f"large.{label}"][0].numpy() for label in ("energy", "force", "virial")}
    assert min(np.abs(values).max() for values in wanted.values()) > 1e-2
    shift, strain = np.random.default_rng(0).normal(size=(2, len(LARGE), 3))
    strain = strain[:3] + strain[:3].T
    for ending in ("pt", "safetensors"):
        called("export", str(run.path), "--out", str(tmp_path / f"a.{ending}"))
    for potential in (tmp_path / "a.pt", tmp_path / "a.safetensors", run, run.path):
        atoms = ase.Atoms(["OH"[kind] for kind in LARGE], positions=coord, cell=box, pbc=True)
        atoms.calc = calculator(potential)
        forces, virial = atoms.get_forces(), -atoms.get_volume() * atoms.get_stress(voigt=False)
        assert atoms.get_potential_energy() == pytest.approx(float(wanted["energy"]), abs=1e-10)
        np.testing.assert_allclose(forces, wanted["force"], rtol=0, atol=1e-10)
        np.testing.assert_allclose(virial, (wanted["virial"] + wanted["virial"].T) / 2, rtol=0, atol=1e-10)
        still, rigid = np.zeros_like(shift), np.zeros((3, 3))
        assert -(forces * shift).sum() == pytest.approx(slope(atoms, shift, rigid), rel=1e-6)
        assert -(virial * strain).sum() == pytest.approx(slope(atoms, still, strain), rel=1e-6)
    refused = called("export", str(run.path), "--out", str(tmp_path / "a.pt2"), code=2)
    assert "written as .pt (TorchScript) or .safetensors" in refused


@pytest.mark.slow
def test_a_run_without_test_data_says_how_it_can_be_tested(
    folder: Path, tmp_path: Path, called: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(folder / "small")]
    run = isoscale.train(RECIPE, tmp_path / "run", **{"data.train": paths, "data.val": paths, "train.device": "cpu"})
    words = f"isoscale test {run.path} --split val"
    assert words in capsys.readouterr().out
    assert "val/force_rmse" in called(*words.split()[1:])
    assert "--data PATH" in called("test", str(run.path), code=2)


def test_a_test_says_errors_in_units_and_no_loss(tested: Measured) -> None:
    metrics = {name.split("/")[1] for name in tested.metrics} - {"frames"}
    assert metrics and metrics <= set(tested.units)
