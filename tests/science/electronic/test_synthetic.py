"""Made-up snapshots: reproducible at any size, readable as real ones, and learnable."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from isoscale.cli.main import app
from isoscale.errors import UserError
from isoscale.science.electronic import synthetic, synthetic_files
from isoscale.science.electronic.calculation import read_calculation
from isoscale.science.electronic.integrals import Quadrature
from isoscale.science.electronic.states import fill_with
from isoscale.science.electronic.synthetic import Box, Sums, Tile, make_box, tiles
from isoscale.science.electronic.synthetic_files import make_boxes
from tests.helpers import train

CPU = torch.device("cpu")
SMALL = {"atoms": 8, "grid": "12,10,9", "snapshots": 2}


def make(folder: Path, **keys) -> Path:
    make_boxes(folder, lambda *_: None, **{**SMALL, **keys})
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_files_do_not_depend_on_how_many_threads_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(synthetic_files.TILE_ROWS, "cpu", 30)
    several = files(make(tmp_path / "several"))
    monkeypatch.setattr(synthetic_files, "MOST_WORKERS", 1)
    assert files(make(tmp_path / "one")) == several


def test_another_seed_moves_the_atoms_and_snapshots_differ(tmp_path: Path):
    one, other = make(tmp_path / "0"), make(tmp_path / "1", seed=1)
    contents = [(folder / f"snapshot{number}.in.npy").read_bytes() for folder in (one, other) for number in (0, 1)]
    assert len(set(contents)) == 4


def test_sums_are_those_over_all_atoms_and_their_images():
    box = make_box((6, 7, 8), 5, seed=3)
    found = Sums(box, CPU).invariants(2, 1, 4)
    edges = torch.tensor(box.cell, dtype=torch.float64)
    images = edges * torch.cartesian_prod(*[torch.arange(-4.0, 5.0)] * 3).double()
    atoms = (box.positions[:, None] + images).reshape(-1, 3)
    for line, point in ((0, 0), (2, 5)):
        place = torch.tensor([2, 1 + line, point]) * edges / torch.tensor(box.grid)
        expected = by_definition(atoms - place)
        assert found[:, line * 8 + point].double() == pytest.approx(expected, rel=2e-4, abs=2e-4)


def by_definition(apart: torch.Tensor) -> torch.Tensor:
    moments = []
    for width in synthetic.WIDTHS:
        away = apart / width
        weight = torch.exp(-away.square().sum(1) / 2)
        square = torch.einsum("a,ai,aj->ij", weight, away, away)
        moments.append((weight.sum(), weight @ away, square - torch.eye(3).double() * square.trace() / 3))
    found = [moment[0] for moment in moments]
    for number, one in enumerate(moments):
        for other in moments[number:]:
            found += [one[1] @ other[1], (one[2] * other[2]).sum()]
    return torch.stack(found)


def test_what_is_around_a_point_does_not_change_when_all_is_turned():
    box = make_box((6, 6, 6), 8, seed=0)
    turned = Box(box.grid, box.positions[:, [1, 0, 2]])
    one, other = (Sums(each, CPU).invariants(3, 0, 6).view(-1, 6, 6) for each in (box, turned))
    assert one[:, 3] == pytest.approx(other[:, 3], rel=1e-4, abs=1e-4)


def test_tiles_are_all_rows_once_and_in_order():
    found = list(tiles((3, 5, 4), 9))
    assert found[1] == Tile(0, 2, 4, 8, 8)
    rows = [row for tile in found for row in range(tile.first_row, tile.first_row + tile.num_rows)]
    assert rows == list(range(60))


def test_a_snapshot_is_read_as_a_real_one_and_its_fermi_level_is_on_the_grid(tmp_path: Path):
    folder = make(tmp_path, energies=21)
    inputs, ldos = (np.load(folder / f"snapshot1.{kind}.npy") for kind in ("in", "out"))
    assert inputs.shape == (12, 10, 9, 94)
    assert ldos.shape == (12, 10, 9, 21)
    assert inputs.dtype == ldos.dtype == np.float32
    assert ldos.min() > 0
    known = read_calculation(folder / "snapshot1.info.json")
    assert (known.num_atoms, known.num_electrons, known.grid) == (8, 16.0, (12, 10, 9))
    dos = torch.as_tensor(ldos.astype(np.float64).reshape(-1, 21).sum(0) * known.volume / 1080)[None]
    quadrature = Quadrature(synthetic.energy_grid(21), [known.temperature])
    filling = fill_with(dos, torch.tensor([16.0]).double(), quadrature)
    written = json.loads((folder / "snapshot1.info.json").read_text())
    assert written["fermi_energy_dft"] == pytest.approx(filling.fermi.item())
    assert written["band_energy_dft_calculation"] == pytest.approx(filling.band_energy.item())
    assert synthetic.LOWEST < filling.fermi.item() < synthetic.HIGHEST


def test_the_places_of_points_stand_before_their_descriptors(tmp_path: Path):
    inputs = np.load(make(tmp_path) / "snapshot0.in.npy")
    voxel = np.diag(json.loads((tmp_path / "snapshot0.info.json").read_text())["voxel"]["array"])
    assert inputs[4, 3, 7, :3] == pytest.approx(voxel * [4, 3, 7])


def test_what_is_there_is_left_alone_and_something_else_is_refused(tmp_path: Path):
    folder = make(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    words = make_boxes(folder, lambda *_: None, **{**SMALL, "snapshots": 3})
    assert [line.endswith("made already") for line in words] == [True, True, False]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    with pytest.raises(UserError, match="made with atoms=8"):
        make(folder, atoms=9)
    (folder / "snapshot1.info.json").unlink()
    with pytest.raises(UserError, match=r"snapshot1\.in\.npy is there already"):
        make(folder)


def test_nothing_is_left_of_a_snapshot_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthetic_files, "_write_at", refuse)
    with pytest.raises(UserError, match="No space left on device"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"grid": "4,5"}, "grid=4,5: expected the points"),
        ({"grid": "4,x,5"}, "expected the points"),
        ({"atoms": 0}, "atoms=0: at least 1"),
        ({"energies": 2}, "energies=2: at least 3"),
        ({"device": "tpu"}, "expected one of cpu, cuda"),
    ],
)
def test_bad_sizes_are_named(keys: dict, words: str, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        make(tmp_path, **keys)


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"take 0\.0 GB, but .* has 0\.0 GB left"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_makes_a_set_and_names_what_it_does_not_know(tmp_path: Path):
    words = ["data", "make", "electronic/box", "--out", str(tmp_path / "set")]
    result = CliRunner().invoke(app, [*words, "atoms=4", "grid=8,8,8", "snapshots=1"])
    assert result.exit_code == 0, result.output
    assert "512 points" in result.output
    failed = CliRunner().invoke(app, [*words, "atom=4"])
    assert 'did you mean "atoms"?' in str(failed.exception)
    assert "leave rows.csv out" in str(CliRunner().invoke(app, [*words, "rows.csv"]).exception)


@pytest.mark.slow
def test_states_can_be_learnt_from_descriptors(tmp_path: Path):
    folder = make(tmp_path / "set", atoms=64, grid=24)
    keys = {"data__train": ["snapshot0"], "data__val": ["snapshot1"], "data__test": None}
    run = train(
        tmp_path / "run", "electronic/be2", data__path=str(folder), data__batch_size=200, train__epochs=10, **keys
    )
    known, asked = (np.load(folder / f"snapshot{number}.out.npy").reshape(-1, 11) for number in (0, 1))
    by_the_mean = np.square((asked - known.mean(0)) / (known.max() - known.min())).mean()
    assert run.metrics["val/loss"] < 0.25 * by_the_mean
    assert run.metrics["val/band_energy"] < 500
