"""What each of the other formats is particular about."""

import errno
import multiprocessing
import os
import pickle
import shutil
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from isoscale.data.formats import hdf5
from isoscale.data.formats.lmdb import LmdbSource
from isoscale.data.formats.mapped import MappedColumn
from isoscale.data.formats.opening import open_column


def test_a_missing_dataset_is_answered_with_those_that_are_there(tmp_path: Path, refusal):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["run/forces"], file["energy"] = np.zeros((2, 3)), np.zeros(2)
    missing = refusal(open_column, {"path": str(path), "dataset": "force"})
    assert missing == f'{path} has no dataset "force"; there is energy, run/forces'
    assert "which dataset?; there is energy, run/forces" in refusal(open_column, str(path))
    assert open_column({"path": str(path), "dataset": "/run/forces"}).row_shape == (3,)
    np.savez(tmp_path / "a.npz", x=np.zeros(2))
    assert 'no dataset "y"; there is x' in refusal(open_column, {"path": str(tmp_path / "a.npz"), "dataset": "y"})


def test_a_truncated_hdf5_file_says_how_many_bytes_it_has_and_should_have(tmp_path: Path, refusal):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(1000)
    whole = path.stat().st_size
    os.truncate(path, whole - 1000)
    assert f"is truncated: {whole - 1000:,} bytes found, {whole:,} expected" in refusal(open_column, str(path))
    path.write_bytes(b"nothing of the kind")
    assert "is not a readable HDF5 file" in refusal(open_column, str(path))


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path, refusal):
    fcntl = pytest.importorskip("fcntl")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros(3)
    with (tmp_path / "a.h5").open("r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert "a.h5 is being written by another program" in refusal(open_column, str(tmp_path / "a.h5"))
    assert open_column(str(tmp_path / "a.h5")).num_rows == 3


def test_a_file_that_says_itself_that_it_is_being_written_is_not_read(tmp_path: Path, refusal):
    path = tmp_path / "a.h5"
    with h5py.File(tmp_path / "written.h5", "w", libver="latest") as file:
        file["x"] = np.zeros(3)
        file.swmr_mode = True
        file.flush()
        shutil.copy(tmp_path / "written.h5", path)  # as the end of a program would leave it
    message = refusal(open_column, str(path))
    assert "a.h5 is being written by another program, or was left open by one that was killed" in message
    assert f"h5clear -s {path}" in message


def test_a_file_system_without_locks_is_read_without_them(tmp_path: Path, monkeypatch):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(3), chunks=(2,))
    real = h5py.File

    def opened(*arguments: object, locking: bool = True) -> h5py.File:
        if locking:
            raise OSError(errno.ENOLCK, "Unable to synchronously open file (unable to lock file, errno = 37)")
        return real(*arguments, locking=locking)

    monkeypatch.setattr(h5py, "File", opened)
    assert open_column(str(tmp_path / "a.h5")).take(np.array([2, 1])).tolist() == [2, 1]


def test_text_in_hdf5_is_refused(tmp_path: Path, refusal):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["names"] = ["a", "b"]
    assert "expected numbers" in refusal(open_column, str(tmp_path / "a.h5"))


def test_a_dataset_without_chunks_is_read_like_a_plain_array(tmp_path: Path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["plain"] = np.arange(6.0)
        file.create_dataset("chunked", data=np.arange(6.0), chunks=(2,))
        file.create_dataset("empty", (6,), "f4")
    opened = {name: open_column({"path": str(tmp_path / "a.h5"), "dataset": name}) for name in ("plain", "chunked")}
    assert isinstance(opened["plain"].parts[0], MappedColumn)
    assert not isinstance(opened["chunked"].parts[0], MappedColumn)
    assert open_column({"path": str(tmp_path / "a.h5"), "dataset": "empty"}).take(np.array([5])).tolist() == [0]


@pytest.mark.parametrize("bytes_per_row", [1, 8 * 64, 1 << 40], ids=["picked", "mixed", "whole"])
def test_rows_of_chunks_are_the_same_whether_picked_or_read_whole(tmp_path: Path, monkeypatch, bytes_per_row):
    values = np.arange(3000.0).reshape(1000, 3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(64, 3))
    monkeypatch.setattr(hdf5, "BYTES_PER_ROW", bytes_per_row)
    monkeypatch.setattr(hdf5, "BLOCK_BYTES", 64 * 3 * 8 * 4)
    random = np.random.default_rng(0)
    rows = np.concatenate([random.integers(0, 1000, 300), np.arange(100, 400), [999, 0]])
    np.testing.assert_array_equal(open_column(str(tmp_path / "a.h5")).take(rows), values[rows])


def test_an_hdf5_file_that_nobody_reads_any_more_can_be_written(tmp_path: Path):
    path = tmp_path / "a.h5"
    for value in (1.0, 2.0):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.full((4, 2), value), chunks=(2, 2))
        column = open_column(str(path))
        assert column.take(np.array([3, 0])).tolist() == [[value] * 2] * 2
        del column


