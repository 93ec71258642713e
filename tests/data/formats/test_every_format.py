"""A format never shows: the same rows, in any order, cut and converted the same way, with the same fingerprint."""

import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest

from isoscale.data import columns
from isoscale.data.formats.opening import open_column
from isoscale.data.sources import ColumnSource
from isoscale.data.tools.describe import describe_column

ARRAY = np.arange(50 * 6, dtype=np.float32).reshape(50, 6) - 7
ORDERS = {
    "all": np.arange(50),
    "neighbours": np.arange(11, 29),
    "almost neighbours": np.array([3, 9, 5, 6]),
    "backwards": np.arange(50)[::-1],
    "repeated": np.array([3, 3, 49, 0, 3]),
    "one": np.array([49]),
    "none": np.array([], np.int64),
    "steps": np.arange(0, 50, 7),
    "random": np.random.default_rng(0).integers(0, 50, 200),
}


@pytest.fixture(params=[None, 5], ids=["one thread", "many threads"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows as one piece, or in pieces of some rows each."""
    if request.param:
        monkeypatch.setattr(columns, "CHUNK_BYTES", request.param * ARRAY[0].nbytes)


@pytest.mark.slow
@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("order", ORDERS)
def test_rows_come_in_the_order_asked(write, order):
    rows = ORDERS[order]
    found = open_column(write(ARRAY)).take(rows)
    np.testing.assert_array_equal(found, ARRAY[rows])
    assert found.dtype == np.float32 and found.flags.writeable and found.flags.c_contiguous


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64", "bool", "float16", "float64", "complex64"])
def test_the_stored_type_is_delivered(write, dtype):
    column = open_column(write((ARRAY % 2).astype(dtype)))
    assert column.dtype == dtype and column.take(np.array([1])).dtype == dtype
    np.testing.assert_array_equal(column.take(np.array([4, 1])), (ARRAY % 2).astype(dtype)[[4, 1]])


def test_numbers_of_the_other_byte_order_become_native(write):
    found = open_column(write(ARRAY.astype(">f4"))).take(np.array([4, 1, 2]))
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, ARRAY[[4, 1, 2]])


@pytest.mark.usefixtures("_pieces")
def test_values_are_picked_and_converted_when_they_are_read(write):
    rows = np.array([7, 0, 7, 30, 31, 2, 9])
    cut = open_column({**write(ARRAY), "columns": "2:5"}).take(rows)
    np.testing.assert_array_equal(cut, ARRAY[rows, 2:5])
    assert cut.flags.c_contiguous


def test_single_values_of_a_row_can_be_picked_in_any_order(write):
    np.testing.assert_array_equal(
        open_column({**write(ARRAY), "columns": [5, 0, -1]}).take(np.array([1, 0])), ARRAY[[1, 0]][:, [5, 0, -1]]
    )


def test_another_type_is_given_when_asked_for(write):
    spec = write(ARRAY)
    if "shape" not in spec:  # of a raw file, the type says how it is stored
        spec["dtype"] = "float64"
        found = open_column(spec).take(np.arange(3))
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, ARRAY[:3])


def test_rows_can_be_a_range(write):
    column = open_column({**write(ARRAY), "rows": "10:40:3"})
    assert column.num_rows == 10
    np.testing.assert_array_equal(column.take(np.array([0, 9, 1])), ARRAY[[10, 37, 13]])


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_the_last_dimensions_are_a_sample(write, dims):
    grid = np.arange(4 * 3 * 5, dtype=np.float32).reshape(4, 3, 5)
    spec = write(grid)
    if "shape" in spec:
        return
    column = open_column({**spec, "sample_dims": dims})
    expected = grid.reshape(-1, *grid.shape[3 - dims :])
    assert (column.num_rows, column.row_shape) == (len(expected), expected.shape[1:])
    rows = np.random.default_rng(0).integers(0, len(expected), 20)
    np.testing.assert_array_equal(column.take(rows), expected[rows])


def test_the_fingerprint_is_that_of_the_rows(write, tmp_path: Path):
    np.save(tmp_path / "reference.npy", ARRAY)
    reference = describe_column(open_column(str(tmp_path / "reference.npy")))
    assert describe_column(open_column(write(ARRAY))) == reference
    changed = ARRAY.copy()
    changed[[3, 4]] = changed[[4, 3]]
    (tmp_path / "changed").mkdir()
    np.save(tmp_path / "changed" / "x.npy", changed)
    assert describe_column(open_column(str(tmp_path / "changed/x.npy")))["fingerprint"] != reference["fingerprint"]


def _child(column, connection) -> None:
    connection.send(column.take(ORDERS["random"]))


@pytest.mark.slow
@pytest.mark.usefixtures("_pieces")
def test_a_forked_process_reads_for_itself(write):
    column = open_column(write(ARRAY))
    column.take(ORDERS["random"])  # the parent has opened it, and started its threads
    context = multiprocessing.get_context("fork")
    mine, other = context.Pipe()
    process = context.Process(target=_child, args=(column, other))
    process.start()
    try:
        assert mine.poll(20)
        np.testing.assert_array_equal(mine.recv(), ARRAY[ORDERS["random"]])
    finally:
        process.kill()
        process.join()


def test_a_column_can_be_sent_to_another_process(write):
    column = open_column(write(ARRAY))
    column.take(np.array([3, 1]))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(column)).take(np.array([5, 1])), ARRAY[[5, 1]])


def test_a_file_that_takes_the_place_of_another_is_read_anew(write):
    spec = write(ARRAY)
    assert open_column(spec).take(np.array([2, 0]))[0, 0] == ARRAY[2, 0]
    path = Path(str(spec["path"]))
    path.rename(path.with_name("old"))
    spec = write(ARRAY + 100)
    assert open_column(spec).take(np.array([2, 0]))[0, 0] == ARRAY[2, 0] + 100


def test_columns_make_a_source(write):
    import torch

    batch = ColumnSource({"input": open_column(write(ARRAY))}).fetch(torch.tensor([4, 2]))
    assert torch.equal(batch["input"], torch.from_numpy(ARRAY[[4, 2]]))
