"""What a scientist gets out of a trained network: tables, pictures and files, against plain loops."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import isoscale
from isoscale.cli.main import run as command
from isoscale.observe.figures import Matrix, Parity
from isoscale.runs.inference import Measured, measure
from isoscale.science.crystals import Structures
from isoscale.science.crystals.targets import GPA
from tests.helpers import cli, train

SYMBOLS = {3: "Li", 15: "P", 16: "S"}
COUNTS = (2, 1, 7, 2, 9, 4, 3)
RECIPE: dict[str, Any] = {
    "task": {
        "class": "crystal", "model": {"class": "painn", "width": 8, "layers": 1, "cutoff": 4.5},
        "targets": {"energy": None, "forces": None, "stress": None, "gap": {"unit": "eV"}, "charges": {"of": "atom"},
                    "phase": {"classes": 2}},
    },
    "data": {"class": "structures", "batch_size": 3},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 2, "epochs": None, "precision": "64"},
}  # fmt: skip


def structures(seed: int, counts: tuple[int, ...] = COUNTS) -> list[dict[str, Any]]:
    """Atoms at random; some have no forces, and some no stress."""
    random = np.random.default_rng(seed)
    made = []
    for number, count in enumerate(counts):
        grid = np.array([(x, y, z) for x in range(3) for y in range(2) for z in range(2)])[:count]
        one = {
            "z": random.choice(list(SYMBOLS), count), "pos": 2.2 * grid + random.uniform(-0.2, 0.2, (count, 3)),
            "cell": np.diag([6.6, 4.4, 4.4]), "energy": -3.0 * count + random.normal(), "gap": random.uniform(0, 3),
            "charges": random.normal(size=count), "phase": int(random.integers(0, 2)), "name": "ab"[number % 2],
        }  # fmt: skip
        if number != 2:
            one["forces"] = random.normal(size=(count, 3))
        if number not in (1, 4):
            stress = random.normal(size=(3, 3)) * 0.01
            one["stress"] = (stress + stress.T) / 2
        made.append(one)
    return made


def write(path: Path, made: list[dict[str, Any]]) -> Path:
    """An extended XYZ file that says its units."""
    lines = []
    for one in made:
        cell, has_forces = " ".join(map(str, one["cell"].ravel())), "forces" in one
        said = {"energy": one["energy"], "gap": one["gap"], "phase": one["phase"], "config_type": one["name"]}
        if "stress" in one:
            said["stress"] = '"' + " ".join(map(repr, one["stress"].ravel().tolist())) + '"'
        columns = "species:S:1:pos:R:3:charges:R:1" + (":forces:R:3" if has_forces else "")
        words = " ".join(f"{key}={value}" for key, value in said.items())
        lines += [str(len(one["z"])), f'Lattice="{cell}" Properties={columns} pbc="T T T" energy_unit=eV '
                  f"forces_unit=eV/A stress_unit=eV/A^3 {words}"]  # fmt: skip
        for atom, number in enumerate(one["z"].tolist()):
            values = [*one["pos"][atom], one["charges"][atom], *(one["forces"][atom] if has_forces else ())]
            lines.append(f"{SYMBOLS[number]} {' '.join(repr(float(value)) for value in values)}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def made() -> list[dict[str, Any]]:
    """The structures that are tested."""
    return structures(2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, made: list[dict[str, Any]]) -> isoscale.Run:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("run")
    files = {"train": write(folder / "train.xyz", structures(1, COUNTS * 2)), "test": write(folder / "test.xyz", made)}
    paths = {f"data__{split}": str(path) for split, path in files.items()}
    return train(folder / "a", RECIPE, data__val=str(files["test"]), **paths)


@pytest.fixture(scope="module")
def found(run: isoscale.Run) -> dict[str, np.ndarray]:
    """What is predicted."""
    return {name: values.numpy() for name, values in isoscale.predict(run).items()}


@pytest.fixture(scope="module")
def tested(run: isoscale.Run) -> Measured:
    """What a test of the run finds."""
    return measure(run)


def errors(made: list[dict[str, Any]], found: dict[str, np.ndarray], name: str, chosen: Any) -> np.ndarray:
    """Errors of chosen structures, or of chosen atoms, by plain loops."""
    apart: list[float] = []
    start = 0
    for number, one in enumerate(made):
        count = len(one["z"])
        if name not in one:
            pass
        elif name in ("forces", "charges"):
            rows = (found[name][start : start + count] - one[name]).reshape(count, -1)
            apart += [value for atom in range(count) if chosen(one, one["z"][atom]) for value in rows[atom]]
        elif chosen(one, None):
            scale = {"energy": 1 / count, "stress": GPA}.get(name, 1.0)
            apart += (scale * np.ravel(found[name][number] - one[name])).tolist()
        start += count
    return np.array(apart)


def check(tested: Measured, values: np.ndarray, name: str, end: str) -> None:
    if not len(values):
        assert f"test/{name}_mae{end}" not in tested.metrics
        return
    assert tested.metrics[f"test/{name}_mae{end}"] == pytest.approx(np.abs(values).mean(), rel=1e-8)
    assert tested.metrics[f"test/{name}_rmse{end}"] == pytest.approx(np.sqrt((values**2).mean()), rel=1e-8)


class TestErrors:
    NAMES = ("energy", "forces", "stress", "gap", "charges")

    def test_of_all_structures(self, tested: Measured, made: list[dict[str, Any]], found: dict[str, Any]) -> None:
        for name in self.NAMES:
            check(tested, errors(made, found, name, lambda one, z: True), name, "")

    def test_of_atoms_by_element(self, tested: Measured, made: list[dict[str, Any]], found: dict[str, Any]) -> None:
        for number, symbol in SYMBOLS.items():
            for name in ("forces", "charges"):
                values = errors(made, found, name, lambda one, z: z == number)  # noqa: B023
                assert len(values)
                check(tested, values, name, f"/{symbol} atoms")
        assert "test/energy_mae/Li atoms" not in tested.metrics

    def test_by_size(self, tested: Measured, made: list[dict[str, Any]], found: dict[str, Any]) -> None:
        sizes = {"1 atom": (1, 1), "2 atoms": (2, 2), "3-4 atoms": (3, 4), "5-8 atoms": (5, 8), "9-16 atoms": (9, 16)}
        for label, (low, high) in sizes.items():
            for name in self.NAMES:
                values = errors(made, found, name, lambda one, z: low <= len(one["z"]) <= high)  # noqa: B023
                check(tested, values, name, f"/{label}")

    def test_by_system(self, tested: Measured, made: list[dict[str, Any]], found: dict[str, Any]) -> None:
        for system in "ab":
            for name in self.NAMES:
                values = errors(made, found, name, lambda one, z: one["name"] == system)  # noqa: B023
                assert len(values)
                check(tested, values, name, f"/{system}")

    def test_of_classes(self, tested: Measured, made: list[dict[str, Any]], found: dict[str, Any]) -> None:
        right = [found["phase"][number] == one["phase"] for number, one in enumerate(made)]
        assert tested.metrics["test/phase_accuracy"] == pytest.approx(np.mean(right))
        np.testing.assert_allclose(found["phase_probability"].sum(1), 1)
        np.testing.assert_array_equal(found["phase_probability"].argmax(1), found["phase"])

    def test_those_of_a_validation_are_the_same(self, run: isoscale.Run, tested: Measured) -> None:
        for name in ("energy_mae", "forces_rmse", "stress_mae", "gap_rmse", "charges_mae", "phase_accuracy"):
            assert run.metrics[f"val/{name}"] == pytest.approx(tested.metrics[f"test/{name}"], rel=1e-8), name

    def test_those_without_systems_and_of_one_size_are_one_row(self, run: isoscale.Run, tmp_path: Path) -> None:
        alike = structures(3, (2, 2))
        for one in alike:
            one["name"], one["z"] = "a", np.array([3, 3])
        path = write(tmp_path / "alike.xyz", alike)
        metrics = measure(run, data=Structures.from_paths([str(path)])).metrics
        assert "test/forces_mae" in metrics and not any(name.count("/") > 1 for name in metrics)

    def test_the_table_has_rows_and_units(
        self, run: isoscale.Run, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", ["isoscale", "test", str(run.path)])
        with pytest.raises(SystemExit):
            command()
        printed = capsys.readouterr().out
        for word in ("eV/atom", "eV/Å", "GPa", "Li atoms", "9-16 atoms", "all structures", "stress_parity.png"):
            assert word in printed


class TestPictures:
    def test_every_value_is_counted(self, tested: Measured, made: list[dict[str, Any]]) -> None:
        counts = {}
        for name in ("energy", "forces", "stress", "gap", "charges"):
            figure = tested.figures[f"{name}_parity"]
            assert isinstance(figure, Parity)
            counts[name] = figure.counts.sum()
        of_forces = sum(3 * len(one["z"]) for one in made if "forces" in one)
        of_stress = sum(9 for one in made if "stress" in one)
        atoms = sum(len(one["z"]) for one in made)
        assert counts == {"energy": 7, "forces": of_forces, "stress": of_stress, "gap": 7, "charges": atoms}

    def test_classes_have_a_matrix(self, tested: Measured, made: list[dict[str, Any]], found: dict[str, Any]) -> None:
        figure = tested.figures["phase_confusion"]
        assert isinstance(figure, Matrix)
        wanted = np.zeros((2, 2), int)
        for number, one in enumerate(made):
            wanted[one["phase"], found["phase"][number]] += 1
        np.testing.assert_array_equal(figure.counts, wanted)


class TestFiles:
    def test_atoms_are_those_of_structures_one_after_the_other(
        self, run: isoscale.Run, made: list[dict[str, Any]], found: dict[str, Any], tmp_path: Path
    ) -> None:
        assert np.diff(found["ptr"]).tolist() == [len(one["z"]) for one in made]
        assert {name: values.shape for name, values in found.items()} == {
            "energy": (7,), "forces": (28, 3), "stress": (7, 3, 3), "gap": (7,), "charges": (28,), "phase": (7,),
            "phase_probability": (7, 2), "ptr": (8,),
        }  # fmt: skip
        for number in (4, 1):
            path = write(tmp_path / "one.xyz", [made[number]])
            alone = isoscale.predict(run, data=Structures.from_paths([str(path)]), split="predict")
            atoms = slice(*found["ptr"][number : number + 2])
            np.testing.assert_allclose(alone["forces"], found["forces"][atoms], atol=1e-10)
            np.testing.assert_allclose(alone["energy"], found["energy"][[number]], atol=1e-10)

    def test_structures_without_labels_can_be_predicted_but_not_tested(
        self, run: isoscale.Run, made: list[dict[str, Any]], found: dict[str, Any], tmp_path: Path
    ) -> None:
        path = tmp_path / "bare.xyz"
        text = []
        for one in made:
            cell = " ".join(map(str, one["cell"].ravel()))
            text += [str(len(one["z"])), f'Lattice="{cell}" Properties=species:S:1:pos:R:3 pbc="T T T"']
            text += [
                f"{SYMBOLS[z]} {' '.join(map(repr, x.tolist()))}" for z, x in zip(one["z"], one["pos"], strict=True)
            ]
        path.write_text("\n".join(text) + "\n")
        bare = Structures.from_paths([str(path)])
        np.testing.assert_allclose(
            isoscale.predict(run, data=bare, split="predict")["energy"], found["energy"], atol=1e-10
        )
        with pytest.raises(isoscale.UserError, match="isoscale predict"):
            measure(run, data=bare)

    def test_forces_are_slopes_of_the_energy_in_units_of_the_data(
        self, run: isoscale.Run, made: list[dict[str, Any]], found: dict[str, Any], tmp_path: Path
    ) -> None:
        """So that no scale is undone twice, or in one of them only."""
        step, number, atom, axis = 1e-4, 4, 2, 1
        moved = []
        for sign in (1, -1):
            one = {**made[number], "pos": made[number]["pos"].copy()}
            one["pos"][atom, axis] += sign * step
            moved.append(one)
        path = write(tmp_path / "moved.xyz", moved)
        energies = isoscale.predict(run, data=Structures.from_paths([str(path)]), split="predict")["energy"]
        slope = float(energies[0] - energies[1]) / (2 * step)
        assert found["forces"][found["ptr"][number] + atom, axis] == pytest.approx(-slope, abs=1e-7)
        scale = run.model().heads["energy"].scale
        assert float(scale) not in (0.0, 1.0)

    def test_two_ranks_write_the_same_file(self, run: isoscale.Run, found: dict[str, Any], tmp_path: Path) -> None:
        for place in (tmp_path / "both.npz", tmp_path / "folder"):
            cli("predict", str(run.path), "--out", str(place), "--devices", "2", cwd=tmp_path).check_returncode()
            both = dict(np.load(place)) if place.suffix else {path.stem: np.load(path) for path in place.glob("*.npy")}
            assert both.keys() == found.keys()
            for name, values in found.items():
                np.testing.assert_allclose(both[name], values, atol=1e-12)


def test_references_of_elements_are_kept_with_the_weights(run: isoscale.Run) -> None:
    known = run.model().heads["energy"].mean[torch.tensor(list(SYMBOLS))]
    assert torch.all(known < -2) and torch.all(known > -4)
