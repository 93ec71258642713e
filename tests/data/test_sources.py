"""Samples by index, from whatever people have; a wrong input is refused in words."""

import math
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate
from torch.utils.data import Subset as TorchSubset

from isoscale.data.sources import (
    Arrays,
    DatasetSource,
    Source,
    Sources,
    Subset,
    TensorSource,
    as_source,
    is_vectorised,
    nbytes,
    split_source,
)
from isoscale.errors import UserError


class Squares(Dataset):
    """Samples (i, i²) one by one."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not isinstance(index, int):
            raise TypeError("a plain integer is expected")
        return torch.tensor([float(index)]), index**2


class AtOnce(Squares):
    """The same samples, many at a time."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [(torch.tensor([float(index)]), index**2) for index in indices]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise AssertionError("asked one by one")


class Own:
    """A source of one's own."""

    def __len__(self) -> int:
        return 5

    def fetch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"input": indices * 10}


class Stream(IterableDataset):
    """Samples without places, although their number is known."""

    def __len__(self) -> int:
        return 3

    def __iter__(self):
        yield from range(3)


def rows(count: int) -> TensorSource:
    """A source whose rows are their own index."""
    return TensorSource({"input": torch.arange(count)})


def splits(sources: Sources) -> dict[str, list[int]]:
    """The indices of each split, for a source whose rows are their own index."""
    found = {"train": sources.train, "val": sources.val, "test": sources.test}
    return {
        name: source.fetch(torch.arange(len(source)))["input"].tolist()
        for name, source in found.items()
        if source is not None
    }


def damage(path: Path, change) -> str:
    """Change the bytes of a file."""
    path.write_bytes(change(bytearray(path.read_bytes())))
    return str(path)


def test_a_tensor_source_gives_rows_in_the_order_asked():
    source = TensorSource({"input": torch.arange(12).view(6, 2), "target": torch.arange(6)})
    batch = source.fetch(torch.tensor([4, 0, 4]))
    assert len(source) == 6
    assert batch["input"].tolist() == [[8, 9], [0, 1], [8, 9]] and batch["target"].tolist() == [4, 0, 4]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int64", "bool", "float16", "float32", "float64"])
def test_the_stored_dtype_is_delivered(dtype):
    batch = TensorSource({"input": np.ones((3, 2), dtype=dtype)}).fetch(torch.tensor([1]))
    assert batch["input"].dtype == getattr(torch, dtype)


def test_arrays_in_the_other_byte_order_and_with_strides_are_read():
    other = ">f4" if sys.byteorder == "little" else "<f4"
    array = np.arange(12, dtype=other).reshape(3, 4)
    assert TensorSource(array[:, ::-2]).fetch(torch.tensor([2])).tolist() == [[11, 9]]


def test_lists_and_tuples_of_tensors_become_tuples():
    batch = TensorSource([torch.arange(3), (np.arange(3), torch.ones(3, 2))]).fetch(torch.tensor([2]))
    assert isinstance(batch, tuple) and isinstance(batch[1], tuple)
    assert batch[0].tolist() == [2] and batch[1][0].tolist() == [2] and batch[1][1].tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": torch.zeros(3), "b": torch.zeros(4)}, r"numbers of rows are \[3, 4\]"),
        ({"a": torch.zeros(3), "b": torch.tensor(1.0)}, r"numbers of rows are \[0, 3\]"),
        ({}, "one row per sample"),
        ({"a": torch.zeros(3), "b": [1, 2, 3]}, "tensors or arrays of numbers.*not int 1"),
        ({"a": np.array(["x", "y"])}, "tensors or arrays of numbers.*not an array of <U1"),
        ({"a": np.array([None, {}])}, "tensors or arrays of numbers.*not an array of object"),
    ],
)
def test_what_is_not_one_row_of_numbers_a_sample_is_refused(data, message):
    with pytest.raises(UserError, match=message):
        TensorSource(data)


