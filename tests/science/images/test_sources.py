import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from isoscale.data.sources import Subset
from isoscale.errors import UserError
from isoscale.science.images import CIFAR10, MNIST, Digits, FashionMNIST

NAMES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]


def rows(source) -> dict[str, torch.Tensor]:
    return source.fetch(torch.arange(len(source)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small data set in MNIST's layout: 40 training and 10 test images, each filled with its own number."""
    made = tmp_path / "data" / "mnist"
    made.mkdir(parents=True)
    for name, numbers in (("train", range(40)), ("t10k", range(100, 110))):
        pixels = np.repeat(np.array(numbers, np.uint8), 784).tobytes()
        images = bytes((0, 0, 8, 3)) + struct.pack(">3I", len(numbers), 28, 28) + pixels
        labels = bytes((0, 0, 8, 1)) + struct.pack(">I", len(numbers)) + bytes(number % 10 for number in numbers)
        (made / f"{name}-images-idx3-ubyte").write_bytes(images)
        (made / f"{name}-labels-idx1-ubyte").write_bytes(labels)
    return made


@pytest.fixture(autouse=True)
def _working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ISOSCALE_DATA", raising=False)


def test_the_training_files_are_cut_into_train_and_val_and_the_test_files_stay(folder: Path):
    data = MNIST(str(folder), val=10)
    train, val, test = (rows(source) for source in (data.train, data.val, data.test))
    assert train["input"].shape == (30, 1, 28, 28) and train["input"].dtype == torch.uint8
    assert train["target"].dtype == torch.int64
    numbers = [int(number) for number in torch.cat([train["input"], val["input"]])[:, 0, 0, 0]]
    assert sorted(numbers) == list(range(40)) and numbers != sorted(numbers)
    assert test["input"][:, 0, 5, 5].tolist() == list(range(100, 110))
    for part in (train, val, test):
        assert torch.equal(part["input"][:, 0, 3, 4].long() % 10, part["target"])


def test_the_split_follows_its_seed(folder: Path):
    splits = [rows(MNIST(str(folder), val=10, split_seed=seed).val)["input"] for seed in (0, 0, 1)]
    assert torch.equal(splits[0], splits[1]) and not torch.equal(splits[0], splits[2])


def test_validation_can_be_left_out_or_be_the_test_files(folder: Path):
    without = MNIST(str(folder), val=0)
    assert without.val is None and len(without.train) == 40
    on_test = MNIST(str(folder), val="test")
    assert on_test.val is on_test.test and len(on_test.val) == 10
    assert rows(on_test.train)["input"][:, 0, 0, 0].tolist() == list(range(40))


@pytest.mark.parametrize("val", [-1, 40, 5000, "tset"])
def test_a_validation_part_that_cannot_be_cut_is_refused(folder: Path, val):
    with pytest.raises(UserError, match="expected a number of images from 0 to 39, or test"):
        MNIST(str(folder), val=val)


def test_files_are_found_in_the_data_folder_compressed_or_not(folder: Path, monkeypatch: pytest.MonkeyPatch):
    images = folder / NAMES[0]
    (folder / f"{NAMES[0]}.gz").write_bytes(gzip.compress(images.read_bytes()))
    images.unlink()
    assert len(MNIST(val=0).train) == 40
    moved = folder.parent.rename(folder.parents[1] / "elsewhere")
    monkeypatch.setenv("ISOSCALE_DATA", str(moved))
    assert len(MNIST(val=0).train) == 40


def test_missing_files_are_named_with_their_folder_and_what_to_type(folder: Path):
    (folder / NAMES[1]).unlink()
    with pytest.raises(UserError) as raised:
        MNIST()
    lines = str(raised.value).splitlines()
    assert lines[0] == "mnist is not in data/mnist: train-labels-idx1-ubyte missing"
    assert "to fetch it, type: isoscale data get mnist" in lines[1]
    assert "login or data-mover node" in lines[2] and "isoscale data get mnist --from DIR" in lines[3]


def test_the_folder_of_cifar_10_may_be_named_with_or_without_its_inner_folder(tmp_path: Path):
    inner = tmp_path / "data" / "cifar10" / "cifar-10-batches-bin"
    inner.mkdir(parents=True)
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        (inner / name).write_bytes(bytes(3073 * 10_000))
    for path in (None, str(inner.parent), str(inner)):
        assert len(CIFAR10(path, val="test").train) == 50_000
    (inner / "data_batch_3.bin").unlink()
    with pytest.raises(UserError, match=r"not in data/cifar10/cifar-10-batches-bin: data_batch_3\.bin missing"):
        CIFAR10()


def test_every_part_knows_the_names_of_its_classes(folder: Path):
    data = MNIST(str(folder), val=10)
    assert isinstance(data.train, Subset)
    for part in (data, data.train, data.val, data.test, Digits().train):
        assert list(part.classes) == list("0123456789")
    assert FashionMNIST.classes[9] == "Ankle boot" and CIFAR10.classes[6] == "frog"


@pytest.mark.parametrize("source", [MNIST, FashionMNIST], ids=["mnist", "fashion-mnist"])
def test_the_real_files_are_read(real_data, source):
    data = source(str(real_data(source.entry.name)))
    assert (len(data.train), len(data.val), len(data.test)) == (55_000, 5_000, 10_000)
    first = source(str(real_data(source.entry.name)), val="test").train.fetch(torch.arange(5))["target"].tolist()
    assert first == {"mnist": [5, 0, 4, 1, 9], "fashion-mnist": [9, 0, 0, 3, 0]}[source.entry.name]


def test_the_real_cifar_10_has_its_well_known_mean(real_data):
    folder = str(real_data("cifar10"))
    train = CIFAR10(folder, val="test").train.tensors
    assert train["target"][:5].tolist() == [6, 9, 9, 4, 1]
    assert torch.bincount(train["target"]).tolist() == [5000] * 10
    means = train["input"].float().mean((0, 2, 3)) / 255
    assert means.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)
