"""A window shuffle is an order like any other, that stays within a few blocks of the source at a time."""

import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isoscale.data.order import OUT_OF_PASSES
from isoscale.data.window_order import WindowOrder
from isoscale.errors import UserError
from tests.helpers import first_of, sha, train

pytestmark = pytest.mark.slow

SEEDS = st.integers(-(2**63), 2**64)

# (number of samples, seed, samples of a block, blocks of a window, place, the indices from there on). For ever.
PINNED = [
    (10, 0, 3, 2, 0, [2, 6, 0, 1, 8, 7, 3, 5, 9, 4]),
    (10, 0, 3, 2, 10, [2, 9, 0, 1, 3, 5, 7, 6, 4, 8]),
    (34992, 0, 1000, 8, 34990, [3558, 16171, 24690, 13638]),
    (10**12 + 7, 9, 1000, 64, 5 * 10**11, [522412912149, 270157188803, 746408414386]),
]


def on_device(order: WindowOrder, start: int, count: int) -> list[int]:
    """What a device computes, computed here."""
    return order.at(torch.arange(start, start + count)).tolist()


@st.composite
def orders(draw: st.DrawFn, most: int = 400) -> WindowOrder:
    """Orders of every kind; blocks and windows may be larger than the data."""
    num_samples = draw(st.integers(1, most))
    return WindowOrder(num_samples, draw(SEEDS), draw(st.integers(1, most + 9)), draw(st.integers(1, 40)))


@pytest.mark.parametrize(("num_samples", "seed", "block", "window", "place", "expected"), PINNED)
def test_the_values_never_change(num_samples, seed, block, window, place, expected):
    order = WindowOrder(num_samples, seed, block, window)
    assert order.indices(place, len(expected)).tolist() == expected
    assert on_device(order, place, len(expected)) == expected


@settings(max_examples=300)
@given(order=orders(), epoch=st.integers(0, 10**6))
def test_every_epoch_visits_every_sample_exactly_once(order, epoch):
    visited = order.indices(epoch * order.num_samples, order.num_samples)
    assert visited.dtype == torch.int64
    assert torch.equal(visited.sort().values, torch.arange(order.num_samples))


@pytest.mark.parametrize("num_samples", first_of(range(1, 40), 1, 2, 3, 5, 8, 13, 24, 39))
def test_all_small_cases_are_permutations_on_host_and_device(num_samples):
    for block in (1, 2, 3, 5, 8, 50):
        for window in (1, 2, 3, 50):
            order = WindowOrder(num_samples, num_samples, block, window)
            epochs = order.indices(0, 3 * num_samples)
            assert torch.equal(epochs.view(3, -1).sort(1).values, torch.arange(num_samples).expand(3, -1))
            assert on_device(order, 0, 3 * num_samples) == epochs.tolist()


@settings(max_examples=60)
@given(
    num_samples=st.integers(1, 10**12),
    block=st.integers(1, 10**5),
    window=st.integers(1, 1000),
    seed=SEEDS,
    share=st.floats(0, 3),
)
def test_a_large_epoch_repeats_no_sample_and_is_the_same_on_the_device(num_samples, block, window, seed, share):
    order = WindowOrder(num_samples, seed, block, window)
    epoch, position = divmod(int(share * num_samples), num_samples)
    count = min(2000, num_samples - position)
    start = epoch * num_samples + position
    values = order.indices(start, count)
    assert values.unique().numel() == count
    assert values.min() >= 0 and values.max() < num_samples
    assert on_device(order, start, count) == values.tolist()


@given(order=orders(), data=st.data())
def test_any_stretch_equals_the_same_slice_of_a_longer_one(order, data):
    length = data.draw(st.integers(0, 3 * order.num_samples))
    offset = data.draw(st.integers(0, length))
    assert torch.equal(order.indices(7 + offset, length - offset), order.indices(7, length)[offset:])