def test_a_subset_reads_through_its_indices_also_of_another_subset():
    subset = Subset(rows(100), torch.tensor([50, 20, 70]))
    assert len(subset) == 3
    assert subset.fetch(torch.tensor([2, 0]))["input"].tolist() == [70, 50]
    assert Subset(subset, torch.tensor([1])).fetch(torch.tensor([0]))["input"].tolist() == [20]


@pytest.mark.parametrize("dataset", [Squares(), AtOnce()])
def test_a_dataset_is_fetched_and_collated(dataset):
    source = DatasetSource(dataset)
    inputs, squares = source.fetch(torch.tensor([3, 1]))
    assert len(source) == 10
    assert inputs.tolist() == [[3], [1]] and squares.tolist() == [9, 1]


def test_a_dataset_keeps_its_own_collate_function():
    source = DatasetSource(Squares(), lambda samples: {"sum": torch.tensor(sum(square for _, square in samples))})
    assert source.fetch(torch.tensor([3, 1]))["sum"] == 10


def test_a_source_stays_as_it_is():
    own = Own()
    assert isinstance(own, Source) and as_source(own) is own
    source = rows(3)
    assert as_source(source) is source


@pytest.mark.parametrize(
    ("data", "kind", "length"),
    [
        (torch.zeros(4, 2), TensorSource, 4),
        (np.zeros((4, 2)), TensorSource, 4),
        ({"input": np.zeros(3)}, TensorSource, 3),
        (UserDict(input=torch.zeros(3)), TensorSource, 3),
        ((torch.zeros(3), np.zeros(3)), TensorSource, 3),
        ([torch.zeros(3), torch.zeros(3)], TensorSource, 3),
        (TensorDataset(torch.zeros(5), torch.zeros(5)), TensorSource, 5),
        (Squares(), DatasetSource, 10),
        (TorchSubset(Squares(), [1, 2]), DatasetSource, 2),
        (range(6), DatasetSource, 6),
    ],
)
def test_a_source_is_made_of_what_people_have(data, kind, length):
    source = as_source(data)
    assert type(source) is kind and len(source) == length


@pytest.mark.parametrize("data", [Stream(), 3, "data.npz", object(), None, iter([1])])
def test_what_has_no_samples_is_refused(data):
    with pytest.raises(UserError, match=f"cannot read samples from {type(data).__name__}: give a source"):
        as_source(data)


def test_a_tensor_dataset_with_torchs_collate_is_read_at_once_and_gives_the_same():
    dataset = TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3))
    fast, slow = as_source(dataset, default_collate), DatasetSource(dataset)
    assert type(fast) is TensorSource
    for one, other in zip(fast.fetch(torch.tensor([2, 0])), slow.fetch(torch.tensor([2, 0])), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(torch.arange(3)),
        torch.arange(3).view(3, 1),
        np.arange(3).reshape(3, 1),
        [(torch.tensor(place),) for place in range(3)],
    ],
)
def test_with_a_collate_function_samples_are_collated_by_it(data):
    source = as_source(data, lambda samples: torch.tensor([int(sample[0]) + 100 for sample in samples]))
    assert len(source) == 3
    assert source.fetch(torch.tensor([2, 0])).tolist() == [102, 100]


def test_a_list_of_samples_from_a_loader_is_a_dataset():
    source = as_source([torch.full((2,), float(place)) for place in range(5)], default_collate)
    assert len(source) == 5 and source.fetch(torch.tensor([4, 1])).tolist() == [[4, 4], [1, 1]]


def test_only_sources_without_a_dataset_inside_can_be_kept_whole():
    assert is_vectorised(rows(3)) and is_vectorised(Own()) and is_vectorised(Subset(rows(3), torch.tensor([1])))
    dataset = DatasetSource(Squares())
    assert not is_vectorised(dataset) and not is_vectorised(Subset(Subset(dataset, torch.arange(3)), torch.arange(2)))


