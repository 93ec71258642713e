"""Many files as one, and what is said about those that do not fit."""

from pathlib import Path

import numpy as np
import pytest

from isoscale.data.formats.opening import open_column


@pytest.fixture
def snapshots(tmp_path: Path) -> Path:
    """Twelve files of one to twelve rows, whose values are their numbers."""
    for number in range(12):
        np.save(tmp_path / f"snapshot{number}.npy", np.full((number + 1, 4), number, np.float32))
    return tmp_path


def test_files_of_a_pattern_follow_each_other_by_number(snapshots: Path):
    column = open_column(str(snapshots / "snapshot*.npy"))
    assert column.num_rows == 78
    numbers = np.repeat(np.arange(12), np.arange(1, 13))
    np.testing.assert_array_equal(column.take(np.arange(78))[:, 0], numbers)
    rows = np.random.default_rng(0).permutation(78)
    np.testing.assert_array_equal(column.take(rows)[:, 0], numbers[rows])


def test_a_folder_and_a_list_are_many_files_too(snapshots: Path):
    (snapshots / "notes.md").write_text("not data")
    assert open_column(str(snapshots)).num_rows == 78
    two = open_column([str(snapshots / "snapshot3.npy"), str(snapshots / "snapshot1.npy")])
    assert two.take(np.array([0, 4])).tolist() == [[3] * 4, [1] * 4], "a list keeps its order"


@pytest.mark.parametrize("odd", [0, 1, 7, 11])
def test_the_one_file_that_is_not_like_the_others_is_named(snapshots: Path, refusal, odd: int):
    np.save(snapshots / f"snapshot{odd}.npy", np.zeros((3, 5), np.float32))
    words = refusal(open_column, {"path": str(snapshots / "*.npy"), "columns": [0, 1]})
    assert words.startswith(f"{snapshots}/snapshot{odd}.npy has rows of (5,) float32, but 11 of the 12 files")


def test_files_of_different_types_need_a_type_to_agree_on(snapshots: Path, refusal):
    np.save(snapshots / "snapshot4.npy", np.zeros((3, 4), np.float64))
    assert "snapshot4.npy has rows of (4,) float64" in refusal(open_column, str(snapshots / "*.npy"))
    assert open_column({"path": str(snapshots / "*.npy"), "dtype": "float64"}).dtype == np.float64


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("snapshto3.npy", "there is no file {0}/snapshto3.npy; in {0} there is snapshot3.npy"),
        ("*.h5", "no file matches {0}/*.h5; in {0} there is snapshot0.npy, snapshot1.npy, snapshot2.npy"),
        ("nowhere/deep/a.npy", "there is no file {0}/nowhere/deep/a.npy; in {0} there is snapshot0.npy"),
    ],
)
def test_what_is_missing_is_answered_with_what_is_there(snapshots: Path, refusal, wanted: str, words: str):
    assert words.format(snapshots) in refusal(open_column, str(snapshots / wanted))


def test_an_empty_folder_is_said(tmp_path: Path, refusal):
    (tmp_path / "empty").mkdir()
    assert "holds no data file" in refusal(open_column, str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": "3:9"}, '"3:9", but there are 4: 0 to 3'),
        ({"columns": "4:"}, '"4:", but there are 4'),
        ({"columns": [0, 4]}, "asks for number 4, but there are 0 to 3"),
        ({"columns": "first"}, 'expected a range such as "3:"'),
        ({"columns": "3"}, 'expected a range such as "3:"'),
        ({"columns": []}, "column.columns: "),
        ({"rows": "0:1000"}, 'column.rows is "0:1000", but there are 78'),
        ({"rows": "::-1"}, "expected a range"),
        ({"dtype": "float31"}, 'column.dtype: there is no type "float31"'),
        ({"dtype": "str"}, "expected numbers"),
        ({"sample_dims": 3}, "of which no sample takes the last 3 dimensions"),
        ({"dataset": "x"}, 'leave dataset: "x" out'),
        ({"sampledims": 1}, "column.sampledims: there is no such option; there is path, dataset, columns"),
        ({"sample_dims": "1"}, "column.sample_dims: "),
    ],
)
def test_an_option_that_does_not_fit_is_explained(snapshots: Path, refusal, options, words: str):
    assert words in refusal(open_column, {"path": str(snapshots / "*.npy"), **options})


def test_columns_of_single_values_have_none_to_pick(tmp_path: Path, refusal):
    np.save(tmp_path / "a.npy", np.arange(3))
    assert "one value per row" in refusal(open_column, {"path": str(tmp_path / "a.npy"), "columns": "0:1"})
