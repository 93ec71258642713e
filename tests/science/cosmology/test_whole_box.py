"""Whole boxes by tiles: what the network says of the whole box, without seams, on any number of ranks, whole files."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import isoscale
from isoscale.cli.main import run as run_command
from isoscale.data.volumes import Crops, Volume
from isoscale.engine.dataset_metrics import PlaneFile
from isoscale.errors import UserError
from isoscale.science.cosmology.fields import HYDRO
from isoscale.science.cosmology.sources import Boxes
from isoscale.science.cosmology.whole_box import Tiles, blend, pieces, starts
from tests.helpers import QUIET, first_of, train
from tests.ranks import command_on

CROP = 8
Size = tuple[int, int, int]


def write_box(path: Path, size: Size, seed: int = 0, target: bool = True) -> Path:
    generator = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file["Nbody"] = generator.uniform(-1, 1, (4, *size)).astype("f4")
        if target:
            file["Hydro"] = generator.uniform(-1, 1, (5, *size)).astype("f4")
            file["Hydro"].attrs["fields"] = list(HYDRO)
        file.attrs["cell_size"], file.attrs["scale_velocity"] = 0.04, 500.0
    return path


def network(kernel: int) -> dict[str, Any]:
    return {
        "class": "torch.nn.Conv3d", "in_channels": 4, "out_channels": 5, "kernel_size": kernel, "padding": kernel // 2
    }  # fmt: skip


def trained(folder: Path, kernel: int) -> isoscale.Run:
    box = str(write_box(folder / "learned.h5", (9, 9, 9)))
    recipe = {
        "task": {"class": "field_regression", "model": network(kernel)},
        "data": {
            "class": "boxes", "train": box, "test": str(write_box(folder / "box.h5", (19, 16, 21), 1)), "crop": CROP,
            "batch_size": 5, "samples_per_epoch": 5,
        },
    }  # fmt: skip
    return isoscale.train(recipe, run=folder / "run", **{"train.epochs": 1, "train.threads": 1, **QUIET})


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    """A network that sees one cell at a time."""
    return trained(tmp_path_factory.mktemp("local"), 1)


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    """A network that sees a cell and those beside it."""
    return trained(tmp_path_factory.mktemp("near"), 3)


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def call(*words: object, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["isoscale", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            run_command()
        printed = capsys.readouterr()
        assert end.value.code == code, printed.err
        return printed.err if code else printed.out

    return call


AXIS = st.integers(1, 9).flatmap(
    lambda crop: st.tuples(st.just(crop), st.integers(0, crop - 1), st.integers(1, 40), st.booleans())
)


@given(AXIS, st.booleans())
@settings(deadline=None, max_examples=300)
def test_the_weights_of_all_tiles_over_a_cell_are_one(axis: tuple[int, int, int, bool], by_cell: bool) -> None:
    crop, overlap, size, wrap = axis
    size = size if wrap else max(size, crop)
    listed, places = pieces(size, crop, overlap, wrap, by_cell), starts(size, crop, overlap, wrap)
    total = torch.zeros(size, dtype=torch.float64)
    for piece in listed:
        assert torch.allclose(piece.before, total[piece.cells], atol=1e-12) and (piece.weight > 0).all()
        total[piece.cells] += piece.weight
        cells = (places[piece.tile] + torch.arange(crop)[piece.inside]) % size
        assert cells.tolist() == list(range(size))[piece.cells]  # where the tile lies
    assert torch.allclose(total, torch.ones_like(total), rtol=0, atol=1e-12)
    assert {piece.tile for piece in listed} == set(range(len(places)))
    covered = [(piece.tile, cell) for piece in listed for cell in range(size)[piece.cells]]
    assert len(set(covered)) == len(covered)  # no tile has a cell twice
    if crop <= size:
        ends = [*places[1:], places[0] + size] if wrap else places[1:]
        assert all(last - first <= crop - overlap for first, last in zip(places, ends, strict=False))
        assert wrap or (places[0] == 0 and places[-1] == size - crop)
    if by_cell:
        firsts = [piece.cells.start for piece in listed]
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("overlap", [None, 0, 3, 7])
def test_a_local_network_gives_by_tiles_exactly_what_it_gives_on_the_whole_box(
    local: isoscale.Run, tmp_path: Path, wrap: bool, overlap: int | None
) -> None:
    for number, size in enumerate([(8, 8, 8), (17, 9, 12), (5, 3, 20)]):
        if min(size) < CROP and not wrap:
            continue
        path = write_box(tmp_path / f"box{number}.h5", size)
        data = Boxes(test=str(path), crop=CROP, wrap=wrap, overlap=overlap)
        found = isoscale.predict(local, data=data)[f"box{number}"]
        with h5py.File(path) as file, torch.no_grad():
            whole = local.model()(torch.from_numpy(file["Nbody"][:])[None])[0]
        assert found.shape == whole.shape and torch.equal(found, whole)


def test_a_network_that_sees_little_agrees_with_the_whole_box_but_at_borders_of_tiles(near: isoscale.Run) -> None:
    path = near.path.parent / "box.h5"
    with h5py.File(path) as file, torch.no_grad():
        fields, model = torch.from_numpy(file["Nbody"][:])[None], near.model()
        whole, wrapped = model(fields)[0], _circular(model, fields)[0]
    for wrap, expected in ((False, whole), (True, wrapped)):
        apart = {}
        for overlap in (0, 4):
            data = Boxes(test=str(path), crop=CROP, wrap=wrap, overlap=overlap)
            found = isoscale.predict(near, data=data)["box"]
            inner = torch.ones(expected.shape[1:], dtype=torch.bool)
            for axis, size in enumerate(expected.shape[1:]):
                for start in starts(size, CROP, overlap, wrap):
                    for cell in (start, start + CROP - 1):
                        if wrap or 0 < cell < size - 1:
                            inner.select(axis, cell % size).fill_(False)
            assert inner.any() and torch.allclose(found[:, inner], expected[:, inner], atol=1e-6)
            apart[overlap] = float((found - expected).abs().mean())
        assert 0 < apart[4] < apart[0] / 3


def _circular(model: torch.nn.Module, fields: torch.Tensor) -> torch.Tensor:
    return functional.conv3d(functional.pad(fields, [1] * 6, "circular"), model.weight, model.bias)  # type: ignore


def test_a_file_has_the_layout_and_the_attributes_of_its_box(local: isoscale.Run, called: Callable[..., str]) -> None:
    printed = called("predict", local.path)
    assert f"written to {local.path / 'predictions'}" in printed and "box: (5, 19, 16, 21) float32" in printed
    with h5py.File(local.path / "predictions" / "box.h5") as file:
        assert list(file) == ["Hydro"] and file["Hydro"].dtype == "float32" and file["Hydro"].chunks is None
        assert list(file["Hydro"].attrs["fields"]) == list(HYDRO)
        assert file.attrs["cell_size"] == 0.04 and file.attrs["scale_velocity"] == 500.0
        assert file.attrs["predicted_from"] == str(local.path.parent / "box.h5")
        stored = file["Hydro"][:]
    assert [path.name for path in (local.path / "predictions").iterdir()] == ["box.h5"]
    called("predict", local.path)  # once more: an old prediction is replaced
    called("predict", local.path, "--out", "own.h5")
    called("predict", local.path, "--out", "arrays.npz")
    with h5py.File("own.h5") as file:
        assert np.array_equal(file["Hydro"], stored)
    assert np.array_equal(np.load("arrays.npz")["box"], stored)
    opened = Boxes(test="own.h5", input="Hydro", target="Hydro", crop=CROP)  # it can be read as a box is
    assert opened.test is not None and opened.crops["test"].volumes[0].cell_size == 0.04


@pytest.mark.slow
def test_other_boxes_are_predicted_with_and_without_targets(
    local: isoscale.Run, called: Callable[..., str], tmp_path: Path
) -> None:
    write_box(tmp_path / "bare.h5", (9, 8, 8), target=False)
    write_box(tmp_path / "full.h5", (8, 8, 8))
    printed = called("predict", local.path, "--data", "bare.h5", "full.h5", "--out", "here")
    assert "bare: (5, 9, 8, 8) float32" in printed and sorted(os.listdir("here")) == ["bare.h5", "full.h5"]
    with h5py.File("here/bare.h5") as file:
        assert list(file["Hydro"].attrs["fields"]) == list(HYDRO)
    assert "test/loss" in called("test", local.path, "--systems", "full.h5")
    assert "no targets to compare with" in called("test", local.path, "--data", "bare.h5", code=2)
    assert "name a folder" in called("predict", local.path, "--data", "bare.h5", "full.h5", "--out", "one.h5", code=2)
    folder = tmp_path / "arrays"
    folder.mkdir()
    with h5py.File("bare.h5") as file:
        np.save(folder / "Nbody.npy", file["Nbody"][:])
    called("predict", local.path, "--data", folder, "--out", "there")
    with h5py.File("here/bare.h5") as first, h5py.File("there/arrays.h5") as second:
        assert np.array_equal(first["Hydro"], second["Hydro"])


def test_boxes_of_one_name_keep_apart(local: isoscale.Run, called: Callable[..., str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_box(tmp_path / name / "box.h5", (8, 8, 8))
    called("predict", local.path, "--data", "a/box.h5", "b/../b/box.h5", "--out", "out")
    assert sorted(str(path.relative_to("out")) for path in Path("out").rglob("*.h5")) == ["a/box.h5", "b/box.h5"]


def test_what_is_no_box_is_predicted_row_by_row(local: isoscale.Run) -> None:
    fields = torch.rand(3, 4, CROP, CROP, CROP)
    with torch.no_grad():
        expected = local.model()(fields)
    assert torch.equal(isoscale.predict(local, data={"input": fields})["prediction"], expected)


def test_a_task_that_does_not_blend_tiles_predicts_the_crops_of_a_split(tmp_path: Path) -> None:
    box = str(write_box(tmp_path / "box.h5", (9, 9, 9)))
    data = {"class": "boxes", "train": box, "test": box, "crop": CROP, "batch_size": 4, "samples_per_epoch": 4,
            "eval_samples": 3}  # fmt: skip
    recipe = {"task": {"class": "supervised", "model": network(1)}, "data": data}
    run = isoscale.train(recipe, run=tmp_path / "run", **{"train.epochs": 1, "train.threads": 1, **QUIET})
    assert isoscale.predict(run)["prediction"].shape == (3, 5, CROP, CROP, CROP)


@pytest.mark.slow
@pytest.mark.parametrize("world", first_of([2, 3], 2))
def test_any_number_of_ranks_writes_the_same_bytes(near: isoscale.Run, tmp_path: Path, world: int) -> None:
    write_box(tmp_path / "other.h5", (11, 9, 17), 2)
    words = ["predict", str(near.path), "--data", str(near.path.parent / "box.h5"), "other.h5", "--out"]
    for count, out in ((1, "one"), (world, "several")):
        ended = command_on(count, tmp_path, *words, out)
        assert [each.code for each in ended] == [0] * count, ended
        assert ended[0].out.count("written to") == 1 and not any(each.out for each in ended[1:])
    for name in ("box.h5", "other.h5"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "several" / name).read_bytes()
    assert sorted(os.listdir(tmp_path / "several")) == ["box.h5", "other.h5"]


def test_a_failure_of_one_rank_leaves_nothing(near: isoscale.Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = command_on(2, tmp_path, "predict", str(near.path), "--out", str(out), before=_fill_disk_on_second_rank)
    assert {each.code for each in ended} == {2} and "No space left" in ended[0].err
    assert list(out.iterdir()) == []


def _fill_disk_on_second_rank() -> None:
    if os.environ["RANK"] == "1":
        PlaneFile.write = _fail  # type: ignore[method-assign]


def _fail(*_: object) -> None:
    raise UserError(f"cannot write: {os.strerror(errno.ENOSPC)}")


def test_predictions_that_are_rows_are_for_one_rank(tmp_path: Path) -> None:
    run = train(tmp_path / "digits", train__epochs=1)
    ended = command_on(2, tmp_path, "predict", str(run.path))
    assert {each.code for each in ended} == {2} and "predicts on one rank" in ended[0].err
    assert not (run.path / "predictions.npz").exists()


def as_dataset(predicted: torch.Tensor, looked: list[int]) -> Any:
    """Predictions of all tiles, in batches of three."""

    def look(steps: Sequence[int]) -> Iterator[Any]:
        for step in steps:
            looked.append(step)
            yield SimpleNamespace(output=predicted[3 * step : 3 * step + 3])

    plan = SimpleNamespace(batch_size=3)
    return SimpleNamespace(device=torch.device("cpu"), look=look, data=SimpleNamespace(plan=plan))


@pytest.mark.parametrize(
    ("size", "wrap", "overlap"),
    [((17, 9, 12), False, 4), ((17, 9, 12), True, 4), ((5, 8, 20), True, 3), ((20, 5, 19), True, 6)],
)
def test_a_cell_is_the_mean_of_the_tiles_over_it_with_their_weights(size: Size, wrap: bool, overlap: int) -> None:
    tiles = Tiles(Crops([Volume("box", {"input": torch.rand(1, *size)})], 8, wrap), overlap, "Hydro", None)
    predicted = torch.rand(len(tiles), 2, 8, 8, 8)
    expected, total = torch.zeros(2, *size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    along = [pieces(count, 8, overlap, wrap) for count in size]
    counts = [1 + max(piece.tile for piece in each) for each in along]
    for x, y, z in product(*along):
        tile = predicted[(x.tile * counts[1] + y.tile) * counts[2] + z.tile]
        weight = x.weight[:, None, None] * y.weight[:, None] * z.weight
        expected[:, x.cells, y.cells, z.cells] += weight * tile[:, x.inside, y.inside, z.inside]
        total[x.cells, y.cells, z.cells] += weight
    assert torch.allclose(total, torch.ones_like(total))
    parts = [range(size[0])], [range(0, 3), range(3, 4), range(4, size[0])]
    found = []
    for ranges in parts:
        planes = [blend(as_dataset(predicted, []), tiles.boxes[0], part) for part in ranges]
        found.append(torch.cat([values.clone() for _, values in chain(*planes)], 1))
    assert torch.allclose(found[0].double(), expected, atol=1e-6)
    assert torch.equal(*found)  # whoever computes which planes


def test_planes_come_one_after_the_other_from_room_for_one_tile() -> None:
    size = (40, 10, 9)
    tiles = Tiles(Crops([Volume("box", {"input": torch.rand(2, *size)})], 8, wrap=True), 4, "Hydro", None)
    looked: list[int] = []
    dataset = as_dataset(tiles.fetch(torch.arange(len(tiles)))["input"], looked)
    box, done, rooms = tiles.boxes[0], 0, set()
    per_plane = len(box.y) * len(box.z)
    for first, values in blend(dataset, box, range(size[0])):
        assert first == done and torch.equal(
            values, tiles.volumes[0].arrays["input"][:, first : first + values.shape[1]]
        )
        done += values.shape[1]
        rooms.add((values.untyped_storage().data_ptr(), values.untyped_storage().nbytes()))
        assert len(looked) <= (done / 4 + 2) * (per_plane / 3 + 1)  # no tile is looked at long before it is needed
    assert done == size[0] and [room for _, room in rooms] == [4 * 2 * 8 * 10 * 9]


def test_what_cannot_be_predicted_is_refused_in_words(
    local: isoscale.Run, called: Callable[..., str], tmp_path: Path
) -> None:
    write_box(tmp_path / "small.h5", (8, 7, 8))
    assert "8×7×8 cells, too few for a crop of 8³" in called("predict", local.path, "--data", "small.h5", code=2)
    with h5py.File("fields.h5", "w") as file:
        file["Nbody"] = np.zeros((3, 8, 8, 8), "f4")
    refused = called("predict", local.path, "--data", "fields.h5", code=2)
    assert "3 fields" in refused and "4" in refused
    with h5py.File("nothing.h5", "w") as file:
        file["Other"] = np.zeros((3, 8, 8, 8), "f4")
    assert 'no dataset "Nbody"' in called("predict", local.path, "--data", "nothing.h5", code=2)
    precious = write_box(tmp_path / "box.h5", (8, 8, 8)).read_bytes()
    assert "no prediction" in called("predict", local.path, "--out", ".", code=2)
    assert (tmp_path / "box.h5").read_bytes() == precious
    link = local.path / "predictions"
    if link.exists():
        link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path)
    assert "is a link to" in called("predict", local.path, code=2)
    link.unlink()
    with pytest.raises(UserError, match=r"overlap is 8; expected 0 to 7 cells"):
        Boxes(test="box.h5", crop=8, overlap=8)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_stop_or_a_full_disk_leaves_nothing(
    local: isoscale.Run, called: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["predict", local.path, "--out", "out"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert "out/box.h5: No space left on device" in called(*words, code=2)
    for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130)):
        with monkeypatch.context() as patched:
            patched.setattr(PlaneFile, "write", lambda *_, number=number: os.kill(os.getpid(), number))
            called(*words, code=code)
        assert list(Path("out").iterdir()) == []


def test_a_network_that_changes_the_size_of_a_crop_is_refused() -> None:
    tiles = Tiles(Crops([Volume("box", {"input": torch.rand(2, 9, 9, 9)})], 8), 4, "Hydro", None)
    dataset = as_dataset(torch.rand(len(tiles), 2, 8, 8, 4), [])
    with pytest.raises(UserError, match="makes fields of 8×8×4 cells of a crop of 8³"):
        list(blend(dataset, tiles.boxes[0], range(9)))
