"""Sums over shards have the bits of one fixed tree, whoever computed which shard."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isoscale.data.batches import BatchPlan
from isoscale.parallel.reduction import DEFAULT_SHARDS, FlatReducer, TreeReducer, make_reducer, tree_shards

POWERS = st.sampled_from([1, 2, 4, 8, 16, 32])

Leaves = dict[int, list[Tensor]]


def leaves_of(shards: list[int], seed: int = 0) -> Leaves:
    """Sums of some shards, of very different size, so that every order of adding has bits of its own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        shard: [torch.randn(shape, generator=generator) * 10 ** (shard % 7) for shape in ((200,), (3, 2), ())]
        for shard in shards
    }


def added(left: list[Tensor] | None, right: list[Tensor] | None) -> list[Tensor] | None:
    """Two nodes of the tree; one that is not there adds nothing."""
    if left is None or right is None:
        return left if right is None else right
    return [one + other for one, other in zip(left, right, strict=True)]


def by_hand(leaves: Leaves, start: int, stop: int) -> list[Tensor] | None:
    """The sum of the shards from start to stop: that of the left half plus that of the right half."""
    if stop - start == 1:
        return leaves.get(start)
    middle = (start + stop) // 2
    return added(by_hand(leaves, start, middle), by_hand(leaves, middle, stop))


def reduced(reducer: TreeReducer, leaves: Leaves) -> list[Tensor]:
    """What a reducer makes of the shards; it may keep and change what it is given."""
    for shard, tensors in leaves.items():
        reducer.add(shard, [tensor.clone() for tensor in tensors])
    return reducer.total()


def same(one: list[Tensor], other: list[Tensor] | None) -> bool:
    """Equal to the bit."""
    assert other is not None
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@given(POWERS, st.integers(0, 1000))
def test_the_sum_is_that_of_the_pairwise_tree_to_the_bit(num_shards, seed):
    leaves = leaves_of(list(range(num_shards)), seed)
    assert same(reduced(TreeReducer(num_shards), leaves), by_hand(leaves, 0, num_shards))


def test_the_sum_from_left_to_right_has_other_bits():
    leaves = leaves_of(list(range(8)))
    running = leaves[0]
    for shard in range(1, 8):
        running = added(running, leaves[shard])
    assert not same(reduced(TreeReducer(8), leaves), running)


@given(POWERS, st.data())
def test_shards_that_are_empty_leave_the_places_of_the_others_in_the_tree(num_shards, data):
    present = sorted(data.draw(st.sets(st.integers(0, num_shards - 1), min_size=1)))
    leaves = leaves_of(present)
    assert same(reduced(TreeReducer(num_shards), leaves), by_hand(leaves, 0, num_shards))


@pytest.mark.parametrize("size", range(1, 20))
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_that_each_add_their_own_shards_get_the_bits_of_one_rank(size, num_ranks):
    plan = BatchPlan(size, size, num_shards=8)
    leaves = leaves_of([shard for shard, parts in enumerate(plan.share(size).parts) if parts])
    per_rank = 8 // num_ranks
    of_rank: Leaves = {}
    for rank in range(num_ranks):
        owned = {shard: leaves[shard] for shard in range(rank * per_rank, (rank + 1) * per_rank) if shard in leaves}
        if owned:
            of_rank[rank] = reduced(TreeReducer(8), owned)
    assert same(reduced(TreeReducer(num_ranks), of_rank), reduced(TreeReducer(8), leaves))


def test_a_reducer_can_be_used_again_after_its_total():
    reducer = TreeReducer(4)
    first, partial, last = leaves_of([0, 1, 2, 3], 1), leaves_of([1, 3], 2), leaves_of([0, 1, 2, 3], 3)
    for leaves in (first, partial, last):
        assert same(reduced(reducer, leaves), by_hand(leaves, 0, 4))


def test_a_tree_of_one_shard_gives_its_sums():
    leaves = leaves_of([0])
    assert same(reduced(TreeReducer(1), leaves), leaves[0])


def test_a_tree_holds_few_sums_at_a_time():
    reducer = TreeReducer(64)
    held = []
    for shard in range(64):
        reducer.add(shard, [torch.ones(1)])
        held.append(len(reducer._waiting))
    assert max(held) <= 7
    assert reducer.total()[0] == 64


def test_tensors_of_every_dtype_keep_it():
    reducer = TreeReducer(2)
    dtypes = [torch.float64, torch.float32, torch.int64, torch.bfloat16]
    for shard in range(2):
        reducer.add(shard, [torch.ones(2, dtype=dtype) for dtype in dtypes])
    total = reducer.total()
    assert [tensor.dtype for tensor in total] == dtypes
    assert all(tensor.tolist() == [2, 2] for tensor in total)


@pytest.mark.parametrize(("num_shards", "lower", "upper"), [(3, 2, 4), (6, 4, 8), (7, 4, 8), (100, 64, 128), (0, 1, 2)])
def test_a_number_of_shards_that_is_no_power_of_two_is_refused_with_the_nearest(num_shards, lower, upper):
    with pytest.raises(ValueError, match=f"power of two, not {num_shards}: use {lower} or {upper}"):
        TreeReducer(num_shards)


def test_one_rank_owns_every_shard():
    assert TreeReducer(16).owned == range(16)
    assert list(FlatReducer().owned) == [0] and FlatReducer().num_shards == 1


def test_the_flat_reducer_of_one_rank_gives_back_its_sums_and_is_ready_again():
    reducer = FlatReducer()
    for seed in range(2):
        tensors = leaves_of([0], seed)[0]
        reducer.add(0, tensors)
        assert all(one is other for one, other in zip(reducer.total(), tensors, strict=True))
    assert reducer.total() == []


@pytest.mark.parametrize("reduce", ["auto", "flat"])
def test_auto_is_flat(reduce):
    assert isinstance(make_reducer(reduce, tree_shards(reduce, "auto")), FlatReducer)


@pytest.mark.parametrize(("shards", "expected"), [("auto", DEFAULT_SHARDS), (4, 4), (1, 1)])
def test_a_tree_has_the_shards_of_the_recipe(shards, expected):
    reducer = make_reducer("tree", tree_shards("tree", shards))
    assert isinstance(reducer, TreeReducer) and reducer.num_shards == expected


def test_auto_is_eight_shards_whatever_runs_it():
    assert DEFAULT_SHARDS == 8
