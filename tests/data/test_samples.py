"""Samples of a dataset are read fast, and whatever they draw, get the numbers of their own seeds."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from isoscale.data.batches import tensors_of
from isoscale.data.collate import collate
from isoscale.data.generators import GENERATORS, NUMPY, PYTHON, TORCH, kept_generators
from isoscale.data.hashing import derive_key, fold
from isoscale.data.samples import InProcess, Request, SampleReader
from isoscale.data.sources import DatasetSource

SEED, LENGTH = 5, 64


class Made(Dataset):
    """Samples made by a function of their index, which are counted."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make
        self.calls: list[int] = []

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        self.calls.append(index)
        return self.make(index)


class AtOnce(Made):
    """The same, several at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(-len(indices))
        return [self.make(index) for index in indices]


def seeded_each(make: Callable[[int], Any], indices: list[int], epoch: int, collate: Any = default_collate) -> Any:
    """The law in its plainest form: all three generators are seeded before every sample."""
    samples = []
    with kept_generators():
        for index in indices:
            low, high = (int(fold(fold(key, epoch), index)) for key in derive_key(SEED, "sample"))
            random.seed(high << 32 | low)
            np.random.seed(high)
            torch.default_generator.manual_seed(low)
            samples.append(make(index))
        return collate(samples)


def request(indices: list[int], epoch: int = 0) -> Request:
    return Request(torch.tensor(indices), torch.full((len(indices),), epoch))


def assert_same_bits(one: Any, other: Any) -> None:
    left, right = tensors_of(one), tensors_of(other)
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.numpy().tobytes() == b.numpy().tobytes()


def forked(index: int) -> Tensor:
    """Draws, and leaves the generator where it was."""
    with torch.random.fork_rng(devices=[]):
        return torch.rand(2)


def put_back(index: int) -> float:
    state = random.getstate()
    drawn = random.random()
    random.setstate(state)
    return drawn


def put_back_in_numpy(index: int) -> float:
    state = np.random.get_state()
    drawn = np.random.rand()
    np.random.set_state(state)
    return float(drawn)


DRAWS: dict[str, tuple[set[Any], Callable[[int], Any]]] = {
    "nothing": (set(), float),
    "python": ({PYTHON}, lambda index: random.random()),
    "python's normal": ({PYTHON}, lambda index: random.gauss(0, 1)),
    "numpy": ({NUMPY}, lambda index: np.random.rand(3)),
    "numpy's normal": ({NUMPY}, lambda index: np.random.randn()),
    "torch": ({TORCH}, lambda index: torch.rand(3)),
    "torch's normal": ({TORCH}, lambda index: torch.randn(())),
    "all": (set(GENERATORS), lambda index: torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])),
    "a fork": ({TORCH}, forked),
    "a seed that is asked for": ({TORCH}, lambda index: torch.initial_seed()),
    "python's, put back": ({PYTHON}, put_back),
    "numpy's, put back": ({NUMPY}, put_back_in_numpy),
    "seeds of its own": ({NUMPY, TORCH}, lambda index: [torch.manual_seed(index), np.random.seed(index), 1.0][2]),
}  # fmt: skip


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("first", [0, 20, 40], ids=["from the first", "later", "never"])
def test_samples_get_the_numbers_of_their_own_seeds_whenever_they_begin_to_draw(kind: str, first: int) -> None:
    drawn, draw = DRAWS[kind]

    def make(index: int) -> tuple[int, Any]:
        return index, draw(index) if index >= first else draw(index) * 0 if not drawn else torch.zeros(0)

    def ragged(samples: list[Any]) -> tuple[Tensor, ...]:
        return tuple(torch.as_tensor(value).reshape(-1) for sample in samples for value in sample)

    dataset = Made(make)
    reader = SampleReader(DatasetSource(dataset, ragged), SEED)
    batches = [[3, 1, 2], [9, 8, 7], [0, 21, 5, 33], [5, 4], [22, 23]] if first != 40 else [[3, 1], [9, 39], [5, 5]]
    for epoch in range(2):
        for indices in batches:
            assert_same_bits(reader.fetch(request(indices, epoch)), seeded_each(make, indices, epoch, ragged))
    if first == 0:
        assert reader._drawn == drawn
        assert len(dataset.calls) == 2 * sum(map(len, batches)), "no sample is read twice"


def test_a_dataset_that_draws_nothing_is_read_once_in_the_order_asked_and_nothing_is_seeded(monkeypatch) -> None:
    dataset = Made(lambda index: torch.tensor([index]))
    reader = SampleReader(DatasetSource(dataset), SEED)
    reader.fetch(request([0, 1]))

    def refuse(word: int) -> None:
        raise AssertionError("seeded")

    monkeypatch.setattr(random, "seed", refuse)
    monkeypatch.setattr(np.random, "seed", refuse)
    for indices in ([9, 3, 3], [63, 0]):
        assert reader.fetch(request(indices)).flatten().tolist() == indices
    assert dataset.calls == [0, 1, 9, 3, 3, 63, 0]


def test_a_batch_is_read_again_only_when_something_draws_for_the_first_time() -> None:
    dataset = Made(lambda index: torch.rand(()) if index >= 10 else torch.zeros(()))
    reader = SampleReader(DatasetSource(dataset), SEED)
    for indices in ([0, 1], [2, 11, 3], [4, 12]):
        reader.fetch(request(indices))
    assert dataset.calls == [0, 1, 2, 11, 3, 2, 11, 3, 4, 12]


def test_what_a_collate_function_draws_comes_after_the_last_sample() -> None:
    def noisy(samples: list[Any]) -> Tensor:
        return torch.stack(samples) + torch.rand(()) + np.random.rand() + random.random()

    for make in (lambda index: torch.tensor([index]), lambda index: torch.rand(2)):
        reader = SampleReader(DatasetSource(Made(make), noisy), SEED)
        for indices in ([1, 2, 3], [4, 5], [6]):
            assert_same_bits(reader.fetch(request(indices)), seeded_each(make, indices, 0, noisy))


@pytest.mark.parametrize("first", [0, 20])
def test_the_generators_are_where_they_were_also_with_a_normal_number_in_store(first: int) -> None:
    def make(index: int) -> Tensor:
        return torch.tensor(
            [random.gauss(0, 1), np.random.randn(), torch.randn(()).item()] if index >= first else [0.0]
        )

    reader = SampleReader(DatasetSource(Made(make), lambda samples: torch.cat(samples)), SEED)
    with kept_generators():
        for _ in range(3):
            random.gauss(0, 1), np.random.randn()  # one more is made, and kept
        before = random.getstate(), [str(each) for each in np.random.get_state()], torch.get_rng_state().tolist()
        for indices in ([1, 2], [30], [31, 32]):
            assert_same_bits(reader.fetch(request(indices)), seeded_each(make, indices, 0, torch.cat))
            after = random.getstate(), [str(each) for each in np.random.get_state()], torch.get_rng_state().tolist()
            assert after == before


def test_a_number_that_was_in_store_before_is_noticed_when_a_sample_takes_it() -> None:
    reader = SampleReader(DatasetSource(Made(lambda index: np.random.randn() if index > 9 else 0.0)), SEED)
    reader.fetch(request([0]))
    with kept_generators():
        np.random.randn()
        drawn = reader.fetch(request([10]))
    assert_same_bits(drawn, seeded_each(lambda index: np.random.randn(), [10], 0))


def test_an_error_that_follows_from_what_was_drawn_is_that_of_the_seeds_of_the_sample() -> None:
    def make(index: int) -> Tensor:
        if index < 10:
            return torch.zeros(())
        drawn = torch.rand(())
        if drawn < 0.5:
            raise ValueError(f"{drawn}")
        return drawn

    ended = []
    for index in range(10, 30):
        reader = SampleReader(DatasetSource(Made(make)), SEED)
        reader.fetch(request([0]))
        try:
            ended.append(float(reader.fetch(request([index]))))
        except ValueError as error:
            assert error.__notes__ == [f"while reading sample {index} of Made"]
            ended.append(-1.0)
    expected = [float(seeded_each(lambda index: torch.rand(()), [index], 0)) for index in range(10, 30)]
    assert ended == [drawn if drawn >= 0.5 else -1.0 for drawn in expected]


def broken(index: int) -> int:
    if index == 17:
        raise OSError("gone")
    return index


@pytest.mark.parametrize("ask", [None, lambda index: True])
def test_an_error_names_its_sample(ask: Any) -> None:
    reader = SampleReader(DatasetSource(Made(broken)), SEED)
    reader.fetch(request([0, 1]))
    with pytest.raises(OSError, match="gone") as caught:
        reader.fetch(request([1, 2, 17, 3]), ask)
    assert caught.value.__notes__ == ["while reading sample 17 of Made"]


def test_an_error_in_getitems_names_the_samples() -> None:
    reader = SampleReader(DatasetSource(AtOnce(broken)), SEED)
    reader.fetch(request([0, 1]))
    with pytest.raises(OSError, match="gone") as caught:
        reader.fetch(request([*range(10, 20)]))
    assert caught.value.__notes__ == ["while reading samples 10, 11, 12, 13, 14, 15, 16, 17 … of AtOnce"]


def test_samples_are_asked_for_at_once_where_the_dataset_can_also_through_a_subset() -> None:
    dataset = AtOnce(lambda index: torch.tensor([index]))
    reader = SampleReader(DatasetSource(Subset(dataset, [*range(LENGTH - 1, -1, -1)])), SEED)
    assert reader.fetch(request([0, 1])).tolist() == [[63], [62]]
    dataset.calls.clear()
    assert reader.fetch(request([2, 3, 4])).tolist() == [[61], [60], [59]]
    assert dataset.calls == [-3]


class Differs(AtOnce):
    """Its samples are others when several are asked for."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(index) + 1e-6 for index in indices]


