"""Learning a local density of states, with band energies measured on the way."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import isoscale
from isoscale.errors import UserError
from isoscale.science.electronic.calculation import read_calculation
from isoscale.science.electronic.integrals import EnergyGrid, Quadrature
from isoscale.science.electronic.states import fill_with
from tests.helpers import timeless, train

METRICS = ["band_energy", "fermi_energy", "dos_relative", "density_relative", "ldos"]
SHORT = {"train__epochs": 2, "data__batch_size": 500, "task__physics": {"metrics": METRICS, "every": 1}}


@pytest.fixture
def folder(shared: Path) -> Path:
    return shared / "data/electronic/Be2"


def band_energy(ldos: np.ndarray, folder: Path, number: int) -> tuple[float, int]:
    """In eV, and how many atoms there are."""
    known = read_calculation(folder / f"Be_snapshot{number}.info.json")
    dos = torch.as_tensor(ldos.astype(np.float64).reshape(-1, 11).sum(0) * known.volume / (ldos.size // 11))
    quadrature = Quadrature(EnergyGrid(11, 2.5, -5.0), [known.temperature])
    electrons = torch.tensor([known.num_electrons], dtype=torch.float64)
    return fill_with(dos[None], electrons, quadrature).band_energy.item(), known.num_atoms


def test_the_error_of_the_band_energy_is_that_of_the_predictions(folder: Path, tmp_path: Path):
    run = train(tmp_path / "run", "electronic/be2", data__path=str(folder), **SHORT)
    found = isoscale.test(run)
    predicted = isoscale.predict(run)
    for number in (2, 3):
        own = predicted[f"Be_snapshot{number}.ldos"].numpy()
        energy, num_atoms = band_energy(own, folder, number)
        expected, _ = band_energy(np.load(folder / f"Be_snapshot{number}.out.npy"), folder, number)
        error = 1000 * (energy - expected) / num_atoms
        assert found[f"test/band_energy/Be_snapshot{number}"] == pytest.approx(error, abs=1e-6)
    each = [abs(found[f"test/band_energy/Be_snapshot{number}"]) for number in (2, 3)]
    assert found["test/band_energy"] == pytest.approx(sum(each) / 2)


def test_the_band_energy_can_choose_the_best_weights(folder: Path, tmp_path: Path):
    steer = {"checkpoint__monitor": "val/band_energy", "checkpoint__mode": "min"}
    run = train(tmp_path / "run", "electronic/be2", data__path=str(folder), **{**SHORT, **steer})
    assert run.summary()["best"]["name"] == "val/band_energy"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"task__energies": {"size": 12, "spacing": 2.5, "offset": -5}}, "11 values at each point, but"),
        ({"task__physics": {"metrics": ["bandenergy"]}}, "there is no metric 'bandenergy'"),
        ({"data__val": ["Be_snapshot9"]}, 'there is no snapshot "Be_snapshot9"'),
        ({"task__model__widths": [94, 100, 11]}, r"91 descriptors .* set task.model.widths=\[91, 100, 11\]"),
        ({"task__model__widths": [91, 100, 12]}, r"are \[91, 100, 12\]: set task.model.widths=\[91, 100, 11\]"),
    ],
)
def test_bad_input_is_named(keys: dict, words: str, folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        train(tmp_path / "run", "electronic/be2", data__path=str(folder), **{**SHORT, **keys})


def test_a_snapshot_without_its_calculation_is_named_before_training(folder: Path, tmp_path: Path):
    for number in (0, 1):
        for kind in ("in.npy", "out.npy"):
            (tmp_path / f"Be_snapshot{number}.{kind}").symlink_to(folder / f"Be_snapshot{number}.{kind}")
    with pytest.raises(UserError, match=r"band_energy needs the calculation of snapshot Be_snapshot1: put "):
        train(tmp_path / "run", "electronic/be2", data__path=str(tmp_path), data__test=None, **SHORT)


def test_descriptors_and_densities_of_other_grids_are_refused(folder: Path, tmp_path: Path):
    (tmp_path / "a.in.npy").symlink_to(folder / "Be_snapshot0.in.npy")
    np.save(tmp_path / "a.out.npy", np.zeros((18, 27, 18, 11), np.float32))
    with pytest.raises(UserError, match=r"18×18×27 points, but .* 18×27×18"):
        train(tmp_path / "run", "electronic/be2", data__path=str(tmp_path), data__train=["a"], **SHORT)


def test_descriptors_that_do_not_vary_are_listed_once(folder: Path, tmp_path: Path):
    for number in (0, 1):
        inputs = np.load(folder / f"Be_snapshot{number}.in.npy")
        inputs[..., 3 + 40] = 0.1
        np.save(tmp_path / f"Be_snapshot{number}.in.npy", inputs)
        for kind in ("out.npy", "info.json"):
            (tmp_path / f"Be_snapshot{number}.{kind}").symlink_to(folder / f"Be_snapshot{number}.{kind}")
    words = "input: 1 of 91 numbers of a sample do not vary in the training data and are shifted only (40)"
    for epochs in (1, 2):  # nothing is measured, and so nothing said, where a run goes on
        keys = {**SHORT, "data__path": str(tmp_path), "data__test": None, "train__epochs": epochs}
        run = train(tmp_path / "run", "electronic/be2", **keys)
        assert (run.path / "log.txt").read_text().count(words) == 1


def test_states_that_cannot_be_filled_have_no_energy(folder: Path, tmp_path: Path):
    keys = {**SHORT, "data__path": str(folder), "task__energies": {"size": 11, "spacing": 0.1, "offset": -5}}
    run = train(tmp_path / "run", "electronic/be2", **keys)
    told = (run.path / "log.txt").read_text()
    assert re.search(
        r"the true states have no Fermi level .*: Be_snapshot1 has 4 electrons, and they hold \S+ to \S+", told
    )
    logged = {line["name"] for line in timeless(run)}
    assert "val/ldos" in logged and not any("band_energy" in name for name in logged)
