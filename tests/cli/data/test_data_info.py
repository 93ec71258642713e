import json
import pickle
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest

VALUES = np.array([[1.0, 2.0], [np.nan, 4.0], [-np.inf, 6.0]], np.float32)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", VALUES)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"], file["group/labels"] = VALUES, np.arange(4, dtype=np.int64)
    for number in (2, 10):
        np.save(tmp_path / f"part{number}.npy", np.full((number, 3), number, np.uint8))
    return tmp_path


def facts(isoscale, *words: str) -> dict:
    done = isoscale("data", "info", *words, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)["paths"]


def test_a_file_is_described_in_numbers(isoscale, here: Path):
    found = facts(isoscale, "a.npy")["a.npy"]
    assert found["files"] == 1 and found["bytes"] == (here / "a.npy").stat().st_size
    values = found["columns"]["values"]
    fingerprint = values.pop("fingerprint")
    assert values == {
        "rows": 3, "shape": [2], "dtype": "float32", "min": 1.0, "max": 6.0, "mean": 3.25, "nan": 1, "infinite": 1,
    }  # fmt: skip
    assert len(fingerprint) == 64
    shown = isoscale("data", "info", "a.npy").out.splitlines()
    assert shown[0] == "a.npy"
    assert [line.split(maxsplit=1)[1] for line in shown[2:6]] == [
        "3 rows, 2, float32", "1 to 6, mean 3.25", "1", "1",
    ]  # fmt: skip


def test_all_arrays_of_a_file_are_described_or_the_one_that_is_named(isoscale, here: Path):
    found = facts(isoscale, "b.h5")["b.h5"]["columns"]
    assert found.keys() == {"x", "group/labels"}
    assert found["group/labels"]["max"] == 3 and found["group/labels"]["mean"] == 1.5
    assert facts(isoscale, "b.h5", "dataset=x")["b.h5"]["columns"].keys() == {"x"}


def test_the_same_rows_have_the_same_fingerprint_in_every_format(isoscale, here: Path):
    found = facts(isoscale, "a.npy", "b.h5")
    assert found["a.npy"]["columns"]["values"] == found["b.h5"]["columns"]["x"]
    np.save(here / "other.npy", VALUES.astype(">f4"))
    np.save(here / "reshaped.npy", VALUES.reshape(2, 3))
    found |= facts(isoscale, "other.npy", "reshaped.npy")
    prints = {name: found[name]["columns"]["values"]["fingerprint"] for name in found if name != "b.h5"}
    assert prints["a.npy"] == prints["other.npy"] != prints["reshaped.npy"]


def test_a_pattern_is_one_array_and_options_are_those_of_a_column(isoscale, here: Path):
    found = facts(isoscale, "part*.npy", "columns=1:")["part*.npy"]
    assert found["files"] == 2
    assert found["columns"]["values"]["rows"] == 12 and found["columns"]["values"]["shape"] == [2]
    assert facts(isoscale, "part*.npy", "rows=0:2")["part*.npy"]["columns"]["values"]["max"] == 2
    assert facts(isoscale, "part2.npy", "columns=[0, 2]")["part2.npy"]["columns"]["values"]["shape"] == [2]


def test_a_file_wins_over_a_data_set_of_its_name_and_a_folder_does_not(isoscale, here: Path):
    (here / "mnist").mkdir()
    assert "isoscale data get mnist" in isoscale("data", "info", "mnist").err
    (here / "mnist").rmdir()
    np.save((here / "mnist").open("wb"), np.zeros((2, 2)))
    assert facts(isoscale, "mnist")["mnist"]["columns"]["values"]["rows"] == 2


def test_a_preset_is_still_a_recipe(isoscale, here: Path):
    (here / "images").mkdir()
    assert "1,438 samples" in isoscale("data", "info", "images/digits").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("aa.npy",), "there is no file aa.npy; in "),
        (("nothing",), 'there is no file, folder, recipe or data set called "nothing"'),
        (("c*.npy",), "no file matches c*.npy"),
        (("b.h5", "dataset=y"), 'has no dataset "y"; there is group/labels, x'),
        (("a.npy", "columns=5:"), '"5:", but there are 2'),
        (("a.npy", "sample_dim=1"), "there is no such option"),
    ],
)
def test_what_cannot_be_described_is_explained(isoscale, here: Path, words, message):
    done = isoscale("data", "info", *words)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err


def test_records_show_which_sizes_vary(isoscale, here: Path):
    with (
        lmdb.open(str(here / "clouds.lmdb"), subdir=False, map_size=1 << 20) as store,
        store.begin(write=True) as write,
    ):
        for number, count in enumerate((5, 7)):
            write.put(str(number).encode(), pickle.dumps({"points": np.ones((count, 3), np.float32)}))
    assert facts(isoscale, "clouds.lmdb")["clouds.lmdb"]["columns"]["points"]["shape"] == [None, 3]
    assert "2 rows, ?×3, float32" in isoscale("data", "info", "clouds.lmdb").out


def test_crystals_are_the_same_in_any_file(isoscale, shared: Path):
    found = []
    for ending in ("lmdb", "npz"):
        done = isoscale("data", "info", str(shared / f"data/crystals/colabfit_devset.{ending}"), "--json")
        assert done.code == 0, done.err
        found.append(json.loads(done.out)["splits"]["structures"])
    assert found[0]["structures"] == found[1]["structures"] == 262
    for name, target in found[0]["targets"].items():
        assert target["rms"] == pytest.approx(found[1]["targets"][name]["rms"], rel=1e-5), name
