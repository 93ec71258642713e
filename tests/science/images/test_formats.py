import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from isoscale.errors import UserError
from isoscale.science.images.formats import read_cifar, read_idx, read_idx_pair

SIZE, CLASSES = (4, 3), 5


def write_idx(path: Path, values: np.ndarray) -> Path:
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_idx(tmp_path / "images", np.arange(6 * 12).reshape(6, *SIZE))


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    return write_idx(tmp_path / "labels", np.array([0, 4, 3, 2, 1, 0]))


def refusal(function, *arguments) -> str:
    with pytest.raises(UserError) as raised:
        function(*arguments)
    return str(raised.value)


def test_idx_files_give_images_with_a_channel_and_labels(images: Path, labels: Path):
    read = read_idx_pair(images, labels, SIZE, CLASSES)
    assert read.images.dtype == np.uint8 and read.images.shape == (6, 1, 4, 3) and read.labels.dtype == np.int64
    np.testing.assert_array_equal(read.images.ravel(), np.arange(72))
    assert read.labels.tolist() == [0, 4, 3, 2, 1, 0]
    assert read.images.flags.writeable


def test_a_compressed_file_reads_the_same_under_any_name(images: Path, labels: Path):
    plain = read_idx(images, 3)
    images.write_bytes(gzip.compress(images.read_bytes()))
    np.testing.assert_array_equal(read_idx(images, 3), plain)
    assert read_idx(images, 3).flags.writeable


def test_a_truncated_file_says_how_many_bytes_it_has_and_should_have(images: Path):
    images.write_bytes(images.read_bytes()[:-10])
    assert refusal(read_idx, images, 3) == f"{images} is truncated: 78 bytes found, 88 expected"
    images.write_bytes(images.read_bytes()[:10])
    assert "truncated: it ends after 10 bytes, inside its header" in refusal(read_idx, images, 3)
    images.write_bytes(b"")
    assert "it begins with b''" in refusal(read_idx, images, 3)


def test_a_file_that_is_too_long_is_refused(images: Path):
    images.write_bytes(images.read_bytes() + b"more")
    assert "is too long: 92 bytes found, 88 expected" in refusal(read_idx, images, 3)


def test_a_truncated_compressed_file_is_refused(images: Path):
    images.write_bytes(gzip.compress(images.read_bytes())[:-20])
    assert "is truncated or damaged" in refusal(read_idx, images, 3)


def test_a_file_of_another_kind_is_refused_with_its_first_bytes(images: Path, labels: Path):
    assert "labels is not an idx file of bytes in 3 dimensions" in refusal(read_idx, labels, 3)
    images.write_bytes(b"<html>not found</html>")
    assert "it begins with b'<htm'" in refusal(read_idx, images, 3)


def test_a_missing_file_is_named(tmp_path: Path):
    assert refusal(read_idx, tmp_path / "a", 3) == f"cannot read {tmp_path / 'a'}: No such file or directory"


def test_images_and_labels_must_fit_together(images: Path, labels: Path):
    assert "the images are 4×3 pixels large, expected 28×28" in refusal(
        read_idx_pair, images, labels, (28, 28), CLASSES
    )
    assert "label 4 of sample 1 is out of range: 4 classes have labels 0 to 3" in refusal(
        read_idx_pair, images, labels, SIZE, 4
    )
    write_idx(labels, np.array([0, 1]))
    assert "holds 6 images" in refusal(read_idx_pair, images, labels, SIZE, CLASSES)


@pytest.fixture(scope="module")
def records() -> np.ndarray:
    """Records of the binary layout: the label, then 3072 bytes."""
    made = np.random.default_rng(0).integers(0, 256, (10_000, 3073), dtype=np.uint8)
    made[:, 0] %= 10
    return made


def python_2_pickle(labels: list[int], data: np.ndarray) -> bytes:
    """What Python 2 wrote of {"labels": [...], "data": array}, as CIFAR-10 is published."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    shape = b"(" + b"".join(number(length) for length in data.shape) + b"t"
    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t" + text(b"b") + b"tR"
    array += b"(" + number(1) + shape + dtype + b"I00\n" + text(data.tobytes()) + b"tb"
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + text(b"labels") + listed + text(b"data") + array + b"u."


@pytest.mark.slow
def test_both_versions_of_cifar_10_read_the_same(tmp_path: Path, records: np.ndarray):
    binary, pickled = tmp_path / "test_batch.bin", tmp_path / "test_batch"
    binary.write_bytes(records.tobytes())
    pickled.write_bytes(python_2_pickle(records[:, 0].tolist(), records[:, 1:]))
    for path in (binary, pickled):
        read = read_cifar([path], 10)
        assert read.images.shape == (10_000, 3, 32, 32) and read.labels.dtype == np.int64
        np.testing.assert_array_equal(read.images.reshape(10_000, -1), records[:, 1:])
        np.testing.assert_array_equal(read.labels, records[:, 0])


def test_batches_follow_each_other(tmp_path: Path, records: np.ndarray):
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    paths[0].write_bytes(records.tobytes())
    paths[1].write_bytes(records[::-1].tobytes())
    read = read_cifar(paths, 10)
    np.testing.assert_array_equal(read.labels, np.concatenate([records[:, 0], records[::-1, 0]]))
    np.testing.assert_array_equal(read.images[-1].ravel(), records[0, 1:])


def test_a_truncated_batch_says_how_many_bytes_it_has_and_should_have(tmp_path: Path, records: np.ndarray):
    path = tmp_path / "a.bin"
    path.write_bytes(records[:9999].tobytes())
    assert "is truncated: 30,726,927 bytes found, 30,730,000 expected" in refusal(read_cifar, [path], 10)


def test_a_label_out_of_range_is_named(tmp_path: Path, records: np.ndarray):
    path = tmp_path / "a.bin"
    wrong = records.copy()
    wrong[7, 0] = 200
    path.write_bytes(wrong.tobytes())
    assert "label 200 of sample 7 is out of range" in refusal(read_cifar, [path], 10)


class Malicious:
    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self):
        return (Path.touch, (self.touched,))


def test_a_pickle_that_would_run_code_is_refused_and_nothing_runs(tmp_path: Path):
    touched, path = tmp_path / "touched", tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": Malicious(touched), "labels": []}))
    assert "which no array needs, so that nothing of it was run" in refusal(read_cifar, [path], 10)
    assert not touched.exists()
    pickle.loads(path.read_bytes())
    assert touched.exists(), "the file would have done harm"


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "numpy.load", "numpy.core.multiarray.fromfile"])
def test_no_other_name_is_reached(tmp_path: Path, name: str):
    module, _, attribute = name.rpartition(".")
    path = tmp_path / "data_batch_1"
    path.write_bytes(f"c{module}\n{attribute}\n(S'/dev/null'\ntR.".encode())
    assert f"it asks for {name}" in refusal(read_cifar, [path], 10)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot read"),
        (b"not a pickle", "cannot read"),
        (pickle.dumps({"labels": []}), '"data" is missing'),
        (pickle.dumps([1]), "cannot read"),
        (pickle.dumps({"data": 1, "labels": []}), '"data" is int, expected an array of uint8 (10000, 3072)'),
        (python_2_pickle([1, 2], np.zeros((2, 3072), np.uint8)), '"data" is uint8 (2, 3072), expected'),
        (python_2_pickle([1, 2], np.zeros((10_000, 3072), np.uint8)), '"labels" are int64 (2,), expected 10000'),
    ],
)
def test_a_pickle_with_something_else_in_it_says_what(tmp_path: Path, content: bytes, words: str):
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    assert words in refusal(read_cifar, [path], 10)
