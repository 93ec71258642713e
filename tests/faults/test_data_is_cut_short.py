"""A file that is cut short while it is mapped is named; to read beyond its end would end the process without a word."""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from isoscale.data.file_sources import Files
from isoscale.data.formats.opening import open_column
from isoscale.data.sources import Source
from isoscale.data.tools import shuffle
from isoscale.errors import UserError
from tests import warm
from tests.data.formats.conftest import WRITERS
from tests.helpers import cli

ROWS = 20_000
CUT = "was cut short while it was in use"
SCATTERED = torch.arange(ROWS - 1, 0, -2)


def of_format(name: str) -> Callable[..., tuple[Source, Path]]:
    def make(folder: Path, rows: int = ROWS) -> tuple[Source, Path]:
        spec = WRITERS[name](folder, np.ones((rows, 3), np.float32))
        return Files(train={"input": spec}, on_nan="keep").train, Path(spec["path"])

    return make


def of_lmdb(folder: Path) -> tuple[Source, Path]:
    lmdb = pytest.importorskip("lmdb", reason="needs lmdb: pip install 'isoscale[lmdb]'")
    path = folder / "a.lmdb"
    with lmdb.open(str(path), subdir=False, map_size=1 << 25) as store, store.begin(write=True) as writing:
        for number in range(ROWS):
            writing.put(str(number).encode(), pickle.dumps({"input": np.ones(3, np.float32)}))
    return Files(train=str(path), on_nan="keep").train, path


MAPPED = {**{name: of_format(name) for name in ("npy", "npz", "plain hdf5", "raw")}, "lmdb": of_lmdb}
CHUNKED = {"chunked hdf5": of_format("chunked hdf5")}
"""Of what was cut off an open file, HDF5 may give zeros without a word."""


def assert_named(read: Callable[[], object], path: Path) -> None:
    """Cut a file and read it, in a process of its own, which would not survive."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            read()
            os.truncate(path, path.stat().st_size // 2)
            read()
        except UserError as error:
            code = 0 if CUT in str(error) and path.name in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("rows", [SCATTERED, torch.arange(ROWS)], ids=["scattered", "neighbours"])
@pytest.mark.parametrize("make", [*MAPPED.values(), *CHUNKED.values()], ids=[*MAPPED, *CHUNKED])
def test_a_file_that_is_cut_while_it_is_mapped_is_named(make, rows, tmp_path: Path):
    source, path = make(tmp_path)
    assert_named(lambda: source.fetch(rows), path)


@pytest.mark.parametrize("name", ["chunked hdf5", "zarr 2", "zarr 3"])
def test_chunks_that_are_cut_are_named(name, tmp_path: Path):
    source, path = of_format(name)(tmp_path, 200)
    chunks = [path] if path.is_file() else [file for file in path.rglob("*") if "json" not in file.name.lower()]
    for file in chunks:
        if file.is_file() and not file.name.startswith("."):
            os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(UserError, match=rf"{path.name}.*(damaged|truncated|cut)"):
        source.fetch(torch.arange(200))


def test_a_file_that_is_gone_is_named(tmp_path: Path):
    source, path = of_format("npy")(tmp_path)
    path.unlink()
    for rows in (torch.arange(5), SCATTERED):
        with pytest.raises(UserError, match=r"cannot read .*a\.npy: No such file"):
            source.fetch(rows)


def test_a_file_that_another_takes_the_place_of_is_read_to_its_end(tmp_path: Path):
    """Renaming, unlike cutting, leaves the mapped file whole."""
    np.save(tmp_path / "a.npy", np.ones((ROWS, 3), np.float32))
    column = open_column(str(tmp_path / "a.npy"))
    column.take(SCATTERED.numpy())
    np.save(tmp_path / "b.npy", np.zeros((10, 3), np.float32))
    os.replace(tmp_path / "b.npy", tmp_path / "a.npy")
    assert (column.take(SCATTERED.numpy()) == 1).all()


def test_a_file_that_is_cut_while_it_is_shuffled_is_named(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.ones((ROWS, 3), np.float32))
    rows = shuffle.NpyRows(tmp_path / "a.npy", 1)
    assert_named(lambda: rows.take(SCATTERED.numpy()), tmp_path / "a.npy")


def test_an_lmdb_file_that_was_copied_in_part_is_refused(tmp_path: Path):
    _, path = of_lmdb(tmp_path)
    os.truncate(path, path.stat().st_size // 2)
    code = "import sys; from pathlib import Path; from isoscale.data.formats.lmdb import LmdbSource\n"
    code += "try: LmdbSource(Path(sys.argv[1]))\nexcept Exception as error: print(error)"
    found = warm.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and "is truncated" in found.stdout


CUTTING = """
import os
import isoscale
import torch
from torch import nn

class Cutting(isoscale.Supervised):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            os.truncate("x.npy", 1000)
        return super().training_step(batch, batch_idx)
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--devices", "2")], ids=["one rank", "two ranks"])
def test_a_training_whose_data_is_cut_ends_with_its_name(words: tuple[str, ...], tmp_path: Path):
    (tmp_path / "cutting.py").write_text(CUTTING)
    np.save(tmp_path / "x.npy", np.ones((ROWS, 3), np.float32))
    np.save(tmp_path / "y.npy", np.ones((ROWS, 1), np.float32))
    (tmp_path / "mine.yaml").write_text(
        "task: {class: cutting.Cutting, model: {class: mlp, widths: [3, 1]}, loss: mse}\n"
        "data: {class: files, columns: {input: x.npy, target: y.npy}, residency: disk, batch_size: 100}\n"
        "train: {epochs: 2, device: cpu}\n"
    )
    failed = cli("train", "mine.yaml", "--run", "a", *words, cwd=tmp_path)
    assert failed.returncode == 2, failed.stderr
    assert f"error: x.npy {CUT}: 1,000 bytes found" in failed.stderr and "Traceback" not in failed.stderr