def test_the_bytes_of_a_source_are_those_of_its_samples():
    source = TensorSource({"input": torch.zeros(10, 3), "target": torch.zeros(10, dtype=torch.uint8)})
    assert nbytes(source) == 10 * 13
    assert nbytes(Subset(source, torch.arange(4))) == 4 * 13
    assert nbytes(Own()) == 5 * 8


def test_sources_take_anything_for_each_role_and_none_is_not_there():
    sources = Sources(train=torch.zeros(3), val={"a": np.zeros(2)})
    assert len(sources.train) == 3 and len(sources.val) == 2 and sources.test is None and sources.predict is None


def test_a_split_by_fractions_cuts_everything_once():
    found = splits(split_source(rows(10), {"train": 0.8, "val": 0.1, "test": 0.1}))
    assert {split: len(indices) for split, indices in found.items()} == {"train": 8, "val": 1, "test": 1}
    assert sorted(index for indices in found.values() for index in indices) == list(range(10))


def test_a_split_by_numbers_may_leave_samples_out():
    found = splits(split_source(rows(100), {"train": 60, "test": 15}))
    assert {split: len(indices) for split, indices in found.items()} == {"train": 60, "test": 15}
    assert not set(found["train"]) & set(found["test"])


def test_numbers_and_fractions_mix():
    found = splits(split_source(rows(100), {"train": 0.5, "val": 20, "test": 0.25}))
    assert {split: len(indices) for split, indices in found.items()} == {"train": 50, "val": 20, "test": 25}


@pytest.mark.slow
@settings(max_examples=300)
@given(st.integers(1, 5000), st.integers(0, 100), st.integers(0, 100))
def test_fractions_that_sum_to_one_use_every_sample_once_whatever_the_rounding(length, one, other):
    low, high = sorted((one, other))
    parts = {"train": low / 100, "val": (high - low) / 100, "test": (100 - high) / 100}
    assume(all(part == 0 or part * length >= 1 for part in parts.values()))
    found = splits(split_source(rows(length), parts))
    assert sorted(index for indices in found.values() for index in indices) == list(range(length))
    for split, part in parts.items():
        assert math.floor(part * length - 1e-6) <= len(found.get(split, [])) <= math.ceil(part * length + 1e-6)


def test_a_fraction_that_rounds_at_a_half_is_not_refused():
    assert len(split_source(rows(2358), {"train": 0.25, "val": 0.1, "test": 0.65}).test) == 1533


def test_a_split_is_the_same_every_time_and_another_for_another_seed():
    parts = {"train": 0.5, "val": 0.5}
    assert splits(split_source(rows(50), parts)) == splits(split_source(rows(50), parts))
    assert splits(split_source(rows(50), parts)) != splits(split_source(rows(50), parts, seed=1))


def test_the_values_of_a_split_never_change():
    assert splits(split_source(rows(1797), {"train": 3, "val": 2})) == {"train": [151, 1146, 196], "val": [1317, 718]}


def test_a_role_without_samples_is_not_there():
    sources = split_source(rows(10), {"train": 1.0, "val": 0, "test": 0.0})
    assert len(sources.train) == 10 and sources.val is None and sources.test is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": 0.8, "valid": 0.2}, r"unknown parts \['valid'\]: use train, val, test"),
        ({"train": 0.8, "val": 0.5}, "asks for 13 samples .*but there are 10"),
        ({"train": 8, "val": 3}, "asks for 11 samples .*but there are 10"),
        ({"train": 8, "val": 0.5}, "asks for 13 samples .*but there are 10"),
        ({"train": -1}, "split.train is -1; expected a fraction such as 0.8"),
        ({"train": 0.5, "val": -0.1}, "split.val is -0.1; expected a fraction such as 0.8"),
    ],
)
def test_a_split_that_cannot_be_is_refused(parts, message):
    with pytest.raises(UserError, match=message):
        split_source(rows(10), parts)


