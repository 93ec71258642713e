"""Columns of files by name in a recipe, and what is said about files that do not go together."""

import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from isoscale.data import file_sources
from isoscale.data.file_sources import Files, nan_rows
from isoscale.data.formats.opening import open_column
from isoscale.data.sources import Source
from isoscale.errors import UserError
from tests.helpers import sha, train

SIZES = (5, 3, 12)


@pytest.fixture
def snapshots(tmp_path: Path) -> Path:
    """Pairs of files, whose rows are numbered through all of them."""
    start = 0
    for number, size in zip((0, 2, 10), SIZES, strict=True):
        rows = np.arange(start, start + size, dtype=np.float32)
        np.save(tmp_path / f"s{number}.in.npy", np.stack([rows, rows + 0.5, -rows], 1))
        np.save(tmp_path / f"s{number}.out.npy", 10 * rows)
        start += size
    return tmp_path


def columns(folder: Path, **options: object) -> dict[str, object]:
    return {"input": {"path": f"{folder}/s*.in.npy", **options}, "target": f"{folder}/s*.out.npy"}


def everything(source: Source) -> dict[str, torch.Tensor]:
    return source.fetch(torch.arange(len(source)))


def refusal(**arguments: object) -> str:
    with pytest.raises(UserError) as raised:
        Files(**arguments)
    return str(raised.value)


def test_inputs_and_targets_stay_together_through_files_and_splits(snapshots: Path):
    data = Files(columns(snapshots, columns="1:"), split={"train": 12, "val": 4, "test": 4})
    parts = [everything(part) for part in (data.train, data.val, data.test)]
    assert [len(part["target"]) for part in parts] == [12, 4, 4]
    for part in parts:
        assert torch.equal(part["input"][:, 0], part["target"] / 10 + 0.5) and part["input"].shape[1] == 2
    seen = torch.cat([part["target"] for part in parts]).sort().values
    assert torch.equal(seen, 10 * torch.arange(20.0))
    assert everything(data.predict)["target"].tolist() == [10 * row for row in range(20)]


def test_the_split_is_the_same_every_time_and_another_with_another_seed(snapshots: Path):
    first, again, other = (everything(Files(columns(snapshots), split_seed=seed).train) for seed in (0, 0, 1))
    assert torch.equal(first["target"], again["target"]) and not torch.equal(first["target"], other["target"])


def test_each_role_may_have_files_of_its_own(snapshots: Path):
    split = {
        name: {"input": f"{snapshots}/s{name}.in.npy", "target": f"{snapshots}/s{name}.out.npy"} for name in (0, 2)
    }
    data = Files(train=split[0], test=split[2])
    assert len(data.train) == 5 and len(data.test) == 3 and data.val is None and data.predict is data.test
    assert everything(data.train)["target"].tolist() == [0, 10, 20, 30, 40], "the order of the files"


