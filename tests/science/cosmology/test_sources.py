"""Boxes in files of any kind are the same boxes, and what is wrong with one is said."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from isoscale.errors import UserError
from isoscale.science.cosmology.sources import Boxes, SimulatedBoxes
from tests.helpers import train
from tests.science.cosmology import made_boxes
from tests.science.cosmology.made_boxes import arrays, write

KEYS = {"crop": 4, "wrap": True}


def as_npz(folder: Path) -> Path:
    np.savez(folder / "box.npz", **arrays())
    return folder / "box.npz"


def as_npy(folder: Path) -> Path:
    (folder / "box").mkdir()
    for name, array in arrays().items():
        np.save(folder / "box" / f"{name}.npy", array)
    return folder / "box"


def as_zarr(folder: Path) -> Path:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(folder / "box.zarr"), mode="w")
    for name, array in arrays().items():
        group.create_array(name, shape=array.shape, chunks=(1, 4, 4, 4), dtype=array.dtype)[:] = array
    return folder / "box.zarr"


@pytest.mark.parametrize("written", [as_npz, as_npy, as_zarr])
def test_a_box_is_the_same_in_files_of_every_kind(written: Any, tmp_path: Path) -> None:
    expected = Boxes(str(write(tmp_path / "box.h5")), **KEYS)
    found = Boxes(str(written(tmp_path)), **KEYS)
    indices = torch.tensor([0, 17, len(expected.train) - 1])
    for key, tensor in expected.train.fetch(indices).items():
        assert torch.equal(found.train.fetch(indices)[key], tensor)
    assert found.crops["train"].volumes[0].fields == expected.crops["train"].volumes[0].fields


def test_boxes_are_found_by_pattern_and_in_the_folder_of_all_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 1):
        write(tmp_path / f"box{number}.h5", number)
    monkeypatch.setenv("ISOSCALE_DATA", str(tmp_path))
    found = Boxes(str(tmp_path / "box*.h5"), val="box1.h5", eval_samples=7, **KEYS)
    assert len(found.train) == 2 * 12**3 and len(found.val) == 7
    assert found.crops["val"].volumes[0].cell_size == 0.04


def test_crops_of_a_validation_are_always_the_same_and_all_where_there_are_few(tmp_path: Path) -> None:
    path = str(write(tmp_path / "box.h5"))
    one, other = (Boxes(path, val=path, eval_samples=5, **KEYS).val.indices for _ in range(2))
    assert torch.equal(one, other) and len(set(one.tolist())) == 5
    assert len(Boxes(path, val=path, crop=12).val) == 1


def test_boxes_of_different_size_are_trained_together(tmp_path: Path) -> None:
    paths = [str(write(tmp_path / f"box{side}.h5", side=side)) for side in (8, 12)]
    assert len(Boxes(paths, crop=8).train) == 1 + 5**3


def not_a_number(array: Any) -> Any:
    array = array.copy()
    array[2, 3, 4, 5] = np.nan
    return array


def damaged(folder: Path) -> str:
    path = write(folder / "box.h5", side=16)
    path.write_bytes(path.read_bytes()[:9000])
    return str(path)


def unfinished(folder: Path) -> str:
    path = write(folder / "box.h5")
    with h5py.File(path, "a") as file:
        whole = file["Hydro"][:]
        del file["Hydro"]
        file.create_dataset("Hydro", whole.shape, whole.dtype, chunks=(5, 6, 12, 12))[:, :6] = whole[:, :6]
    return str(path)


def with_others(folder: Path, **changes: Any) -> str:
    return str(write(folder / "box.h5", **changes))


BAD = {
    "no box": (lambda folder: None, {}, "data names no box"),
    "no such file": (lambda folder: str(folder / "none.h5"), {}, "data.train: there is no file"),
    "cut short": (damaged, {}, "box.h5 is truncated: 9,000 bytes found"),
    "never written": (unfinished, {}, "Hydro.*: 1 of its 2 chunks were never written, and would be read as 0.0"),
    "no such array": (with_others, {"target": "Gas"}, 'has no dataset "Gas"; there is Hydro, Nbody'),
    "too small": (with_others, {"crop": 16, "wrap": False}, "too few for a crop of 16³; use data.crop=12 or less, or"),
    "other sizes": (
        lambda folder: with_others(folder, Hydro=arrays(side=8)["Hydro"]), {},
        r"arrays \(fields, cells, cells, cells\) of one size, found input \(4, 12, 12, 12\), target \(5, 8, 8, 8\)",
    ),
    "names": (with_others, {"fields": {"input": ["a"]}}, "Nbody has 4 fields, but 1 names"),
    "other fields": (
        lambda folder: [with_others(folder), str(write(folder / "b.h5", Hydro=arrays()["Hydro"][:4]))], {},
        "b.h5 has the fields .* but .*box.h5 has .* in the same order",
    ),
    "no axis of fields": (
        lambda folder: [with_others(folder), str(write(folder / "b.h5", Nbody=arrays()["Nbody"][0]))], {},
        r"b.h5: Nbody has the shape \(12, 12, 12\); expected \(fields, cells, cells, cells\)",
    ),
    "crop": (with_others, {"crop": 0}, "data.crop is 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_boxes_are_named_with_what_to_do(case: str, tmp_path: Path) -> None:
    made, keys, words = BAD[case]
    with pytest.raises(UserError, match=words):
        Boxes(made(tmp_path), **{**KEYS, **keys})


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_what_is_not_a_number_is_named_with_file_field_and_cell(place: str, tmp_path: Path) -> None:
    recipe = made_boxes.recipe(tmp_path)
    write(tmp_path / "box0.h5", Nbody=not_a_number(arrays()["Nbody"]))
    with pytest.raises(UserError, match=r"box0.h5: input, field velocity_y, is nan at the cell \(3, 4, 5\)"):
        train(tmp_path / "run", recipe, data__residency=place)


@pytest.mark.parametrize("form", ["hdf5", "npy"])
def test_boxes_of_another_byte_order_are_read_as_if_they_had_ours(form: str, tmp_path: Path) -> None:
    swapped = {name: array.astype(array.dtype.newbyteorder("S")) for name, array in arrays().items()}
    path = tmp_path / "box"
    if form == "hdf5":
        path = write(tmp_path / "box.h5", **swapped)
    else:
        path.mkdir()
        for name, array in swapped.items():
            np.save(path / f"{name}.npy", array)
    found = Boxes(str(path), **KEYS).crops["train"]
    expected = Boxes(str(write(tmp_path / "plain.h5")), **KEYS).crops["train"]
    for crops in (found, found.in_memory()):
        batch, of_ours = (each.fetch(torch.arange(0, len(each), 7)) for each in (crops, expected))
        assert all(torch.equal(batch[key], of_ours[key]) for key in ("input", "target"))


def test_a_file_that_is_still_written_is_refused(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = write(tmp_path / "box.h5")
    with path.open("r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being written by another program"):
            Boxes(str(path), **KEYS)


@pytest.mark.parametrize(("changes", "words"), [
    ({"task.model.in_channels": 3}, "has 4 fields for input, but the network 3: set task.model.in_channels=4"),
    ({"task.model.depth": 4}, "cannot be halved 4 times"),
    ({"data.transforms": [{"class": "cube_symmetry", "fields": {"input": ["density"]}}]},
     "turns the fields density of input, but the boxes have density, velocity_x"),
    ({"data.transforms": [{"class": "cube_symmetry", "fields": {"input": ["ρ", "u", "v", "w"]}}]},
     "turns the fields ρ, u, v, w of input, but the boxes have density, velocity_x"),
])  # fmt: skip
def test_what_does_not_fit_the_boxes_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    keys = {key.replace(".", "__"): value for key, value in changes.items()}
    with pytest.raises(UserError, match=words):
        train(tmp_path / "run", made_boxes.recipe(tmp_path), **keys)


def test_simulated_boxes_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ISOSCALE_DATA", str(tmp_path))
    keys = {"cells": 8, "simulation": {"particles_per_cell": 1, "steps": 2}, "crop": 4}
    made = SimulatedBoxes(**keys)
    assert capsys.readouterr().err.count("simulating a box of 8³ cells, once:") == 3
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.h5")}
    again = SimulatedBoxes(**keys)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.h5")} == times and len(times) == 3
    assert capsys.readouterr().err == ""
    assert torch.equal(made.train.fetch(torch.tensor([3]))["input"], again.train.fetch(torch.tensor([3]))["input"])
    assert not torch.equal(made.train.fetch(torch.tensor([3]))["input"], made.val.fetch(torch.tensor([3]))["input"])
    with pytest.raises(UserError, match=r"simulation has no setting 'step'; it has .*steps"):
        SimulatedBoxes(simulation={"step": 2})