def test_arrays_of_a_file_are_split_and_predicted_whole(tmp_path):
    np.savez(tmp_path / "data.npz", input=np.arange(20, dtype=np.uint8), target=np.arange(20, dtype=np.float64))
    arrays = Arrays(str(tmp_path / "data.npz"))
    assert (len(arrays.train), len(arrays.val), len(arrays.test), len(arrays.predict)) == (16, 2, 2, 20)
    batch = arrays.train.fetch(torch.arange(16))
    assert batch["input"].dtype == torch.uint8 and batch["target"].dtype == torch.float64
    assert torch.equal(batch["input"].double(), batch["target"])


def test_arrays_follow_their_split_and_its_seed(tmp_path):
    np.savez(tmp_path / "data.npz", input=np.arange(20))
    path = str(tmp_path / "data.npz")
    halves = Arrays(path, {"train": 0.5, "val": 0.5})
    assert len(halves.train) == len(halves.val) == 10 and halves.test is None
    assert splits(halves) == splits(Arrays(path, {"train": 0.5, "val": 0.5}))
    assert splits(halves) != splits(Arrays(path, {"train": 0.5, "val": 0.5}, split_seed=1))


def test_a_file_that_is_missing_is_named_with_what_to_set(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*none.npz: set data.path"):
        Arrays(str(tmp_path / "none.npz"))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: b"not an archive",
        lambda content: content.replace(b"\x07" * 8, b"\x08" * 8, 1),
    ],
    ids=["cut in half", "cut by a byte", "empty", "text", "changed byte"],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, change):
    np.savez(tmp_path / "data.npz", input=np.full(1000, 7, dtype=np.uint8))
    with pytest.raises(UserError, match=r"cannot read .*data.npz as an .npz file"):
        Arrays(damage(tmp_path / "data.npz", change))


def test_a_damaged_compressed_file_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "data.npz", input=np.random.default_rng(0).normal(size=1000))
    middle = slice(2000, 2100)
    path = damage(tmp_path / "data.npz", lambda content: content[: middle.start] + bytes(100) + content[middle.stop :])
    with pytest.raises(UserError, match="cannot read"):
        Arrays(path)


def test_a_pickled_array_is_refused_and_never_loaded(tmp_path):
    np.savez(tmp_path / "data.npz", input=np.array([1, {}], dtype=object))
    with pytest.raises(UserError, match=r"cannot read .* plain arrays"):
        Arrays(str(tmp_path / "data.npz"))


def test_a_single_array_without_a_name_is_refused_with_what_to_type(tmp_path):
    np.save(tmp_path / "data.npy", np.arange(10))
    with pytest.raises(UserError, match=r"np\.savez"):
        Arrays(str(tmp_path / "data.npy"))


def test_a_file_with_words_is_refused(tmp_path):
    np.savez(tmp_path / "data.npz", input=np.arange(2), name=np.array(["a", "b"]))
    with pytest.raises(UserError, match="arrays of numbers"):
        Arrays(str(tmp_path / "data.npz"))


def test_a_part_of_a_split_that_would_have_no_sample_is_refused():
    with pytest.raises(UserError, match=r"split\.val is 0\.001, which is less than one sample of 10"):
        split_source(TensorSource({"x": torch.arange(10)}), {"train": 0.9, "val": 0.001})
    assert split_source(TensorSource({"x": torch.arange(10)}), {"train": 0.9, "val": 0}).val is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (torch.eye(3).to_sparse(), "is sparse"),
        (torch.empty(3, 2, device="meta"), "has no values"),
        (np.ma.array([[1.0], [2.0]], mask=[[0], [1]]), "1 values of an array are masked"),
    ],
)
def test_rows_that_are_not_all_there_are_refused(data: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        as_source({"input": data})


def test_an_array_without_masked_values_is_an_array() -> None:
    assert len(as_source(np.ma.array([[1.0], [2.0]]))) == 2