@pytest.mark.parametrize(("library", "name"), [("zarr", "a.zarr"), ("lmdb", "a.lmdb")])
def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path: Path, refusal, monkeypatch, library, name):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / name).mkdir()
    function = open_column if library == "zarr" else LmdbSource
    argument = str(tmp_path / name) if library == "zarr" else tmp_path / name
    assert f"pip install 'isoscale[{library}]'" in refusal(function, argument)


def test_a_single_zarr_array_needs_no_name(tmp_path: Path, refusal):
    zarr = pytest.importorskip("zarr")
    zarr.create_array(tmp_path / "one.zarr", data=np.arange(6.0).reshape(3, 2))
    assert open_column(str(tmp_path / "one.zarr")).take(np.array([2, 0])).tolist() == [[4, 5], [0, 1]]
    (tmp_path / "broken.zarr").mkdir()
    assert "is not a readable Zarr store" in refusal(open_column, str(tmp_path / "broken.zarr"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "x,y\n1,2\n3,4\n"),
        ("a.tsv", "x\ty\n1\t2\n3\t4\n"),
        ("a.csv", "\ufeff# made by hand\n\nx;y\n1;2\n3;4"),
        ("a.txt", "# x y\n1 2\n   3   4  # the second\n"),
        ("a.dat", "1 2\n3 4\n"),
    ],
)
def test_text_is_read_with_or_without_names(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text, encoding="utf-8")
    column = open_column(str(tmp_path / name))
    assert column.take(np.array([1, 0])).tolist() == [[3, 4], [1, 2]] and column.dtype == np.float64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2\n3,4\n5\n", "line 3: 1 columns found, 2 expected"),
        ("x,y\n1,2\n\n3,4,5\n", "line 4: 3 columns found, 2 expected"),
        ("x,y\n1,2\n3,n.a.\n", 'line 3: "n.a." is not a number; write nan'),
        ("x,y\n", "has no line of numbers"),
        ("", "has no line of numbers"),
    ],
)
def test_a_wrong_line_of_text_is_named(tmp_path: Path, refusal, text: str, words: str):
    (tmp_path / "a.csv").write_text(text)
    assert words in refusal(open_column, str(tmp_path / "a.csv"))


def test_a_raw_file_needs_a_type_and_a_shape_that_fit(tmp_path: Path, refusal):
    path = str(tmp_path / "a.bin")
    np.arange(12, dtype=np.int16).tofile(path)
    assert "give dtype and the shape of a sample" in refusal(open_column, path)
    wrong = refusal(open_column, {"path": path, "dtype": "int16", "shape": [5]})
    assert "has 24 bytes, which is not a whole number of samples: one of shape (5,) and type int16 has 10" in wrong
    column = open_column({"path": path, "dtype": "int16", "shape": [2, 3]})
    assert column.take(np.array([1])).tolist() == [[[6, 7, 8], [9, 10, 11]]]


@pytest.mark.parametrize("name", ["digits-images-idx3-ubyte", "digits.idx", "digits-idx3-ubyte.gz", "digits"])
def test_idx_files_are_known_by_name_or_content(tmp_path: Path, write_idx, name: str):
    values = np.arange(24).reshape(4, 3, 2)
    column = open_column(str(write_idx(tmp_path / name, values)))
    np.testing.assert_array_equal(column.take(np.array([3, 0])), values[[3, 0]])


def test_a_file_without_a_known_suffix_is_known_by_its_content(tmp_path: Path, refusal):
    np.save((tmp_path / "array").open("wb"), np.arange(3))
    assert open_column(str(tmp_path / "array")).num_rows == 3
    (tmp_path / "letter").write_text("Dear reader")
    assert "letter is in no format that is known" in refusal(open_column, str(tmp_path / "letter"))


def test_a_damaged_npz_file_is_refused(tmp_path: Path, refusal):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random(1000))
    for start, words in ((200, "is not a complete .npy file"), (3000, "truncated or damaged")):
        content = bytearray(path.read_bytes())
        content[start : start + 20] = b"damaged damaged dama"
        (tmp_path / "b.npz").write_bytes(content)
        assert words in refusal(open_column, str(tmp_path / "b.npz"))
    path.write_bytes(content[:500])
    assert "is not a complete .npz file" in refusal(open_column, str(path))


