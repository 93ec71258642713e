"""`isoscale data shuffle` on the command line: what is printed, and exit codes."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests import warm
from tests.helpers import command


@pytest.fixture
def snapshots(tmp_path: Path) -> Path:
    for number in range(4):
        rows = np.arange(300 * number, 300 * (number + 1), dtype=np.float32)
        np.save(tmp_path / f"Be_snapshot{number}.in.npy", np.stack([rows] * 3, axis=1).reshape(10, 30, 3))
        np.save(tmp_path / f"Be_snapshot{number}.out.npy", rows.reshape(10, 30, 1))
    return tmp_path


WORDS = ("data", "shuffle", "Be_snapshot*.in.npy", "Be_snapshot*.out.npy", "--out", "Be_shuffled*")


def numbers(folder: Path) -> list[float]:
    count = len(list(folder.glob("Be_shuffled*.in.npy")))
    columns = [
        np.concatenate([np.load(folder / f"Be_shuffled{number}.{name}.npy")[:, 0] for number in range(count)])
        for name in ("in", "out")
    ]
    assert np.array_equal(*columns)
    return columns[0].tolist()


def test_snapshots_are_shuffled_into_any_number_of_files(isoscale, snapshots: Path):
    result = isoscale(*WORDS, "--files", "7", "--seed", "3", "--memory", "10kB")
    assert (result.code, result.err) == (0, "")
    assert result.out == "14 shuffled files: Be_shuffled0.in.npy to Be_shuffled6.out.npy\n"
    assert sorted(numbers(snapshots)) == list(range(1200))


def test_seeds_give_other_orders_and_the_same_seed_the_same(isoscale, snapshots: Path):
    found = []
    for seed in ("1", "2", "1"):
        assert isoscale(*WORDS, "--seed", seed).code == 0
        found.append(numbers(snapshots))
    assert found[0] == found[2] != found[1]


def test_a_pattern_that_the_shell_has_replaced_is_explained(isoscale, snapshots: Path):
    files = [f"Be_snapshot{number}.in.npy" for number in range(4)]
    result = isoscale("data", "shuffle", *files, "--out", "Be_shuffled*")
    assert result.code == 2
    assert "error: Be_snapshot0.in.npy should have one *" in result.err and "in quotes" in result.err
    assert "Traceback" not in result.err


def test_somebody_elses_file_is_not_overwritten(isoscale, snapshots: Path):
    (snapshots / "Be_shuffled2.in.npy").write_text("precious")
    result = isoscale(*WORDS)
    assert result.code == 2
    assert "error: Be_shuffled2.in.npy is there already" in result.err
    assert (snapshots / "Be_shuffled2.in.npy").read_text() == "precious"


def test_without_out_the_command_says_what_is_missing(isoscale, snapshots: Path):
    result = isoscale("data", "shuffle", "Be_snapshot*.in.npy")
    assert result.code == 2 and "--out" in result.err


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_an_error_for_people_and_the_next_start_goes_on(snapshots: Path):
    words = command(*WORDS, "--files", "1", "--memory", "10kB")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    limited = warm.run(
        ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *words],  # 8 kB a file
        cwd=snapshots, capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert limited.returncode == 2
    assert "cannot write into .: File too large; " in limited.stderr
    assert "of 1,200 rows are written and kept" in limited.stderr and "Traceback" not in limited.stderr
    assert not list(snapshots.glob("Be_shuffled*"))
    done = warm.run(words, cwd=snapshots, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(numbers(snapshots)) == list(range(1200))