@pytest.mark.parametrize("kind", [AtOnce, Differs])
def test_samples_that_draw_or_are_others_at_once_are_read_one_by_one(kind: type[AtOnce]) -> None:
    make = (lambda index: torch.rand(2)) if kind is AtOnce else (lambda index: torch.tensor([float(index)]))
    reader = SampleReader(DatasetSource(kind(make)), SEED)
    for indices in ([0, 1], [2, 3]):
        assert_same_bits(reader.fetch(request(indices)), seeded_each(make, indices, 0))


def test_getitems_that_draws_where_getitem_did_not_is_noticed() -> None:
    make = lambda index: torch.rand(2) if index > 9 else torch.zeros(2)  # noqa: E731
    reader = SampleReader(DatasetSource(AtOnce(make)), SEED)
    for indices in ([0, 1], [2, 3], [4, 10], [11, 12]):
        assert_same_bits(reader.fetch(request(indices)), seeded_each(make, indices, 0))


def test_another_thread_that_draws_meanwhile_changes_no_sample() -> None:
    def make(index: int) -> Tensor:
        thread = threading.Thread(target=random.random)
        thread.start()
        thread.join()
        return torch.rand(2)

    reader = SampleReader(DatasetSource(Made(make)), SEED)
    for indices in ([0, 1], [2, 3]):
        assert_same_bits(reader.fetch(request(indices)), seeded_each(lambda index: torch.rand(2), indices, 0))


