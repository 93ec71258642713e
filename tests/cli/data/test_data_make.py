import json
import os
import signal
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests import warm

OWN = """
from pathlib import Path
import numpy as np

def read(path: Path, scale: float = 1.0):
    for line in path.read_text().splitlines():
        with open("calls.txt", "a") as calls:
            calls.write(path.name + "\\n")
        yield {"input": np.full((2, 3), float(line) * scale), "target": np.arange(2)}

class Reader:
    def __init__(self, scale: float):
        self.scale = scale

    def __call__(self, path):
        yield {"input": np.full((1, 1), self.scale)}
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "a.dat").write_text("1\n2\n")
    (tmp_path / "b.dat").write_text("3\n")
    (tmp_path / "t.csv").write_text("x,y,energy\n1,2,3\n4,5,6\n")
    return tmp_path


@pytest.fixture(autouse=True)
def _fresh_module():
    yield
    sys.modules.pop("own", None)


def make(isoscale, *words: str) -> str:
    done = isoscale("data", "make", *words, "--out", "made")
    assert done.code == 0, done.err
    return done.out


def manifest(folder: Path) -> dict:
    return json.loads((folder / "made/manifest.json").read_text())["inputs"]


def test_text_becomes_columns_by_name(isoscale, here: Path):
    make(isoscale, "text", "t.csv")
    assert {path.name for path in (here / "made").iterdir()} == {
        "t.x.npy", "t.y.npy", "t.energy.npy", "manifest.json",
    }  # fmt: skip
    assert np.load(here / "made/t.energy.npy").tolist() == [3, 6]


def test_columns_of_text_are_put_together(isoscale, here: Path):
    make(isoscale, "text", "t.csv", "input=[x, y]", "target=[energy]", "dtype=float64")
    assert np.load(here / "made/t.input.npy").tolist() == [[1, 2], [4, 5]]
    assert np.load(here / "made/t.target.npy").shape == (2, 1)
    assert np.load(here / "made/t.input.npy").dtype == np.float64


@pytest.mark.parametrize(("kind", "name"), [("npz", "a.npz"), ("hdf5", "a.h5")])
def test_arrays_of_other_files_are_taken_all_or_by_name(isoscale, here: Path, kind: str, name: str):
    arrays = {"features": np.arange(6.0).reshape(3, 2), "energy": np.arange(3)}
    if kind == "npz":
        np.savez(here / name, **arrays)
    else:
        with h5py.File(here / name, "w") as file:
            for key, value in arrays.items():
                file[key] = value
    make(isoscale, kind, name)
    np.testing.assert_array_equal(np.load(here / "made/a.features.npy"), arrays["features"])
    make(isoscale, kind, name, "input=features")
    assert {path.name for path in (here / "made").iterdir()} == {"a.input.npy", "manifest.json"}, "no old ones"


@pytest.mark.parametrize("format_name", ["npy", "hdf5", "zarr"])
def test_every_format_holds_the_same_and_can_be_trained_on(isoscale, here: Path, format_name: str):
    if format_name == "zarr":
        pytest.importorskip("zarr", reason="needs zarr: pip install 'isoscale[zarr]'")
    make(isoscale, "own:read", "*.dat", "scale=2", "--format", format_name)
    pattern, dataset = ("made/*.input.npy", None) if format_name == "npy" else ("made/*", "input")
    suffix = {"npy": "", "hdf5": ".h5", "zarr": ".zarr"}[format_name]
    from isoscale.data.formats.opening import open_column

    column = open_column({"path": pattern + suffix, **({"dataset": dataset} if dataset else {})})
    assert column.take(np.arange(6))[:, 0].tolist() == [2, 2, 4, 4, 6, 6] and column.row_shape == (3,)


def test_a_class_is_built_with_the_arguments(isoscale, here: Path):
    make(isoscale, "own.Reader", "a.dat", "scale=3")
    assert np.load(here / "made/a.input.npy").tolist() == [[3]]


def test_the_manifest_says_what_was_made_of_what(isoscale, here: Path):
    make(isoscale, "own:read", "a.dat", "scale=2")
    entry = manifest(here)["a"]
    assert entry["source"] == "a.dat" and entry["bytes"] == 4 and entry["rows"] == 4 and len(entry["sha256"]) == 64
    assert entry["made_by"]["converter"] == "own:read" and entry["made_by"]["arguments"] == {"scale": 2}
    sizes = {name: (here / "made" / name).stat().st_size for name in ("a.input.npy", "a.target.npy")}
    assert entry["files"] == sizes


def calls(folder: Path) -> list[str]:
    found = (folder / "calls.txt").read_text().split()
    (folder / "calls.txt").write_text("")
    return found


def test_what_was_made_is_left_alone_until_something_changes(isoscale, here: Path):
    make(isoscale, "own:read", "*.dat")
    assert calls(here) == ["a.dat", "a.dat", "b.dat"]
    assert make(isoscale, "own:read", "*.dat").count("made already") == 2 and calls(here) == []
    (here / "b.dat").write_text("7\n")
    make(isoscale, "own:read", "*.dat")
    assert calls(here) == ["b.dat"]
    (here / "made/a.input.npy").unlink()
    make(isoscale, "own:read", "*.dat")
    assert calls(here) == ["a.dat", "a.dat"]
    make(isoscale, "own:read", "b.dat", "scale=2")
    assert calls(here) == ["b.dat"] and np.load(here / "made/b.input.npy")[0, 0] == 14
    (here / "own.py").write_text(OWN.replace("* scale", "* scale + 1"))
    sys.modules.pop("own", None)
    make(isoscale, "own:read", "b.dat", "scale=2")
    assert calls(here) == ["b.dat"], "a changed converter is run again"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("own:read", "c.dat"), "there is no file c.dat"),
        (("own:read", "a.dat", "scael=2"), 'read takes no such argument; did you mean "scale"?'),
        (("own:read", "a.dat", "scale=much"), "scale"),
        (("own.Reader", "a.dat"), 'needs the argument "scale"'),
        (("own:rad", "a.dat"), 'did you mean "read"?'),
        (("text", "t.csv", "input=[x, z]"), 't.csv has no column "z"; there is x, y, energy'),
        (("text", "a.dat"), "has no line with a name for each column"),
        (("text", "t.csv", "dtype=number"), 'there is no type "number"'),
        (("text", "t.csv", "--format", "parquet"), "--format parquet: expected one of npy, hdf5, zarr"),
        (("own:read", "a.dat", "sub/a.dat"), "would be written under the same name"),
    ],
)
def test_what_cannot_be_made_is_explained(isoscale, here: Path, words, message):
    (here / "sub").mkdir()
    (here / "sub/a.dat").write_text("1")
    done = isoscale("data", "make", *words, "--out", "made")
    assert done.code == 2 and message in done.err and "Traceback" not in done.err
    assert not list(here.glob("made/*.npy"))


BAD = {
    "{'x': np.zeros(2), 'y': np.zeros(3)}": "every array needs one row per sample",
    "{'x': np.array(['a'])}": "holds text or dates",
    "{'a/b': np.zeros(2)}": "under a plain name",
    "{'x': np.float32(1)}": "not an array of rows",
    "{}": "no arrays",
}


@pytest.mark.parametrize("block", BAD)
def test_a_converter_that_gives_something_else_is_told_so(isoscale, here: Path, block: str):
    (here / "own.py").write_text(f"import numpy as np\ndef read(path):\n    yield {block}\n")
    done = isoscale("data", "make", "own:read", "a.dat", "--out", "made")
    assert done.code == 2 and BAD[block] in done.err and "a.dat" in done.err
    assert list((here / "made").iterdir()) == []


def test_blocks_must_agree_and_some_must_come(isoscale, here: Path):
    (here / "own.py").write_text(
        "import numpy as np\ndef read(path):\n    yield {'x': np.zeros((2, 3))}\n    yield {'x': np.zeros((2, 4))}\n"
        "def nothing(path):\n    yield from ()\n"
    )
    assert "a.dat, block 1 has" in isoscale("data", "make", "own:read", "a.dat", "--out", "made").err
    assert "found no rows in a.dat" in isoscale("data", "make", "own:nothing", "a.dat", "--out", "made").err
    assert list((here / "made").iterdir()) == []


def test_a_converter_that_fails_leaves_what_was_finished(isoscale, here: Path):
    (here / "b.dat").write_text("not a number\n")
    failed = isoscale("data", "make", "own:read", "*.dat", "--out", "made")
    assert failed.code == 1 and "while converting b.dat" in failed.err
    assert {path.name for path in (here / "made").iterdir()} == {"a.input.npy", "a.target.npy", "manifest.json"}
    (here / "b.dat").write_text("5\n")
    assert "a.dat: 4 rows, made already" in make(isoscale, "own:read", "*.dat")


@pytest.mark.slow
def test_a_command_that_was_killed_is_started_again(isoscale, here: Path):
    (here / "own.py").write_text(
        "import time, numpy as np\ndef read(path):\n    yield {'x': np.zeros((2, 3))}\n"
        "    if path.name == 'b.dat':\n        open('half', 'w').close()\n        time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "isoscale", "data", "make", "own:read", "a.dat", "b.dat", "--out", "made"]
    process = warm.Popen(command, cwd=here)
    while not (here / "half").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sorted(path.name for path in (here / "made").glob("*.npy")) == ["a.x.npy"], "nothing half has a name"
    for left in (here / "made").glob(".making-*"):
        os.utime(left, (0, 0))
    (here / "own.py").write_text((here / "own.py").read_text().replace("60", "0"))
    make(isoscale, "own:read", "a.dat", "b.dat")
    assert sorted(path.name for path in (here / "made").iterdir()) == ["a.x.npy", "b.x.npy", "manifest.json"]


def test_many_blocks_are_written_one_after_the_other(isoscale, here: Path, monkeypatch):
    from isoscale.data.formats import text

    monkeypatch.setattr(text, "LINES_AT_ONCE", 7)
    values = np.random.default_rng(0).random((100, 2)).round(6)
    np.savetxt(here / "many.txt", values, header="a b", fmt="%.6f")
    make(isoscale, "text", "many.txt", "input=[a, b]", "dtype=float64")
    np.testing.assert_array_equal(np.load(here / "made/many.input.npy"), values)


def test_a_full_disk_is_said_and_leaves_nothing_half(isoscale, here: Path):
    resource = pytest.importorskip("resource")
    (here / "own.py").write_text("import numpy as np\ndef read(path):\n    yield {'x': np.zeros((1000, 3))}\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        failed = isoscale("data", "make", "own:read", "a.dat", "--out", "made")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.code == 2 and "cannot write into made: File too large" in failed.err
    assert list((here / "made").iterdir()) == []


def test_a_foreign_manifest_is_not_touched(isoscale, here: Path):
    (here / "made").mkdir()
    (here / "made/manifest.json").write_text("[1]")
    failed = isoscale("data", "make", "own:read", "a.dat", "--out", "made")
    assert failed.code == 2 and "is not the manifest of this command" in failed.err
    assert (here / "made/manifest.json").read_text() == "[1]"