def test_a_file_of_several_arrays_gives_them_all_by_name(tmp_path: Path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["input"], file["target"] = np.zeros((10, 2)), np.arange(10)
    assert everything(Files(str(tmp_path / "a.h5")).predict)["target"].tolist() == list(range(10))
    np.savez(tmp_path / "a.npz", input=np.zeros((10, 2)), weight=np.ones(10))
    assert everything(Files(str(tmp_path / "a.npz")).predict).keys() == {"input", "weight"}
    np.save(tmp_path / "a.npy", np.zeros(3))
    assert "write data.columns: {input:" in refusal(columns=str(tmp_path / "a.npy"))


@pytest.mark.parametrize("arguments", [{}, {"columns": {"a": "b"}, "train": {"a": "b"}}])
def test_columns_are_either_split_or_given_by_split(arguments):
    assert "give columns, which are split, or give train, val and test" in refusal(**arguments)


def test_nothing_is_split_twice(snapshots: Path):
    assert "data.split cuts data.columns" in refusal(train=columns(snapshots), split={"train": 1.0})
    assert "data.columns names no column" in refusal(columns={})


def test_the_file_without_a_partner_is_named(snapshots: Path):
    (snapshots / "s10.out.npy").unlink()
    words = refusal(columns=columns(snapshots))
    assert words == f"input has 3 files and target has 2; the first without a partner is {snapshots}/s10.in.npy"


def test_the_pair_that_differs_in_rows_is_named(snapshots: Path):
    np.save(snapshots / "s2.out.npy", np.zeros(4, np.float32))
    words = refusal(columns=columns(snapshots))
    assert f"{snapshots}/s2.in.npy has 3 rows (input), but {snapshots}/s2.out.npy has 4 (target)" in words


def test_single_files_that_differ_in_rows_are_named(snapshots: Path):
    single = {"input": f"{snapshots}/s0.in.npy", "target": f"{snapshots}/s2.out.npy"}
    assert "input has 5" in refusal(columns=single) and "s2.out.npy" in refusal(columns=single)


def test_a_truncated_file_and_a_missing_one_are_said_with_their_place(snapshots: Path):
    path = snapshots / "s2.in.npy"
    path.write_bytes(path.read_bytes()[:-1])
    assert "s2.in.npy is truncated: 163 bytes found, 164 expected" in refusal(columns=columns(snapshots))
    assert "no file matches nowhere*.npy" in refusal(columns={"input": "nowhere*.npy"})
    assert "data.columns.input.dims: there is no such option" in refusal(columns=columns(snapshots, dims=1))


@pytest.fixture
def broken(snapshots: Path) -> Path:
    """Three rows in which something is not a number, of which one is wrong twice."""
    inputs, targets = np.load(snapshots / "s10.in.npy"), np.load(snapshots / "s2.out.npy")
    inputs[4, 1] = inputs[4, 2] = inputs[7, 0] = np.nan
    inputs[0, 0] = np.inf
    targets[1] = np.nan
    np.save(snapshots / "s10.in.npy", inputs)
    np.save(snapshots / "s2.out.npy", targets)
    return snapshots


def test_what_is_not_a_number_is_counted_and_its_first_place_named(broken: Path):
    words = refusal(columns=columns(broken))
    assert f"input in 2 of 20 rows, first in {broken}/s10.in.npy, row 4" in words
    assert f"target in 1 of 20 rows, first in {broken}/s2.out.npy, row 1" in words
    assert "data.on_nan=drop" in words and "data.on_nan=keep" in words


def test_rows_that_are_not_numbers_can_be_left_out(broken: Path, capsys: pytest.CaptureFixture[str]):
    found = everything(Files(columns(broken), on_nan="drop").predict)
    assert found["target"].tolist() == [10 * row for row in range(20) if row not in (6, 12, 15)]
    assert not found["input"].isnan().any()
    assert "left out 3 of 20 rows" in capsys.readouterr().err


def test_rows_that_are_not_numbers_can_be_kept_without_looking(broken: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_sources, "nan_rows", None)
    assert everything(Files(columns(broken), on_nan="keep").predict)["input"].isnan().sum() == 3


def test_columns_that_are_not_used_may_hold_anything(broken: Path):
    picked = {"input": {"path": f"{broken}/s*.in.npy", "columns": [0], "rows": "0:15"}}
    assert len(Files(picked).predict) == 15


def test_the_place_of_a_row_in_a_range_is_that_in_its_file(broken: Path):
    picked = {"input": {"path": f"{broken}/s*.in.npy", "rows": "10:"}}
    assert "s10.in.npy, row 4" in refusal(columns=picked)


def test_data_without_a_single_good_row_is_refused(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.full((4, 2), np.nan))
    assert "no row would be left" in refusal(columns={"input": str(tmp_path / "a.npy")}, on_nan="drop")


def test_rows_are_found_wherever_blocks_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_sources, "SCAN_BYTES", 7 * 3 * 8)
    values = np.zeros((100, 3))
    wrong = [0, 6, 7, 8, 50, 98, 99]
    values[wrong, [0, 1, 2, 0, 1, 2, 0]] = np.nan
    np.save(tmp_path / "a.npy", values)
    assert nan_rows(open_column(str(tmp_path / "a.npy"))).tolist() == wrong