@pytest.fixture
def write_lmdb(tmp_path: Path):
    lmdb = pytest.importorskip("lmdb", reason="needs lmdb: pip install 'isoscale[lmdb]'")

    def write(records: dict[str, object], name: str = "a.lmdb", subdir: bool = False) -> Path:
        opened = lmdb.open(str(tmp_path / name), subdir=subdir, map_size=1 << 24)
        with opened as environment, environment.begin(write=True) as transaction:
            for key, value in records.items():
                transaction.put(key.encode(), pickle.dumps(value))
        return tmp_path / name

    return write


@pytest.mark.parametrize("subdir", [False, True])
def test_records_come_in_the_order_of_their_numbers(write_lmdb, subdir: bool):
    samples = {str(n): {"x": np.full(3, n, np.float32), "t": torch.tensor([n]), "e": n / 2} for n in range(12)}
    source = LmdbSource(write_lmdb({**samples, "length": 12}, subdir=subdir))
    batch = source.fetch(torch.tensor([10, 2]))
    assert len(source) == 12
    assert batch["x"].tolist() == [[10] * 3, [2] * 3] and batch["t"].tolist() == [[10], [2]]
    assert batch["e"].dtype == torch.float64 and batch["e"].tolist() == [5, 1]


def _fetch_in_child(source, connection) -> None:
    connection.send(source.fetch(torch.tensor([1]))["x"].tolist())


def test_sources_and_processes_share_a_database(write_lmdb):
    path = write_lmdb({str(n): {"x": np.full(2, n)} for n in range(3)})
    source, second = LmdbSource(path), LmdbSource(path)
    del second
    third = pickle.loads(pickle.dumps(source))
    assert third.fetch(torch.tensor([2]))["x"].tolist() == source.fetch(torch.tensor([2]))["x"].tolist() == [[2, 2]]
    context = multiprocessing.get_context("fork")
    mine, other = context.Pipe()
    process = context.Process(target=_fetch_in_child, args=(source, other))
    process.start()
    assert mine.poll(30) and mine.recv() == [[1, 1]]
    process.join()


def test_records_of_different_shapes_or_names_make_no_batch(write_lmdb, refusal):
    source = LmdbSource(write_lmdb({"0": {"x": np.zeros(3)}, "1": {"x": np.zeros(4)}, "2": {"y": np.zeros(4)}}))
    assert '"x" has samples of different shapes ((3,), (4,))' in refusal(source.fetch, torch.tensor([0, 1]))
    assert 'some records have "x" and others have not' in refusal(source.fetch, torch.tensor([0, 2]))


def test_a_record_that_would_run_code_is_refused_and_named(write_lmdb, refusal):
    source = LmdbSource(write_lmdb({"0": {"x": Path("a")}, "1": [1]}))
    words = refusal(source.fetch, torch.tensor([0]))
    assert "record 0: it asks for pathlib.PosixPath, which no array needs, so that nothing of it was run" in words
    assert "record 1 is a list, expected a dict of arrays" in refusal(source.fetch, torch.tensor([1]))


def test_a_database_without_records_or_of_another_kind_is_refused(write_lmdb, tmp_path: Path, refusal):
    assert "has no records" in refusal(LmdbSource, write_lmdb({}))
    (tmp_path / "b.lmdb").write_bytes(b"x" * 10_000)
    assert "is not a readable LMDB file" in refusal(LmdbSource, tmp_path / "b.lmdb")
    assert "holds whole samples, not a column" in refusal(open_column, str(tmp_path / "a.lmdb"))


def test_published_crystals_are_read_as_they_were_written(shared: Path, refusal):
    source = LmdbSource(shared / "data/crystals/lips_devset.lmdb")
    with np.load(shared / "data/crystals/lips_devset.npz") as same:
        batch = source.fetch(torch.arange(len(source)))
        np.testing.assert_array_equal(batch["pos"].reshape(-1, 3), same["pos"])
        np.testing.assert_array_equal(batch["energy"], same["energy"])
    varied = LmdbSource(shared / "data/crystals/colabfit_devset.lmdb")
    assert '"pos" has samples of different shapes' in refusal(varied.fetch, torch.arange(len(varied)))


def test_an_hdf5_file_with_broken_names_is_named(tmp_path: Path, refusal):
    path = tmp_path / "broken.h5"
    with h5py.File(path, "w") as file:
        file["values"] = np.zeros((4, 2))
    content = path.read_bytes()
    assert b"HEAP" in content
    path.write_bytes(content.replace(b"HEAP", b"HEAD"))
    assert "broken.h5 is damaged" in refusal(hdf5.hdf5_names, path)
