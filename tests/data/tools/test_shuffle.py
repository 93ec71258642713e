"""Shuffled files hold every row exactly once, all columns alike, whatever happens while they are written."""

import hashlib
import os
import shutil
import signal
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import isoscale
from isoscale.data.order import Order
from isoscale.data.tools.shuffle import num_bytes, shuffle_files
from isoscale.errors import UserError
from tests import warm

IN, OUT = "snap*.in.npy", "snap*.out.npy"


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Three snapshots of 24, 6 and 24 rows: the number of a row, and its square."""
    make_inputs(tmp_path / "data", [(2, 3, 4), (1, 2, 3), (4, 3, 2)])
    return tmp_path / "data"


def make_inputs(folder: Path, grids: list[tuple[int, ...]]) -> None:
    folder.mkdir()
    start = 0
    for number, grid in enumerate(grids):
        values = np.arange(start, start + np.prod(grid), dtype=np.float32).reshape(grid)
        np.save(folder / f"snap{number}.in.npy", np.stack([values, -values], axis=-1))
        np.save(folder / f"snap{number}.out.npy", (values.astype(np.float64) ** 2)[..., None])
        start += values.size


def shuffled(folder: Path, out: str = "mixed*", **options: Any) -> list[Path]:
    return shuffle_files([folder / IN, folder / OUT], folder / out, **options)


def read(folder: Path, suffix: str, prefix: str = "mixed") -> list[np.ndarray]:
    numbers = range(len(list(folder.glob(f"{prefix}*{suffix}"))))
    return [np.load(folder / f"{prefix}{number}{suffix}") for number in numbers]


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("mixed*.npy")}


@pytest.mark.parametrize("num_files", [1, 2, 3, 5, 7, 53, 54])
def test_every_row_is_written_once_and_columns_stay_together(inputs: Path, num_files: int):
    shuffled(inputs, files=num_files)
    rows, squares = read(inputs, ".in.npy"), read(inputs, ".out.npy")
    assert len(rows) == len(squares) == num_files
    assert {len(part) for part in rows} <= {54 // num_files, -(-54 // num_files)}
    numbers = np.concatenate(rows)[:, 0]
    assert sorted(numbers) == list(range(54))
    assert np.array_equal(np.concatenate(squares)[:, 0], numbers.astype(np.float64) ** 2)
    assert np.array_equal(np.concatenate(rows)[:, 1], -numbers)


def test_the_rows_come_in_the_order_of_the_seed(inputs: Path):
    shuffled(inputs, files=4, seed=7)
    expected = Order(54, 7, purpose="shuffle files").indices(0, 54).tolist()
    assert np.concatenate(read(inputs, ".in.npy"))[:, 0].tolist() == expected


def test_the_files_are_as_many_as_there_were_and_named_in_order(inputs: Path):
    paths = isoscale.shuffle_files([str(inputs / IN), str(inputs / OUT)], str(inputs / "mixed*"))
    assert [path.name for path in paths] == [f"mixed{n}.{c}.npy" for c in ("in", "out") for n in range(3)]
    assert all(path.is_file() for path in paths)


def test_every_file_is_another_one_for_every_seed(inputs: Path):
    by_seed = []
    for seed in range(4):
        shuffled(inputs, out=f"mixed{seed}_*", files=5, seed=seed)
        by_seed.append(read(inputs, ".in.npy", f"mixed{seed}_"))
    for number in range(5):
        assert len({by_seed[seed][number].tobytes() for seed in range(4)}) == 4


@pytest.mark.parametrize("memory", [1, 500, "1kB", "1GB"])
def test_memory_never_changes_a_byte(inputs: Path, memory: int | str):
    shuffled(inputs, files=4)
    expected = contents(inputs)
    shutil.rmtree(inputs / "other", ignore_errors=True)
    (inputs / "other").mkdir()
    shuffle_files([inputs / IN, inputs / OUT], inputs / "other" / "mixed*", 4, memory=memory)
    assert contents(inputs / "other") == expected


def test_snapshots_are_counted_as_numbers(tmp_path: Path):
    make_inputs(tmp_path / "data", [(1, 1)] * 12)
    shuffled(tmp_path / "data", files=1, seed=3)
    expected = Order(12, 3, purpose="shuffle files").indices(0, 12).tolist()
    assert read(tmp_path / "data", ".in.npy")[0][:, 0].tolist() == expected


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), files=st.integers(1, 40), memory=st.integers(1, 4000)
)
@pytest.mark.slow
def test_any_lengths_into_any_number_of_files(tmp_path_factory: Any, lengths: list[int], files: int, memory: int):
    folder = tmp_path_factory.mktemp("any") / "data"
    make_inputs(folder, [(length,) for length in lengths])
    files = min(files, sum(lengths))
    shuffled(folder, files=files, memory=memory)
    assert sorted(np.concatenate(read(folder, ".in.npy"))[:, 0]) == list(range(sum(lengths)))


@pytest.mark.parametrize("dtype", [">f4", "<i2", "c16", "?", "S5"])
def test_types_are_kept_as_stored(tmp_path: Path, dtype: str):
    values = np.arange(60).reshape(30, 2).astype(dtype)
    np.save(tmp_path / "a0.npy", values)
    shuffle_files([tmp_path / "a*.npy"], tmp_path / "mixed*")
    found = np.load(tmp_path / "mixed0.npy")
    assert found.dtype == values.dtype
    assert Counter(map(bytes, found)) == Counter(map(bytes, values))


def test_arrays_in_the_order_of_fortran_are_rows_as_well(tmp_path: Path):
    values = np.arange(48.0).reshape(2, 4, 3, 2)
    for order in "CF":
        np.save(tmp_path / f"{order}0.npy", np.asarray(values, order=order))
        shuffle_files([tmp_path / f"{order}*.npy"], tmp_path / f"mixed{order}*")
    assert (tmp_path / "mixedF0.npy").read_bytes() == (tmp_path / "mixedC0.npy").read_bytes()


def test_samples_of_more_dimensions_and_their_labels_are_shuffled_together(tmp_path: Path):
    np.save(tmp_path / "a0.image.npy", np.arange(20)[:, None, None, None] * np.ones((1, 3, 2, 2)))
    np.save(tmp_path / "a0.label.npy", np.arange(20))
    shuffle_files([tmp_path / "a*.image.npy", tmp_path / "a*.label.npy"], tmp_path / "mixed*", 3, sample_dims=3)
    images, labels = (np.concatenate(read(tmp_path, f".{name}.npy")) for name in ("image", "label"))
    assert images.shape == (20, 3, 2, 2) and sorted(labels) == list(range(20))
    assert np.array_equal(images[:, 0, 0, 0], labels)


@pytest.mark.parametrize("order", ["C", "F"])
def test_memory_is_bounded(tmp_path: Path, order: str):
    np.save(tmp_path / "a0.npy", np.asarray(np.zeros((100, 400, 50)), order=order))
    tracemalloc.start()
    shuffle_files([tmp_path / "a*.npy"], tmp_path / "mixed*", memory="2MB")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000  # of 16 MB


class Killed(BaseException):
    """As good as a signal: nothing catches it."""


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int | None], list[str]]]:
    """Die at one of the moments at which something on the disk changes for good."""
    seen: list[str] = []
    fatal: list[int | None] = [None]

    def dying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            for when in ("before", "after"):
                if len(seen) == fatal[0]:
                    raise Killed
                seen.append(f"{when} {name}")
                if when == "before":
                    result = function(*arguments, **options)
            return result

        return call

    for owner, name in [(os, "fsync"), (Path, "replace"), (Path, "unlink"), (shutil, "rmtree"), (Path, "mkdir")]:
        monkeypatch.setattr(owner, name, dying(name, getattr(owner, name)))

    def set_fatal(moment: int | None) -> list[str]:
        fatal[0] = moment
        seen.clear()
        return seen

    yield set_fatal
    fatal[0] = None


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "in place of an earlier one"])
def test_a_kill_at_any_moment_is_invisible(tmp_path: Path, moments: Any, replaces: bool):
    make_inputs(tmp_path / "data", [(2, 3, 2)] * 2)
    seen = moments(None)
    shuffled(tmp_path / "data", files=2, memory=1500)
    expected, num_moments = contents(tmp_path / "data"), len(seen)
    assert num_moments > 20
    for moment in range(num_moments):
        folder = tmp_path / f"killed{moment}"
        moments(None)
        shutil.copytree(tmp_path / "data", folder)
        for path in folder.glob("mixed*"):
            path.unlink()
        if replaces:
            shuffled(folder, files=3, seed=5)
        moments(moment)
        with pytest.raises(Killed):
            shuffled(folder, files=2, memory=1500)
        moments(None)
        shuffled(folder, files=2, memory=800)
        assert contents(folder) == expected, moment
        assert {path.name for path in folder.glob(".*")} == set()
        assert shuffled(folder, files=2) and contents(folder) == expected


def test_a_restart_does_not_write_again_what_is_there(inputs: Path, monkeypatch: pytest.MonkeyPatch):
    from isoscale.data.tools import shuffle

    gathered: list[int] = []
    original = shuffle._gathered

    def counting(column: Any, rows: Any, by_place: Any) -> Any:
        if len(gathered) == 6:
            raise Killed
        gathered.append(len(rows))
        return original(column, rows, by_place)

    monkeypatch.setattr(shuffle, "_gathered", counting)
    with pytest.raises(Killed):
        shuffled(inputs, files=1, memory=500)
    monkeypatch.setattr(shuffle, "_gathered", original)
    before = sum(gathered) // 2
    progress: list[int] = []
    shuffled(inputs, files=1, memory=500, report=lambda done, total: progress.append(done))
    assert progress[0] == before * 16 > 0
    assert progress[-1] == 54 * 16


@pytest.mark.slow
def test_a_killed_process_goes_on(tmp_path: Path):
    (tmp_path / "data").mkdir()
    values = np.arange(400_000, dtype=np.float32)
    for number in range(3):
        np.save(tmp_path / "data" / f"snap{number}.in.npy", np.stack([values + number * 400_000] * 8, axis=1))
    call = "import isoscale; isoscale.shuffle_files(['snap*.in.npy'], 'mixed*', 2, memory='1MB')"
    state = tmp_path / "data" / ".mixed.unfinished" / "state.json"
    for _ in range(3):
        running = warm.Popen([sys.executable, "-c", call], cwd=tmp_path / "data")
        deadline, before = time.time() + 60, state.stat().st_mtime_ns if state.exists() else None
        while time.time() < deadline and running.poll() is None:
            if state.exists() and state.stat().st_mtime_ns != before:
                break
            time.sleep(0.001)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
    warm.run([sys.executable, "-c", call], cwd=tmp_path / "data", check=True)
    numbers = np.concatenate(read(tmp_path / "data", ".in.npy"))[:, 0]
    assert numbers.tolist() == Order(1_200_000, 0, purpose="shuffle files").indices(0, 1_200_000).tolist()


def test_a_full_disk_is_said_and_loses_nothing(inputs: Path, monkeypatch: pytest.MonkeyPatch):
    shuffled(inputs, files=3, seed=1)
    old = contents(inputs)
    original, calls = os.fsync, [0]

    def full(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] > 9:
            raise OSError(28, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"No space left on device; [1-9]\d* of 54 rows are written and kept.*again"):
        shuffled(inputs, files=2, memory=500)
    assert contents(inputs) == old
    monkeypatch.setattr(os, "fsync", original)
    shuffled(inputs, files=2, memory=500)
    assert sorted(np.concatenate(read(inputs, ".in.npy"))[:, 0]) == list(range(54))


def test_too_little_space_is_said_before_anything_is_written(inputs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 10, 100))
    with pytest.raises(UserError, match=r"has 0\.0 GB free, but the shuffled files need"):
        shuffled(inputs)
    assert not contents(inputs)
    assert not list(inputs.glob(".mixed*"))


def test_a_start_that_wrote_no_chunk_is_in_nobodys_way(inputs: Path, moments: Any):
    shuffled(inputs, files=3, seed=1)
    expected = contents(inputs)
    for path in inputs.glob("mixed*"):
        path.unlink()
    moments(10)
    with pytest.raises(Killed):
        shuffled(inputs, files=1)
    moments(None)
    assert list(inputs.glob(".mixed.unfinished/mixed0.*"))
    shuffled(inputs, files=3, seed=1)
    assert contents(inputs) == expected


def test_the_same_shuffle_again_is_done_already(inputs: Path):
    paths = shuffled(inputs, files=4)
    times = [path.stat().st_mtime_ns for path in paths]
    assert shuffled(inputs, files=4) == paths
    assert [path.stat().st_mtime_ns for path in paths] == times


def test_another_shuffle_replaces_all_files_of_the_last_one(inputs: Path):
    shuffled(inputs, files=6)
    shuffled(inputs, files=2, seed=1)
    assert len(contents(inputs)) == 4
    assert sorted(np.concatenate(read(inputs, ".in.npy"))[:, 0]) == list(range(54))


@pytest.mark.parametrize("name", ["mixed1.in.npy", "mixed9.out.npy"])
def test_files_of_others_are_not_overwritten_nor_mixed_in(inputs: Path, name: str):
    np.save(inputs / name, np.zeros(3))
    with pytest.raises(UserError, match=rf"{name} is there already"):
        shuffled(inputs, files=3)
    assert np.load(inputs / name).tolist() == [0, 0, 0]
    assert len(contents(inputs)) == 1
    assert not list(inputs.glob(".mixed*")), "refused before any work"


def test_a_shuffled_file_that_was_changed_is_not_overwritten(inputs: Path):
    shuffled(inputs, files=3)
    np.save(inputs / "mixed2.in.npy", np.zeros(3))
    with pytest.raises(UserError, match=r"mixed2\.in\.npy is there already and was not made, or not left as it was"):
        shuffled(inputs, files=3, seed=1)


def test_an_unfinished_shuffle_of_another_kind_is_not_given_up(inputs: Path, moments: Any):
    moments(30)
    with pytest.raises(Killed):
        shuffled(inputs, files=3, memory=500)
    moments(None)
    with pytest.raises(UserError, match=r"unfinished shuffle of other files, another seed.*rm -r"):
        shuffled(inputs, files=3, seed=1)
    shuffled(inputs, files=3)


def test_input_that_changed_meanwhile_is_not_mixed_with_what_it_was(inputs: Path, moments: Any):
    moments(30)
    with pytest.raises(Killed):
        shuffled(inputs, files=3, memory=500)
    moments(None)
    np.save(inputs / "snap0.in.npy", np.zeros((2, 3, 4, 2), np.float32))
    with pytest.raises(UserError, match="unfinished shuffle of other files"):
        shuffled(inputs, files=3)


def change(folder: Path, name: str, values: np.ndarray | bytes | None) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if isinstance(values, bytes):
        path.write_bytes(values)
    elif values is not None:
        np.save(path, values)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("snap1.out.npy", None, r"snap1\.out\.npy is missing: .*snap\*\.in\.npy has 3 files"),
        ("snap7.out.npy", np.zeros((2, 1)), r"snap7\.in\.npy is missing: .*snap\*\.out\.npy has 4 files"),
        ("snap1.out.npy", np.zeros((1, 2, 4, 1)), r"snap1\.out\.npy has 8 rows \(1, 2, 4\), but .*in\.npy has 6"),
        ("snap1.out.npy", np.zeros((3, 2, 1, 1)), r"snap1\.out\.npy has 6 rows \(3, 2, 1\), but"),
        ("snap1.out.npy", np.zeros((1, 2, 3, 2)), r"files that are read as one must agree"),
        ("snap1.in.npy", b"\x93NUMPY", r"cannot read .*snap1\.in\.npy as a \.npy file of numbers"),
        ("snap1.in.npy", np.array([{}, 1]), r"cannot read .*snap1\.in\.npy as a \.npy file of numbers"),
        ("snap0.in.npy", np.zeros(3), r"snap0\.in\.npy has the shape \(3,\), but the first 3 dimensions"),
    ],
)
def test_files_that_do_not_fit_together_are_named(inputs: Path, name: str, values: Any, message: str):
    change(inputs, name, values)
    with pytest.raises(UserError, match=message):
        shuffled(inputs)
    assert not contents(inputs)


def test_a_truncated_file_is_named(inputs: Path):
    path = inputs / "snap2.in.npy"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"cannot read .*snap2\.in\.npy"):
        shuffled(inputs)


@pytest.mark.parametrize(
    ("patterns", "out", "options", "message"),
    [
        (["snap0.in.npy"], "mixed*", {}, r'should have one \*.*write "Be_snapshot\*\.in\.npy", in quotes'),
        (["s*/snap0.npy"], "mixed*", {}, r"should have one \*"),
        (["snap*.in.csv"], "mixed*", {}, r"should end in \.npy"),
        (["nothing*.npy"], "mixed*", {}, r"no file is called .*nothing\*\.npy"),
        (["elsewhere/snap*.npy"], "mixed*", {}, r"there is no folder .*elsewhere"),
        ([IN, IN], "mixed*", {}, r"two patterns have the same end"),
        ([IN], "mixed", {}, r'should have one \*.*--out "Be_shuffled\*"'),
        ([IN], "mixed*.npy", {}, r"should end with the \*"),
        ([IN], "snap_mixed*", {}, r"would be found by .*snap\*\.in\.npy too"),
        ([IN], "mixed*", {"files": 55}, r"cannot write 54 rows into 55 files: use --files 54 or fewer"),
        ([IN], "mixed*", {"memory": "much"}, r"cannot read 'much' as an amount of memory"),
        ([IN], "mixed*", {"sample_dims": 4}, r"the first 0 dimensions"),
    ],
)
def test_what_cannot_be_meant_is_said(inputs: Path, patterns: list[str], out: str, options: Any, message: str):
    with pytest.raises(UserError, match=message):
        shuffle_files([inputs / pattern for pattern in patterns], inputs / out, **options)
    assert not contents(inputs)


@pytest.mark.parametrize(
    ("text", "expected"), [("200MB", 200_000_000), ("1.5 GB", 1_500_000_000), ("2k", 2000), (17, 17), ("1tb", 10**12)]
)
def test_memory_is_read_as_people_write_it(text: Any, expected: int):
    assert num_bytes(text) == expected


def hashes(folder: Path, pattern: str) -> list[bytes]:
    rows = []
    for path in sorted(folder.glob(f"{pattern}*.in.npy")):
        features = np.load(path).reshape(-1, 94)
        densities = np.load(path.with_name(path.name.replace(".in.", ".out."))).reshape(-1, 11)
        assert len(features) == len(densities)
        rows += [
            hashlib.sha256(one.tobytes() + other.tobytes()).digest()
            for one, other in zip(features, densities, strict=True)
        ]
    return rows


def test_four_snapshots_of_beryllium_become_five_files_with_every_row_once(shared: Path, tmp_path: Path):
    folder = shared / "data" / "electronic" / "Be2"
    patterns = [folder / "Be_snapshot*.in.npy", folder / "Be_snapshot*.out.npy"]
    original = hashes(folder, "Be_snapshot")
    assert len(set(original)) == len(original) == 34_992
    files = []
    for seed in range(3):
        shuffle_files(patterns, tmp_path / f"seed{seed}_*", 5, seed, memory="1MB")
        assert Counter(hashes(tmp_path, f"seed{seed}_")) == Counter(original)
        files.append([(tmp_path / f"seed{seed}_{number}.in.npy").read_bytes() for number in range(5)])
    assert all(len({one[number] for one in files}) == 3 for number in range(5))