def test_a_long_look_is_said(snapshots: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(file_sources, "PATIENCE", -1.0)
    Files(columns(snapshots))
    assert "looked for values that are not numbers in 0 s; data.on_nan=keep does not look" in capsys.readouterr().err


def test_records_that_are_not_numbers_are_treated_alike(tmp_path: Path):
    lmdb = pytest.importorskip("lmdb", reason="needs lmdb: pip install 'isoscale[lmdb]'")
    path = str(tmp_path / "a.lmdb")
    with lmdb.open(path, subdir=False, map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
        for number in range(6):
            value = {"x": np.full(2, np.nan if number == 3 else number)}
            transaction.put(str(number).encode(), pickle.dumps(value))
    assert f"1 of 6 samples of {path}, first in 3" in refusal(train=path)
    assert everything(Files(train=path, on_nan="drop").train)["x"][:, 0].tolist() == [0, 1, 2, 4, 5]
    assert everything(Files(train=path, on_nan="keep").train)["x"].isnan().sum() == 2


def test_a_type_that_no_tensor_has_is_refused_with_what_to_set(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.zeros((4, 2), np.longdouble))
    if np.dtype(np.longdouble).itemsize > 8:
        assert "set its dtype, such as float64" in refusal(columns={"input": str(tmp_path / "a.npy")})
    wide = {"input": {"path": str(tmp_path / "a.npy"), "dtype": "float64"}}
    assert everything(Files(wide, split={"train": 4}).train)["input"].dtype == torch.float64


def test_a_run_on_files_is_the_run_on_the_same_arrays_in_memory(tmp_path: Path):
    random = np.random.default_rng(0)
    inputs, targets = random.random((300, 4), np.float32), random.random((300, 1), np.float32)
    np.savez(tmp_path / "memory.npz", input=inputs, target=targets)
    with h5py.File(tmp_path / "disk.h5", "w") as file:
        file.create_dataset("input", data=inputs, chunks=(16, 4))
        file["target"] = targets
    model = {"class": "mlp", "widths": [4, 8, 1]}
    recipe = {"task": {"class": "supervised", "model": model}, "train": {"epochs": 2}}
    sources = [
        {"class": "arrays", "path": str(tmp_path / "memory.npz")},
        {"class": "files", "columns": str(tmp_path / "memory.npz")},
        {"class": "files", "columns": str(tmp_path / "disk.h5")},
    ]
    hashes = {
        sha(train(tmp_path / f"run{number}-{residency}", {**recipe, "data": {**data, "batch_size": 32}},
                  data__residency=residency))
        for number, data in enumerate(sources)
        for residency in ("device", "host")
    }  # fmt: skip
    assert len(hashes) == 1


def test_snapshots_of_beryllium_are_rows_of_descriptors_and_densities(shared: Path):
    folder = shared / "data/electronic/Be2"
    data = Files(
        {
            "input": {"path": f"{folder}/*.in.npy", "sample_dims": 1, "columns": "3:"},
            "target": {"path": f"{folder}/*.out.npy", "sample_dims": 1},
        }
    )
    assert len(data.predict) == 4 * 18 * 18 * 27 and len(data.train) == round(0.8 * len(data.predict))
    rows = torch.tensor([0, 8748, 34991, 5])
    batch = data.predict.fetch(rows)
    whole = np.concatenate([np.load(folder / f"Be_snapshot{n}.in.npy").reshape(-1, 94) for n in range(4)])
    np.testing.assert_array_equal(batch["input"], whole[rows.numpy(), 3:])
    assert batch["target"].shape == (4, 11)
