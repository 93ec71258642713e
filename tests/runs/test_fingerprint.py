"""Data that changes between two starts of a run is noticed, whatever it is, and it is said what was compared."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import isoscale
from isoscale.data.file_sources import Files
from isoscale.data.mixture import Mixture
from isoscale.data.sources import Arrays, Source, as_source, split_source
from isoscale.errors import UserError
from isoscale.runs import fingerprint
from isoscale.runs.fingerprint import RECORD, Comparison, compare, read_record
from isoscale.runs.run import Run
from isoscale.study.data_check import check_data
from tests.data.formats.conftest import WRITERS
from tests.helpers import train
from tests.science.potentials import made_systems

ROWS = 2000
BETWEEN = 777
"""A row that is none of the 64 samples of a split."""


@pytest.fixture(autouse=True)
def _on_a_busy_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "CHEAP_SECONDS", 60.0)


def numbers(changed: bool = False, rows: int = ROWS, width: int = 3) -> np.ndarray:
    array = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    array[BETWEEN % rows] += changed
    return array


def of_format(name: str) -> Callable[[Path, bool], Source]:
    def make(folder: Path, changed: bool) -> Source:
        (folder / "x").mkdir(exist_ok=True)
        (folder / "y").mkdir(exist_ok=True)
        columns = {
            "input": WRITERS[name](folder / "x", numbers()),
            "target": WRITERS[name](folder / "y", numbers(changed)),
        }
        return Files(train=columns).train

    return make


def of_text(folder: Path, changed: bool) -> Source:
    np.savetxt(folder / "a.csv", numbers(changed), delimiter=",")
    return Files({"input": {"path": str(folder / "a.csv"), "columns": ":2"}, "target": str(folder / "a.csv")}).train


def of_lmdb(folder: Path, changed: bool) -> Source:
    lmdb = pytest.importorskip("lmdb", reason="needs lmdb: pip install 'isoscale[lmdb]'")
    (folder / "a.lmdb").unlink(missing_ok=True)
    with lmdb.open(str(folder / "a.lmdb"), subdir=False, map_size=1 << 24) as store, store.begin(write=True) as writing:
        for number, row in enumerate(numbers(changed)):
            writing.put(str(number).encode(), pickle.dumps({"input": row}))
    return Files(str(folder / "a.lmdb"), on_nan="keep").train


def of_arrays(folder: Path, changed: bool) -> Source:
    np.savez(folder / "a.npz", input=numbers(changed))
    return Arrays(str(folder / "a.npz")).train


def of_systems(folder: Path, changed: bool) -> Source:
    sets = made_systems.arrays(num_frames=200)
    sets["energy"][BETWEEN % 200] += changed
    made_systems.write(folder / "one")
    made_systems.write(folder / "two", [sets])
    return made_systems.opened(folder / "one", folder / "two").train


class Handwritten(Dataset[torch.Tensor]):
    """As people write them."""

    def __init__(self, changed: bool) -> None:
        self.points, self.labels = numbers(changed), list(range(ROWS))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.points[index])


class Folder(Dataset[torch.Tensor]):
    """A folder of one file a sample, as image folders are."""

    def __init__(self, folder: Path, changed: bool) -> None:
        self.samples = [(str(folder / f"{number}.bin"), number) for number in range(100)]
        for number, (path, _) in enumerate(self.samples):
            Path(path).write_bytes(bytes([number + (changed and number == 77)]))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(list(Path(self.samples[index][0]).read_bytes()))


CERTAIN: dict[str, Callable[[Path, bool], Source]] = {
    **{name: of_format(name) for name in WRITERS},
    "text": of_text,
    "lmdb": of_lmdb,
    "named arrays": of_arrays,
    "systems of atoms": of_systems,
    "tensors": lambda _, changed: as_source({"input": torch.from_numpy(numbers(changed))}),
    "a split": lambda _, changed: split_source(as_source(numbers(changed)), {"train": 0.5, "val": 0.5}).train,
    "a mixture": lambda _, changed: Mixture([numbers(), numbers(changed, width=2)]),
    "whole numbers": lambda _, changed: as_source((numbers(changed) * 100).astype(np.int64)),
    "a TensorDataset": lambda _, changed: as_source(TensorDataset(torch.from_numpy(numbers(changed)))),
}
HANDED: dict[str, Callable[[Path, bool], Source]] = {
    "a dataset": lambda _, changed: as_source(Handwritten(changed)),
    "two datasets": lambda _, changed: as_source(ConcatDataset([Handwritten(False), Handwritten(changed)])),
    "a part of a dataset": lambda _, changed: as_source(Subset(Handwritten(changed), range(100))),
    "a list of pairs": lambda _, changed: as_source([(row, 1) for row in numbers(changed)], torch.stack),
    "a folder of files": lambda folder, changed: as_source(Folder(folder, changed)),
}  # fmt: skip


def seen(make: Callable[[Path, bool], Source], folder: Path) -> Comparison:
    """A source is looked at, and again when one value has changed."""
    before = compare(None, {"train": make(folder, False)})
    assert not before.changed and all(entry["hash"] for entry in before.entries.values())
    return compare(before.entries, {"train": make(folder, True)})


@pytest.mark.slow
@pytest.mark.parametrize("make", CERTAIN.values(), ids=CERTAIN)
def test_one_value_that_changed_is_noticed_in_every_kind_of_data(make, tmp_path: Path):
    found = seen(make, tmp_path)
    assert found.changed and all("its values differ" in how for how in found.changed.values())


@pytest.mark.parametrize("make", HANDED.values(), ids=HANDED)
def test_what_a_dataset_holds_is_looked_at_too(make, tmp_path: Path):
    found = seen(make, tmp_path)
    assert not found.changed and any("its values differ" in how for how in found.doubtful.values())


@pytest.mark.slow
@pytest.mark.parametrize("make", {**CERTAIN, **HANDED}.values(), ids={**CERTAIN, **HANDED})
def test_data_that_is_written_again_as_it_was_passes(make, tmp_path: Path):
    before = compare(None, {"train": make(tmp_path, False)}).entries
    again = compare(before, {"train": make(tmp_path, False)})
    assert not again.changed and not again.doubtful and again.read


def test_files_may_lie_elsewhere(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    make = of_format("npy")
    before = compare(None, {"train": make(tmp_path / "a", False)}).entries
    assert not compare(before, {"train": make(tmp_path / "b", False)}).changed
    assert set(compare(before, {"train": make(tmp_path / "b", True)}).changed) == {"target in y/a.npy"}


@pytest.fixture
def nothing_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "CHEAP_BYTES", 0)


@pytest.mark.usefixtures("nothing_is_cheap")
class TestMuchData:
    """Of what is too large to be read at every start, sizes and times are compared."""

    def test_a_file_that_was_written_again_is_doubtful_and_remains_so(self, tmp_path: Path):
        make = of_format("npy")
        before = compare(None, {"train": make(tmp_path, False)}).entries
        assert not any(entry["hash"] for entry in before.values())
        os.utime(tmp_path / "y/a.npy", ns=(0, 10**18))
        for _ in range(2):
            found = compare(
                before,
                {"train": Files(train={"input": str(tmp_path / "x/a.npy"), "target": str(tmp_path / "y/a.npy")}).train},
            )
            assert not found.changed and "y/a.npy was written at" in found.doubtful["target in y/a.npy"]
            assert found.said == "sizes and times of 1 file and some samples of each split"
            before = found.entries

    def test_another_number_of_rows_is_a_change(self, tmp_path: Path):
        before = compare(None, {"train": as_source(numbers())}).entries
        found = compare(before, {"train": as_source(numbers(rows=1999))})
        assert found.changed == {"train": "it had 24,000 bytes and has 23,988"}

    def test_a_file_whose_values_are_known_is_read_where_its_time_has_changed(self, tmp_path: Path):
        make = of_format("npy")
        before = compare(None, {"train": make(tmp_path, False)}, cheap=False).entries
        os.utime(tmp_path / "x/a.npy", ns=(0, 10**18))
        found = compare(before, {"train": make(tmp_path, True)})
        assert set(found.changed) == {"target in y/a.npy"}


RECIPE = {
    "task": {"class": "supervised", "model": {"class": "mlp", "widths": [3, 1]}, "loss": "mse"},
    "train": {"epochs": 1, "threads": 1},
}


def recipe(folder: Path, changed: bool = False) -> dict[str, Any]:
    np.save(folder / "x.npy", numbers())
    np.save(folder / "y.npy", numbers(changed, width=1))
    columns = {"input": str(folder / "x.npy"), "target": str(folder / "y.npy")}
    return {**RECIPE, "data": {"class": "files", "columns": columns, "batch_size": 500}}


def test_a_run_refuses_to_go_on_and_names_the_file_and_the_way_out(tmp_path: Path):
    train(tmp_path / "run", recipe(tmp_path))
    record = (tmp_path / "run" / RECORD).read_bytes()
    with pytest.raises(
        UserError, match=r"(?s)target in y\.npy: its values differ; y\.npy was written at .*task\.init_from="
    ):
        train(tmp_path / "run", recipe(tmp_path, changed=True), train__epochs=2)
    assert (tmp_path / "run" / RECORD).read_bytes() == record
    assert train(tmp_path / "run", recipe(tmp_path), train__epochs=2).status == "done"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "compared with the data that the run began with: every value of 2 arrays" in log


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path):
    train(tmp_path / "run", recipe(tmp_path))
    (tmp_path / "run" / RECORD).unlink()
    train(tmp_path / "run", recipe(tmp_path), train__epochs=2)
    assert "began with: some samples of each split" in (tmp_path / "run" / "log.txt").read_text()
    assert read_record(tmp_path / "run")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pieces": {"a": 1}}', '{"pieces": {"a": {"bytes": "x"}}}'])
def test_a_damaged_record_is_none(text: str, tmp_path: Path):
    (tmp_path / RECORD).write_text(text)
    assert read_record(tmp_path) is None


class TestFullCheck:
    """`isoscale data check`."""

    def test_everything_is_read_however_large_it_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(fingerprint, "CHEAP_BYTES", 0)
        run = train(tmp_path / "run", recipe(tmp_path))
        first = check_data(run)
        assert first.equal and len(first.comparison.unread) == 2 and "when it was not read whole" in first.lines[0]
        assert check_data(run).comparison.read == ["target in y.npy", "input in x.npy"]
        stamp = os.stat(tmp_path / "y.npy")
        recipe(tmp_path, changed=True)
        os.utime(tmp_path / "y.npy", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as if nobody had written it
        second = check_data(run)
        assert not second.equal and second.comparison.changed["target in y.npy"].startswith("its values differ")

    def test_what_was_given_in_python_cannot_be_made_again(self, tmp_path: Path):
        data = {"input": torch.from_numpy(numbers()), "target": torch.from_numpy(numbers(width=1))}
        task = isoscale.Supervised(torch.nn.Linear(3, 1), "mse")
        keys = {"train.epochs": 1, "data.batch_size": 500, "observe.level": "error"}
        isoscale.Trainer({}, run=tmp_path / "run", **keys).fit(task, data)
        assert json.loads((tmp_path / "run" / RECORD).read_text())["pieces"].keys() == {"train input", "train target"}
        with pytest.raises(UserError, match="was given in Python"):
            check_data(Run(tmp_path / "run"))
        data["target"][BETWEEN] += 1
        with pytest.raises(UserError, match="train target: its values differ"):
            isoscale.Trainer({}, run=tmp_path / "run", **{**keys, "train.epochs": 2}).fit(task, data)
