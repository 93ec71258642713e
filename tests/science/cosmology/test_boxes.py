"""Files of boxes: whole or not there, with all that is needed to read them."""

from pathlib import Path

import h5py
import pytest
import torch

from isoscale.errors import UserError
from isoscale.science.cosmology import boxes
from isoscale.science.cosmology.boxes import Scales, make_box, write_box
from isoscale.science.cosmology.simulation import Simulation, simulate
from tests.cli.conftest import isoscale

__all__ = ["isoscale"]

CPU = torch.device("cpu")
SMALL = Simulation(cells=8, particles_per_cell=1, steps=2, seed=5)


def test_a_file_holds_the_box_and_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(boxes, "CHUNK", 3)
    write_box(tmp_path / "new" / "box.h5", SMALL, CPU)
    nbody, hydro, scales = make_box(SMALL, CPU)
    with h5py.File(tmp_path / "new" / "box.h5") as file:
        assert sorted(file) == ["Hydro", "Nbody"]
        assert file["Nbody"].chunks == (4, 3, 3, 3) and file["Hydro"].dtype == "float32"
        assert torch.equal(torch.from_numpy(file["Nbody"][:]), nbody)
        assert torch.equal(torch.from_numpy(file["Hydro"][:]), hydro)
        assert list(file["Hydro"].attrs["fields"])[-1] == "temperature"
        assert file.attrs["seed"] == 5 and file.attrs["redshift"] == 3 and file.attrs["cosmology_omega_m"] == 0.31
        assert file.attrs["box_size"] == pytest.approx(0.32) and file.attrs["scale_velocity"] == scales.velocity
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["box.h5"]


def test_scaled_fields_are_about_one_and_can_be_undone():
    nbody, hydro, scales = make_box(SMALL, CPU)
    for scaled, fields in zip((nbody, hydro), simulate(SMALL, CPU), strict=True):
        assert scaled.abs().max() <= 1
        assert torch.allclose(scales.undo(scaled), fields, rtol=1e-4, atol=1e-4)
    assert Scales().normalize(torch.ones(4, 2, 2, 2))[0].abs().max() == 0


def test_a_file_that_is_there_is_left_alone(tmp_path: Path):
    path = tmp_path / "box.h5"
    path.write_text("precious")
    with pytest.raises(UserError, match="is there already"):
        write_box(path, SMALL, CPU)
    assert path.read_text() == "precious"


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(boxes, "_write_fields", fail)
    with pytest.raises(UserError, match="No space left"):
        write_box(tmp_path / "box.h5", SMALL, CPU)
    assert list(tmp_path.iterdir()) == []


def test_a_box_that_does_not_fit_on_the_disk_is_refused_before_the_work(tmp_path: Path):
    with pytest.raises(UserError, match="takes 36000000000000"):
        write_box(tmp_path / "box.h5", Simulation(cells=10**7), CPU)


def test_progress_is_reported():
    seen = []
    make_box(SMALL, CPU, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


TINY = ("cells=8", "particles_per_cell=1", "steps=2")


def test_the_command_makes_boxes_once(isoscale, tmp_path: Path):
    made = isoscale("data", "make", "cosmology/box", *TINY, "boxes=2", "--out", str(tmp_path))
    assert made.code == 0 and "box1.h5: 8³ cells of 0.04 Mpc/h, seed 1, " in made.out
    with h5py.File(tmp_path / "box0.h5") as one, h5py.File(tmp_path / "box1.h5") as other:
        assert (one["Nbody"][:] != other["Nbody"][:]).any()
    assert "made already" in isoscale("data", "make", "cosmology/box", *TINY, "--out", str(tmp_path)).out


@pytest.mark.parametrize(("words", "message"), [
    (("cells=7",), "cells=7: an even number"),
    (("cells=many",), 'expected a whole number, found "many"'),
    (("celsl=8",), 'did you mean "cells"'),
    (("cosmology={omega_n: 0.3}",), "has no setting 'omega_n'; it has omega_m"),
    (("boxes=0",), "at least one"),
    (("seed=3",), "with seed=0 and not 3: choose another folder"),
    (("device=cuda",), "device=cuda: torch sees none here"),
    (("device=gpu",), "device=gpu: expected auto or one of"),
])  # fmt: skip
def test_what_cannot_be_made_is_said_and_nothing_is_touched(isoscale, words, message: str, tmp_path: Path):
    if words == ("device=cuda",) and torch.cuda.is_available():
        pytest.skip("has a CUDA device")
    isoscale("data", "make", "cosmology/box", *TINY, "--out", str(tmp_path))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    refused = isoscale("data", "make", "cosmology/box", *TINY, *words, "--out", str(tmp_path))
    assert refused.code == 2 and message in refused.err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
