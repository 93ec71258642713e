"""The presets of electronic structure train what they say."""

from pathlib import Path

import pytest

import isoscale
from isoscale.science.electronic.synthetic_files import make_boxes
from tests.helpers import train


@pytest.mark.slow
def test_the_wide_preset_fits_the_material_that_can_be_made(tmp_path: Path):
    make_boxes(tmp_path, lambda *_: None, atoms=2, grid=8, snapshots=3, energies=201)
    smaller = {
        "task__model__widths": [91, 16, 201],
        "data__batch_size": 256,
        "train__epochs": 30,
        "optimizer__lr": 1e-2,
    }
    run = train(tmp_path / "run", "electronic/wide", data__path=str(tmp_path), **smaller)
    assert "val/band_energy" in run.metrics


@pytest.mark.full
def test_the_band_energy_of_an_unseen_snapshot_is_right_to_ten_mev(shared: Path, tmp_path: Path):
    run = train(tmp_path / "run", "electronic/be2-best", data__path=str(shared / "data/electronic/Be2"))
    assert isoscale.test(run)["test/band_energy"] < 10