@pytest.mark.parametrize("num_samples", [10_000, 10_037])
def test_a_window_reads_few_blocks_and_each_as_a_whole(num_samples):
    order = WindowOrder(num_samples, 3, samples_per_block=100, blocks_per_window=7)
    blocks = (order.indices(0, num_samples) // 100).tolist()
    runs, position = [], 0
    while position < num_samples:
        window = Counter(blocks[position : position + 700])
        whole = {block for block, count in window.items() if count == min(100, num_samples - 100 * block)}
        size = sum(window[block] for block in whole)
        assert whole, "a window holds no block as a whole"
        assert len(window) - len(whole) <= 7 and len(whole) <= 7
        runs.append(whole)
        position += size
    assert len(runs) == -(-len(set(blocks)) // 7)
    assert sum(map(len, runs)) == len(set().union(*runs)) == -(-num_samples // 100)


def test_the_samples_of_a_window_are_mixed_completely():
    order = WindowOrder(10_000, 0, samples_per_block=100, blocks_per_window=20)
    window = (order.indices(0, 2000) // 100).view(4, 500)
    counts = torch.stack([torch.bincount(quarter, minlength=100) for quarter in window])
    assert (counts > 0).sum().item() == 4 * 20
    assert counts.max() < 25 + 5 * 5


def test_every_window_of_an_epoch_is_mixed_in_another_way():
    windows = (WindowOrder(8000, 0, samples_per_block=100, blocks_per_window=20).indices(0, 8000) % 100).view(4, 2000)
    for left in range(4):
        for right in range(left):
            assert (windows[left] == windows[right]).sum() < 60  # one in a hundred agrees by chance


def test_the_shorter_block_comes_anywhere_in_an_epoch():
    order = WindowOrder(45, 1, samples_per_block=10, blocks_per_window=1)
    epochs = order.indices(0, 45 * 2000).view(2000, 45)
    first = (epochs == 44).nonzero()[:, 1] // 10
    assert all(320 < count < 480 for count in torch.bincount(first, minlength=5).tolist())


def test_blocks_and_neighbours_change_from_epoch_to_epoch_and_with_the_seed():
    one = WindowOrder(1000, 0, 50, 4)
    epochs = [one.indices(1000 * epoch, 1000) for epoch in range(3)] + [WindowOrder(1000, 1, 50, 4).indices(0, 1000)]
    for left in range(4):
        for right in range(left):
            assert (epochs[left] == epochs[right]).sum() < 10


def test_a_stretch_of_a_trillion_samples_takes_little_memory():
    tracemalloc.start()
    WindowOrder(10**12 + 7, 0, 1000, 64).indices(7 * 10**11, 20_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000


def test_a_place_that_runs_out_of_passes_is_marked():
    order = WindowOrder(10_007, 0, 10, 7)
    for inner in [order._others, *order._inside.values()]:
        inner.num_passes = 1
    assert OUT_OF_PASSES in on_device(order, 0, 10_007)
    assert set(on_device(order, 0, 10_007)) - {OUT_OF_PASSES} <= set(range(10_007))


WINDOW = {"samples_per_block": 50, "blocks_per_window": 4}


@pytest.mark.parametrize("overrides", [{"data__shuffle": WINDOW}, {"data__samples_per_epoch": 1000}], ids=str)
def test_a_stop_and_the_place_of_the_data_do_not_change_the_result(tmp_path: Path, overrides):
    whole = train(tmp_path / "whole", train__epochs=3, **overrides)
    train(tmp_path / "stopped", train__epochs=1, **overrides)
    stopped = train(tmp_path / "stopped", train__epochs=3, **overrides)
    on_host = train(tmp_path / "host", train__epochs=3, data__residency="host", **overrides)
    assert sha(whole) == sha(stopped) == sha(on_host)
    assert sha(whole) != sha(train(tmp_path / "plain", train__epochs=3))


def test_an_epoch_of_drawn_samples_has_as_many_as_asked_for(tmp_path: Path):
    fewer = train(tmp_path / "fewer", data__samples_per_epoch=300, data__batch_size=100, train__epochs=2)
    more = train(tmp_path / "more", data__samples_per_epoch=5000, data__batch_size=100, train__epochs=2)
    assert (fewer.summary()["step"], more.summary()["step"]) == (6, 100)


def test_an_epoch_of_less_than_a_batch_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"use data\.samples_per_epoch=128 or more"):
        train(tmp_path / "run", data__samples_per_epoch=100, data__batch_size=128)


def test_a_wrong_key_of_the_window_is_named_with_the_one_that_was_meant(tmp_path: Path):
    with pytest.raises(UserError, match=r'(?s)data\.shuffle\.block_per_window.*"?blocks_per_window'):
        train(tmp_path / "run", data__shuffle={"block_per_window": 4})


@given(num_samples=st.integers(1, 40), per_epoch=st.integers(1, 90), batch_size=st.integers(1, 40))
def test_drawn_samples_come_equally_often(num_samples, per_epoch, batch_size):
    from isoscale.data.batches import BatchPlan
    from isoscale.data.order import Order

    plan = BatchPlan(per_epoch, min(batch_size, per_epoch))
    order = Order(num_samples, 0)
    steps = range(5 * plan.steps_per_epoch)
    drawn = np.concatenate([order.indices(plan.place(step), plan.size(step)).numpy() for step in steps])
    counts = np.bincount(drawn, minlength=num_samples)
    assert counts.sum() == 5 * per_epoch and counts.max() - counts.min() <= 1