def test_functions_that_tell_states_are_those_of_their_modules_afterwards() -> None:
    before = random.getstate, np.random.get_state, torch.get_rng_state, torch.initial_seed, torch.random.get_rng_state
    source = DatasetSource(Made(broken))
    read = InProcess(source).read(iter([request([0]), request([1]), request([17])]))
    next(read), next(read)
    with pytest.raises(OSError, match="gone"):
        next(read)
    assert before == (
        random.getstate, np.random.get_state, torch.get_rng_state, torch.initial_seed, torch.random.get_rng_state,
    )  # fmt: skip


ARRAYS: dict[str, Callable[[int], Any]] = {
    "rows": lambda index: (np.full(5, index, np.float32), np.array([index])),
    "bytes": lambda index: {"x": np.full((2, 3), index, np.uint8), "y": index, "z": float(index), "name": str(index)},
    "flags": lambda index: np.array([index > 2, False]),
    "complex": lambda index: [np.array(index + 1j), np.float16(index)],
    "no dimension": lambda index: np.array(float(index)),
    "columns": lambda index: np.arange(12.0).reshape(3, 4).T[:, index % 3],
    "two kinds": lambda index: np.array([index], np.float32 if index % 2 else np.int64),
    "nothing in it": lambda index: np.zeros((0, 3)),
    "not a number": lambda index: np.array([np.nan, -0.0]),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_are_collated_as_torch_does_it(kind: str) -> None:
    samples = [ARRAYS[kind](index) for index in range(6)]
    ours, theirs = collate(samples), default_collate(samples)
    assert type(ours) is type(theirs)
    assert_same_bits(ours, theirs)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors_of(ours))
    if isinstance(ours, dict):
        assert ours["name"] == theirs["name"] and ours.keys() == theirs.keys()


@pytest.mark.parametrize("samples", [[np.zeros(2), np.zeros(3)], [np.array(["a"])] * 2, [np.zeros(2, ">f4")] * 2])
def test_arrays_that_make_no_batch_are_refused_in_torch_s_words(samples: list[Any]) -> None:
    with pytest.raises(Exception) as theirs:
        default_collate(samples)
    with pytest.raises(type(theirs.value)) as ours:
        collate(samples)
    assert str(ours.value) == str(theirs.value)
