import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from isoscale.data.formats.opening import open_column


def header(path: Path, shape: tuple[int, ...], dtype: str = "<f4", fortran: bool = False) -> Path:
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": fortran, "shape": shape})
    return path


def test_a_truncated_file_says_how_many_bytes_it_has_and_should_have(tmp_path: Path, refusal):
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((10, 4), np.float32))
    path.write_bytes(path.read_bytes()[:-6])
    assert refusal(open_column, str(path)) == f"{path} is truncated: 282 bytes found, 288 expected"
    path.write_bytes(path.read_bytes() + b"0" * 100)
    assert "is too long: 382 bytes found, 288 expected" in refusal(open_column, str(path))
    path.write_bytes(path.read_bytes()[:30])
    assert "is not a complete .npy file" in refusal(open_column, str(path))
    path.write_bytes(b"")
    assert "is not a complete .npy file" in refusal(open_column, str(path))


def test_an_array_stored_by_columns_says_how_to_store_it_by_rows(tmp_path: Path, refusal):
    path = tmp_path / "a.npy"
    np.save(path, np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    words = refusal(open_column, str(path))
    assert "Fortran order" in words
    exec("import numpy; " + words.partition("save it again: ")[2])
    assert open_column(str(path)).take(np.array([1])).tolist() == [[3, 4, 5]]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([{}, 1], object), "holds Python objects (object), expected numbers"),
        (np.array(["a"]), "holds text or dates (<U1)"),
        (np.zeros(2, [("x", "f4")]), "holds records"),
        (np.float32(1), "is one value, not an array of rows"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(tmp_path: Path, refusal, array, words):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    assert words in refusal(open_column, str(tmp_path / "a.npy"))


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**62, 2), (-1, 3)])
def test_a_size_that_nothing_can_have_is_refused(tmp_path: Path, refusal, shape):
    path = header(tmp_path / "a.npy", shape)
    assert "which no file can hold; it is damaged" in refusal(open_column, str(path))


def test_a_file_larger_than_memory_is_read_by_rows(tmp_path: Path):
    rows, width = 1_000_000_000, 25
    path = header(tmp_path / "a.npy", (rows, width))
    with path.open("r+b") as file:
        offset = file.seek(0, 2)
        file.truncate(offset + rows * width * 4)  # 100 GB, of which nothing is stored
        file.seek(offset + 7_777_777 * width * 4)
        file.write(np.full(width, 3, np.float32).tobytes())
    asked = np.random.default_rng(0).integers(0, rows, 5000)
    asked[1234] = 7_777_777
    found = open_column(str(path)).take(asked)
    assert found[1234].tolist() == [3] * width and found.sum() == 3 * width


@pytest.mark.slow
def test_more_files_than_may_be_open_at_a_time_are_read(tmp_path: Path):
    for number in range(400):
        np.save(tmp_path / f"part{number}.npy", np.full((3, 2), number))
    code = (
        "import resource, numpy as np; resource.setrlimit(resource.RLIMIT_NOFILE, (350, 350))\n"
        "from isoscale.data.formats.opening import open_column\n"
        f"column = open_column({str(tmp_path / '*.npy')!r})\n"
        "rows = np.random.default_rng(0).integers(0, 1200, 5000)\n"
        "assert (column.take(rows)[:, 0] == rows // 3).all()"
    )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limit > 350, "the test says nothing here"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_row_that_is_not_there_is_no_row(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.zeros((5, 2)))
    with pytest.raises(IndexError, match="rows 0 to 4, asked for 2 to 5"):
        open_column(str(tmp_path / "a.npy")).take(np.array([5, 2]))
