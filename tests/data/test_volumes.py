"""Crops of boxes: each one what slicing gives, in memory, on a device or read from a file."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import isoscale
from isoscale.data.formats.opening import open_array
from isoscale.data.volumes import Crops, Volume
from isoscale.errors import UserError
from tests.helpers import QUIET, sha
from tests.ranks import fit_on


def box(size: tuple[int, int, int], number: int = 0, fields: int = 2) -> Volume:
    generator = np.random.default_rng(number)
    arrays = {"input": generator.normal(size=(fields, *size)), "target": generator.normal(size=(1, *size))}
    return Volume(f"box {number}", {key: array.astype(np.float32) for key, array in arrays.items()})


def sliced(volume: Volume, key: str, corner: tuple[int, ...], crop: int) -> np.ndarray[Any, Any]:
    """By numpy alone."""
    return np.roll(volume.arrays[key], [-start for start in corner], (1, 2, 3))[:, :crop, :crop, :crop]


@given(
    st.lists(st.tuples(*[st.integers(3, 7)] * 3), min_size=1, max_size=3), st.integers(1, 3), st.booleans(),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_crop_is_what_slicing_gives(sizes: list[Any], crop: int, wrap: bool, draw: int) -> None:
    volumes = [box(size, number) for number, size in enumerate(sizes)]
    source, read = Crops(volumes, crop, wrap), Crops(volumes, crop, wrap, on_disk=True)
    places = [
        (volume, (x, y, z))
        for volume in volumes
        for x in range(volume.size[0] - (0 if wrap else crop - 1))
        for y in range(volume.size[1] - (0 if wrap else crop - 1))
        for z in range(volume.size[2] - (0 if wrap else crop - 1))
    ]
    assert len(source) == len(places)
    indices = torch.tensor([draw % len(places), 0, len(places) - 1])
    for found in (source.fetch(indices), read.fetch(indices), source.resident(torch.device("cpu"))(indices)):
        for row, index in enumerate(indices.tolist()):
            for key in ("input", "target"):
                assert np.array_equal(found[key][row].numpy(), sliced(places[index][0], key, places[index][1], crop))
    assert source.locate(0) == f"box 0, cells 0:{crop}, 0:{crop}, 0:{crop}"


def test_crops_are_stored_channels_last_and_in_the_dtype_asked_for() -> None:
    source = Crops([box((8, 8, 8))], 4, dtype=torch.bfloat16)
    found = source.fetch(torch.tensor([3, 5]))["input"]
    assert found.dtype == torch.bfloat16 and found.is_contiguous(memory_format=torch.channels_last_3d)
    assert source.nbytes == 8**3 * 3 * 2
    mixed = Volume("mixed", {"input": torch.zeros(1, 4, 4, 4), "target": torch.ones(1, 4, 4, 4, dtype=torch.int64)})
    found = Crops([mixed], 2, on_disk=True).in_memory().fetch(torch.tensor([0]))
    assert [tensor.dtype for tensor in found.values()] == [torch.float32, torch.int64]


class Field(isoscale.Task):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv3d(4, 1, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch["input"]) - batch["target"]).abs().mean()


KEYS = {"data.batch_size": 6, "data.samples_per_epoch": 30, "train.epochs": 2, "train.threads": 1}


def test_datasets_of_zarr_are_read_as_they_are_sliced(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    volume = box((6, 5, 4))
    group = zarr.open_group(str(tmp_path / "box.zarr"), mode="w")
    for key, array in volume.arrays.items():
        group.create_array(key, shape=array.shape, chunks=(1, 2, 2, 2), dtype=array.dtype)[:] = array
    stored = Volume("box.zarr", {key: group[key] for key in volume.arrays})
    found, expected = (Crops([each], 3, wrap=True).fetch(torch.arange(120)) for each in (stored, volume))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_training_does_not_depend_on_where_the_boxes_are(tmp_path: Path) -> None:
    path = tmp_path / "box.h5"
    with h5py.File(path, "w") as file:
        for key, array in box((12, 12, 12)).arrays.items():
            file.create_dataset(key, data=array, chunks=(1, 4, 4, 4))
    file = h5py.File(path)
    volume = Volume(str(path), {key: file[key] for key in ("input", "target")})
    hashes = set()
    for residency in ("device", "host", "disk"):
        crops = Crops([volume], 4, wrap=True, on_disk=True)
        data = isoscale.Sources(train=crops, val=crops.draw(7))
        keys = {**KEYS, "data.residency": residency, **QUIET}
        run = isoscale.Trainer(run=tmp_path / residency, **keys).fit(Field(), data)
        hashes.add((sha(run), run.metrics["val/loss"]))
    assert len(hashes) == 1


def made() -> tuple[nn.Module, Any]:
    return Field(), isoscale.Sources(train=Crops([box((9, 7, 8)), box((6, 6, 6), 1)], 4, wrap=True))


@pytest.mark.slow
def test_crops_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    keys = {key.replace(".", "__"): value for key, value in KEYS.items()}
    runs = [fit_on(world, tmp_path / str(world), made, **keys, parallel__reduce="tree") for world in (1, 2)]
    assert sha(runs[0]) == sha(runs[1])


def test_drawn_crops_are_always_the_same_and_no_more_than_there_are() -> None:
    crops = Crops([box((5, 5, 5))], 4)
    found = [crops.draw(8).indices, crops.draw(8).indices]
    assert torch.equal(*found) and sorted(found[0].tolist()) == list(range(8))
    with pytest.raises(UserError, match="9 crops were asked for, and there are 8"):
        crops.draw(9)


@pytest.mark.parametrize(
    ("volumes", "crop", "words"),
    [
        ([box((4, 4, 4))], 5, r"4×4×4 cells, too few for a crop of 5³; use data\.crop=4 or less, or data\.wrap=true"),
        ([box((4, 4, 4)), box((4, 4, 4), 1, fields=3)], 2, "box 1 has the fields"),
        ([Volume("odd", {"input": np.zeros((2, 4, 4)), "target": np.zeros((1, 4, 4))})], 2, "odd: expected arrays"),
        ([], 2, "no boxes"),
    ],
)
def test_boxes_that_do_not_fit_are_refused(volumes: list[Volume], crop: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Crops(volumes, crop)


@pytest.mark.parametrize("name", ["box.h5", "box"])
def test_a_file_that_is_cut_short_after_it_was_opened_is_named(name: str, tmp_path: Path) -> None:
    """HDF5 would give zeros, and a mapped file would end the process."""
    path, array = tmp_path / name, np.ones((1, 64, 64, 64), np.float32)
    if name == "box":
        path.mkdir()
        np.save(path / "input.npy", array)
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("input", data=array)
    crops = Crops([Volume(name, {"input": open_array(path, "input")})], 4, on_disk=True)
    assert crops.fetch(torch.tensor([0]))["input"].min() == 1
    with (path / "input.npy" if name == "box" else path).open("r+b") as cut:
        cut.truncate(1 << 19)
    with pytest.raises(UserError, match=r"was cut short while it was in use: 524,288 bytes found"):
        crops.fetch(torch.tensor([len(crops) - 1]))
