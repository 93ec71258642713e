"""The stream of samples is cut into batches, and a batch into parts, without a gap and without an overlap."""

from collections import OrderedDict
from itertools import chain, pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isoscale.data.batches import BatchPlan, copy_batch, map_tensors, tensors_of, to_device
from isoscale.data.shards import cut


class WeightedSum(NamedTuple):
    """A batch with names of its own."""

    input: torch.Tensor
    note: str


@st.composite
def plans(draw: st.DrawFn, **fixed: object) -> BatchPlan:
    """Plans of every kind."""
    num_samples = draw(st.integers(1, 300))
    values = {
        "batch_size": draw(st.integers(1, num_samples)),
        "drop_last": draw(st.booleans()),
        "limit": draw(st.none() | st.integers(1, 20)),
        "num_micro": draw(st.integers(1, 4)),
        "num_shards": draw(st.sampled_from([1, 2, 4, 8])),
    }
    return BatchPlan(num_samples, **{**values, **fixed})


def places(plan: BatchPlan, step: int) -> range:
    """The places in the order that a step reads."""
    return range(plan.place(step), plan.place(step) + plan.size(step))


@given(plans(drop_last=False, limit=None), st.integers(0, 5))
def test_the_batches_of_an_epoch_cover_every_sample_exactly_once(plan, epoch):
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    read = list(chain.from_iterable(places(plan, step) for step in steps))
    assert read == list(range(epoch * plan.num_samples, (epoch + 1) * plan.num_samples))


@given(plans(limit=None), st.integers(0, 5))
def test_all_batches_have_the_full_size_but_the_last_of_an_epoch(plan, epoch):
    sizes = [plan.size(epoch * plan.steps_per_epoch + within) for within in range(plan.steps_per_epoch)]
    assert set(sizes[:-1]) <= {plan.batch_size}
    rest = plan.num_samples % plan.batch_size
    assert sizes[-1] == (rest if rest and not plan.drop_last else plan.batch_size)


@given(plans(drop_last=True, limit=None))
def test_drop_last_leaves_out_less_than_a_batch(plan):
    assert 0 <= plan.num_samples - plan.steps_per_epoch * plan.batch_size < plan.batch_size


@given(plans(limit=None), st.integers(1, 400))
def test_a_limit_keeps_the_first_batches_of_every_epoch(plan, limit):
    fields = (plan.num_samples, plan.batch_size, plan.drop_last)
    limited = BatchPlan(*fields, limit=limit)
    assert limited.steps_per_epoch == min(limit, plan.steps_per_epoch)
    for epoch in range(3):
        for within in range(limited.steps_per_epoch):
            step, limited_step = epoch * plan.steps_per_epoch + within, epoch * limited.steps_per_epoch + within
            assert places(limited, limited_step) == places(plan, step)


@given(plans(), st.integers(0, 100))
def test_the_samples_before_a_step_are_those_of_all_earlier_steps(plan, step):
    assert plan.samples_before(step) == sum(plan.size(earlier) for earlier in range(step))


@given(plans(), st.integers(0, 10))
def test_an_epoch_begins_at_its_place_in_the_order(plan, epoch):
    assert plan.place(epoch * plan.steps_per_epoch) == epoch * plan.num_samples


@given(plans(), st.data())
def test_parts_partition_a_batch(plan, data):
    size = data.draw(st.integers(1, plan.batch_size))
    shards = plan.share(size).parts
    assert len(shards) == plan.num_shards
    assert all(len(shard) <= plan.num_micro for shard in shards)
    ranges = [part for shard in shards for part in shard]
    assert sorted(row for start, stop in ranges for row in range(start, stop)) == list(range(size))
    assert all(stop > start for start, stop in ranges)


@given(plans(), st.data())
def test_parts_have_the_same_size_give_or_take_one(plan, data):
    size = data.draw(st.integers(1, plan.batch_size))
    lengths = [stop - start for shard in plan.share(size).parts for start, stop in shard]
    even = size / (plan.num_micro * plan.num_shards)
    assert all(even - 1 < length < even + 1 for length in lengths)


def test_micro_batches_follow_each_other_and_shards_cut_each_of_them():
    assert BatchPlan(12, 12, num_micro=3, num_shards=2).share(12).parts == [
        [(0, 2), (4, 6), (8, 10)],
        [(2, 4), (6, 8), (10, 12)],
    ]


def test_a_batch_of_fewer_samples_than_shards_leaves_shards_empty():
    shards = BatchPlan(3, 3, num_shards=8).share(3).parts
    assert [len(shard) for shard in shards] == [0, 0, 1, 0, 0, 1, 0, 1]


@given(st.integers(0, 1000), st.integers(1, 50))
def test_a_cut_is_contiguous_complete_and_even(size, pieces):
    ranges = cut(size, pieces)
    assert len(ranges) == pieces
    assert ranges[0][0] == 0 and ranges[-1][1] == size
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    assert {stop - start for start, stop in ranges} <= {size // pieces, -(-size // pieces)}


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_batch_larger_than_the_data_is_refused_with_both_numbers(drop_last):
    with pytest.raises(ValueError, match=r"the batch \(11\) is larger than the data \(10 samples\)"):
        BatchPlan(10, 11, drop_last)


def test_mapping_over_tensors_keeps_structures_and_leaves_the_rest():
    ones = torch.ones(2)
    batch = {"a": ones, "b": [ones, (ones, "text", 3)], "c": WeightedSum(ones, "note"), "d": None, "e": {}}
    doubled = map_tensors(batch, lambda tensor: tensor + 1)
    assert type(doubled["b"]) is list and type(doubled["b"][1]) is tuple and type(doubled["c"]) is WeightedSum
    assert doubled["b"][1][1:] == ("text", 3)
    assert doubled["c"].note == "note" and doubled["d"] is None and doubled["e"] == {}
    assert [tensor.tolist() for tensor in tensors_of(doubled)] == [[2, 2]] * 4
    assert ones.tolist() == [1, 1]


def test_mapping_over_a_tensor_by_itself_applies_the_function():
    assert map_tensors(torch.ones(2), torch.sum) == 2


def test_tensors_come_in_the_order_of_the_structure():
    batch = OrderedDict(z=torch.tensor(0), a=(torch.tensor(1), [torch.tensor(2)]), m=torch.tensor(3))
    assert [int(tensor) for tensor in tensors_of(batch)] == [0, 1, 2, 3]


def test_copying_fills_the_tensors_of_the_target():
    target = {"a": torch.zeros(2), "b": (torch.zeros(1),)}
    first = target["a"]
    copy_batch(target, {"a": torch.tensor([1.0, 2.0]), "b": (torch.tensor([3.0]),)})
    assert first.tolist() == [1, 2] and target["b"][0].tolist() == [3]


def test_copying_between_different_structures_is_refused():
    with pytest.raises(ValueError):
        copy_batch({"a": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)})


def test_sending_to_a_device_sends_every_tensor():
    sent = to_device({"a": torch.ones(2), "b": [torch.ones(1)], "name": "x"}, torch.device("meta"))
    assert sent["a"].is_meta and sent["b"][0].is_meta and sent["name"] == "x"
