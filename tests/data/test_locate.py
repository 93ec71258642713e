"""Where a sample is, for people: file and row through everything that lies in between."""

from pathlib import Path

import numpy as np
import pytest
import torch

from isoscale.data.file_sources import Files
from isoscale.data.mixture import Mixture
from isoscale.data.sources import Arrays, Subset, TensorSource, as_source, locate


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for number, length in enumerate((3, 4)):
        np.save(tmp_path / f"in_{number}.npy", np.arange(2.0 * length).reshape(length, 2))
    np.save(tmp_path / "out.npy", np.arange(7.0))
    return tmp_path


def test_samples_in_memory_have_a_number() -> None:
    assert locate(TensorSource({"x": torch.ones(9, 2)}), 7) == "sample 7"
    assert locate(as_source([1, 2, 3], collate=list), 2) == "sample 2"


def test_a_subset_says_where_its_source_has_the_sample() -> None:
    source = Subset(Subset(TensorSource(torch.ones(9, 2)), torch.tensor([5, 8, 1])), torch.tensor([2, 1]))
    assert [locate(source, index) for index in (0, 1)] == ["sample 1", "sample 8"]


def test_files_are_named_with_the_row_in_each(files: Path) -> None:
    columns = {"input": f"{files}/in_*.npy", "target": f"{files}/out.npy"}
    source = Files(train=columns).train
    assert locate(source, 2) == f"{files}/in_0.npy, row 2 and {files}/out.npy, row 2"
    assert locate(source, 5) == f"{files}/in_1.npy, row 2 and {files}/out.npy, row 5"


def test_rows_that_were_left_out_or_cut_away_are_counted(files: Path) -> None:
    rows = np.load(files / "in_0.npy")
    rows[1] = np.nan
    np.save(files / "in_0.npy", rows)
    dropped = Files(train={"input": f"{files}/in_*.npy"}, on_nan="drop").train
    assert locate(dropped, 1) == f"{files}/in_0.npy, row 2" and locate(dropped, 2) == f"{files}/in_1.npy, row 0"
    cut = Files(train={"input": {"path": f"{files}/out.npy", "rows": "2:6"}}).train
    assert locate(cut, 1) == f"{files}/out.npy, row 3"


def test_what_locate_says_is_what_fetch_reads(files: Path) -> None:
    source = Files(columns={"target": f"{files}/out.npy"}, split={"train": 4, "val": 3}).train
    values = source.fetch(torch.arange(len(source)))["target"].tolist()
    assert [locate(source, index) for index in range(4)] == [f"{files}/out.npy, row {value:.0f}" for value in values]


def test_an_archive_names_its_file_and_a_mixture_its_system(tmp_path: Path) -> None:
    path = str(tmp_path / "all.npz")
    np.savez(path, input=np.ones((10, 1)))
    source = Arrays(path, {"train": 10}).train
    assert locate(source, 0) == f"{path}, row {int(source.indices[0])}"
    mixture = Mixture([torch.ones(3, 1), torch.ones(4, 2)])
    assert locate(mixture, 2) == "system 0, sample 2" and locate(mixture, 3) == "system 1, sample 0"


def test_a_record_is_named_by_its_key(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")
    import pickle

    path = tmp_path / "a.lmdb"
    with lmdb.open(str(path), subdir=False) as environment, environment.begin(write=True) as transaction:
        for key in ("3", "10"):
            transaction.put(key.encode(), pickle.dumps({"x": np.ones(2)}))
    source = Files(train=str(path)).train
    assert locate(source, 1) == f"{path.resolve()}, record 10"
