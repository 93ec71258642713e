"""Which ragged samples share a batch, and in which shapes: every sample once, evenly, with little padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoscale.data.batches import BatchPlan
from isoscale.data.order import Order
from isoscale.data.packing import MOST_SHAPES, PackedOrder, PackedPlan, Packing, Shapes, all_parts, deal
from isoscale.data.ragged import Level, RaggedSource, work_of


def sized(atoms: np.ndarray, edges: np.ndarray) -> RaggedSource:
    """Samples of given sizes, of which nothing else is known."""
    return RaggedSource(
        {}, {"atoms": Level(atoms, {}), "edges": Level(edges, {})}, numbers={}, members={"atoms": "batch"}
    )


def crystals(count: int, seed: int = 0) -> RaggedSource:
    """Sizes spread as those of crystals are: most are small, a few are very large."""
    random = np.random.default_rng(seed)
    atoms = np.clip(random.lognormal(3.1, 0.8, count), 1, 200).astype(np.int64)
    return sized(atoms, (atoms * random.uniform(15, 60, count)).astype(np.int64))


def packed(source: RaggedSource, plan: BatchPlan, seed: int = 3) -> tuple[PackedOrder, Packing]:
    order = PackedOrder(Order(len(source), seed), work_of(source), plan, seed)
    return order, Packing(order, source, plan)


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 5), st.sampled_from([1, 3, 8]), st.integers(1, 3))
def test_an_epoch_sees_every_sample_once_and_every_part_fits(
    count: int, size: int, epoch: int, num_shards: int, num_micro: int
) -> None:
    source = crystals(count)
    plan = BatchPlan(count, min(size, count), num_shards=num_shards, num_micro=num_micro)
    order, packing = packed(source, plan)
    samples = order.indices(epoch * count, count).numpy()
    assert sorted(samples) == list(range(count))
    for within in range(plan.steps_per_epoch):
        step = epoch * plan.steps_per_epoch + within
        batch = samples[within * plan.batch_size :][: plan.size(step)]
        parts, shape = all_parts(plan, len(batch)), packing.shape(step)
        assert len(parts) == len(shape) and sum(stop - start for _, start, stop in parts) == len(batch)
        for (_, start, stop), room in zip(parts, shape, strict=True):
            assert (source.sizes[batch[start:stop]].sum(0) <= room).all()


def test_any_place_is_the_same_however_it_is_asked_for() -> None:
    source, plan = crystals(100), BatchPlan(100, 8)
    order, _ = packed(source, plan)
    whole = order.indices(0, 700)
    other, _ = packed(source, plan)
    for start, count in ((650, 50), (0, 8), (95, 12), (301, 99)):
        assert torch.equal(other.indices(start, count), whole[start : start + count])
    assert not torch.equal(whole[:100], whole[100:200]), "every epoch is another"
    assert not torch.equal(packed(source, plan, seed=4)[0].indices(0, 100), whole[:100])


@pytest.mark.parametrize(("size", "num_shards", "most"), [(8, 1, 0.05), (8, 8, 0.3), (32, 1, 0.05), (32, 8, 0.15)])
def test_there_are_few_shapes_and_little_padding(size: int, num_shards: int, most: float) -> None:
    source, plan = crystals(1000), BatchPlan(1000, size, num_shards=num_shards)
    _, packing = packed(source, plan)
    shares, counts = zip(*(packing.padding(epoch) for epoch in range(10)), strict=True)
    assert max(shares) < most
    assert max(counts) <= MOST_SHAPES
    assert len({packing.shape(step) for step in range(30 * plan.steps_per_epoch)}) <= MOST_SHAPES
    in_order = Packing(Order(1000, 3), source, plan)
    assert in_order.padding()[0] > 1.5 * shares[0], "dealing out is what makes the padding small"


@pytest.mark.parametrize(("size", "most"), [(8, 0.1), (32, 0.05), (128, 0.02)])
def test_two_ranks_have_as_much_to_do(size: int, most: float) -> None:
    source = crystals(1024)
    order, _ = packed(source, BatchPlan(1024, size))
    halves = work_of(source)[order.indices(0, 1024).numpy()].reshape(-1, 2, size // 2).sum(-1)
    assert (halves.max(1).sum() / halves.mean(1).sum() - 1) < most


def test_one_that_is_too_large_for_any_shape_gets_its_own() -> None:
    shapes = Shapes(np.full((10, 1, 2), (20, 100)))
    assert shapes.shape(np.asarray([[20, 100]])) == ((32, 112),)
    assert shapes.shape(np.asarray([[20, 108]])) == ((32, 112),), "what is a little larger has a shape, too"
    own = shapes.shape(np.asarray([[20, 5000]]))
    assert own[0][1] >= 5000 and own[0][0] >= 20
    source = sized(np.asarray([5] * 63 + [900]), np.asarray([50] * 63 + [40_000]))
    _, packing = packed(source, BatchPlan(64, 4))
    assert sum(shape[0][1] >= 40_000 for shape in map(packing.shape, range(16))) == 1


def test_dealing_gives_equal_numbers_and_nearly_equal_work() -> None:
    random = np.random.default_rng(0)
    work = random.lognormal(0, 1, 600)
    hands = deal(np.arange(600)[None], work, 10)[0]
    assert sorted(hands.reshape(-1)) == list(range(600))
    loads = work[hands].sum(1)
    assert loads.max() / loads.mean() < 1.01


def test_steps_of_a_kind_end_where_the_shape_changes() -> None:
    source, plan = crystals(101), BatchPlan(101, 8)
    _, packing = packed(source, plan)
    packed_plan = PackedPlan(packing)
    step = 0
    while step < 3 * plan.steps_per_epoch:
        end = packed_plan.end_of_kind(step)
        assert len({packed_plan.kind(each) for each in range(step, end)}) == 1
        assert end % plan.steps_per_epoch == 0 or packed_plan.kind(end) != packed_plan.kind(step)
        step = end
    short = packed_plan.limited(3)
    assert short.steps_per_epoch == 3 and short.kind(4) == packed_plan.kind(plan.steps_per_epoch + 1)
