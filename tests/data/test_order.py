"""The order is a bijection of the samples for every epoch, and its values never change between versions."""

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from isoscale.data.order import MAX_SAMPLES, OUT_OF_PASSES, Order, _shift

SEEDS = st.integers(-(2**63), 2**64)

# (number of samples, seed, place, the indices from there on). For ever: a change would reorder everybody's training.
PINNED = [
    (1, 0, 0, [0, 0, 0]),
    (2, 0, 0, [0, 1, 1, 0, 0, 1, 1, 0]),
    (2, 7, 0, [1, 0, 0, 1, 0, 1, 0, 1]),
    (3, 0, 0, [0, 1, 2, 0, 2, 1, 1, 2, 0]),
    (3, 1, 30, [2, 1, 0, 2, 1, 0]),
    (10, 0, 0, [8, 3, 4, 9, 5, 2, 0, 7, 1, 6, 0, 5, 1, 4, 6, 3, 7, 9, 2, 8]),
    (10, 1, 0, [1, 2, 5, 7, 8, 0, 4, 6, 9, 3]),
    (1797, 0, 0, [260, 1135, 957, 1338, 1292, 1399, 1773, 281]),
    (1797, 0, 1793, [1377, 1547, 726, 15, 1325, 885, 194, 92]),
    (1797, 42, 1797005, [842, 1663, 889, 219, 1513, 1400]),
    (60000, 0, 0, [944, 34978, 16302, 54598, 7119, 2466]),
    (60000, 3, 59998, [4140, 40837, 31771, 2787]),
    (10**12, 0, 0, [39617402175, 932848602426, 265416469762, 642892562135]),
    (10**12, 0, 10**12 - 2, [210058807799, 988919829783, 162534138914, 234082223413]),
    (10**12, 9, 5000123456789, [13569547405, 88105799134, 263666704921]),
    (2**46, 1, 0, [49113163236848, 20533271721123, 67818586217280]),
    (2**46, 1, 100 * 2**46 + 1, [25055226510601, 9637778656158]),
]
PINNED_PURPOSES = [
    ("split", [151, 1146, 196, 1317, 718]),
    ("subset", [1167, 235, 443, 257, 172]),
    ("overfit", [1272, 1796, 1415, 196, 1078]),
    ("shuffle files", [128, 1414, 210, 1618, 495]),
]


def masked(order: Order, start: int, count: int) -> list[int]:
    """What a device computes, computed here."""
    return order._masked(torch.arange(start, start + count)).tolist()


def undo(order: Order, index: int, epoch: int) -> int:
    """The position in an epoch at which a sample comes: the network backwards."""
    row, column = divmod(index, order._width)
    keys = list(enumerate(order._round_keys(epoch)))
    for round_, key in reversed(keys):
        if round_ % 2 == 0:
            row = (row - _shift(0, column, key, order._height)) % order._height
        else:
            column = (column - _shift(0, row, key, order._width)) % order._width
    cell = row * order._width + column
    return cell if cell < order.num_samples else undo(order, cell, epoch)


def longest_walk(order: Order, num_epochs: int) -> int:
    """Passes that the slowest place of some epochs needs to come inside of the data."""
    place = np.arange(num_epochs * order.num_samples)
    epoch, cell = np.divmod(place, order.num_samples)
    passes = 0
    while cell.size:
        cell = order._turn(cell, epoch)
        outside = cell >= order.num_samples
        cell, epoch, passes = cell[outside], epoch[outside], passes + 1
    return passes


@pytest.mark.parametrize(("num_samples", "seed", "place", "expected"), PINNED)
def test_the_values_of_the_order_never_change(num_samples, seed, place, expected):
    order = Order(num_samples, seed)
    assert order.indices(place, len(expected)).tolist() == expected
    assert masked(order, place, len(expected)) == expected


@pytest.mark.parametrize(("purpose", "expected"), PINNED_PURPOSES)
def test_the_values_for_other_purposes_never_change(purpose, expected):
    assert Order(1797, 0, purpose=purpose).indices(0, 5).tolist() == expected


def test_without_shuffle_every_epoch_is_the_order_of_the_source():
    order = Order(7, seed=3, shuffle=False)
    assert order.indices(0, 14).tolist() == [*range(7), *range(7)]
    assert order.indices(12, 4).tolist() == masked(order, 12, 4) == [5, 6, 0, 1]


@settings(max_examples=60)
@given(num_samples=st.integers(1, 5000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_every_epoch_visits_every_sample_exactly_once(num_samples, seed, epoch):
    visited = Order(num_samples, seed).indices(epoch * num_samples, num_samples)
    assert visited.dtype == torch.int64
    assert torch.equal(visited.sort().values, torch.arange(num_samples))


@pytest.mark.parametrize("num_samples", range(1, 130))
def test_small_numbers_of_samples_are_permuted_in_every_epoch(num_samples):
    epochs = Order(num_samples, seed=5).indices(0, 50 * num_samples).view(50, num_samples)
    assert torch.equal(epochs.sort(dim=1).values, torch.arange(num_samples).expand(50, -1))


@pytest.mark.parametrize("num_samples", [10**6 + 3, 10**9, 10**12, MAX_SAMPLES - 1, MAX_SAMPLES])
def test_large_epochs_repeat_no_sample_and_stay_inside(num_samples):
    order = Order(num_samples, seed=1)
    starts = [0, num_samples // 3, num_samples - 20_000]
    seen = torch.cat([order.indices(start, 20_000) for start in starts])
    assert seen.unique().numel() == 60_000
    assert seen.min() >= 0 and seen.max() < num_samples


@settings(max_examples=40)
@given(
    num_samples=st.one_of(st.integers(1, 300), st.integers(1, MAX_SAMPLES)),
    seed=SEEDS,
    epoch=st.integers(0, 10**4),
    back=st.integers(0, 50),
)
def test_the_device_computes_the_values_of_the_host(num_samples, seed, epoch, back):
    order = Order(num_samples, seed)
    start = max(0, epoch * num_samples - back)
    assert masked(order, start, 100) == order.indices(start, 100).tolist()


@given(num_samples=st.integers(2, 10**12), seed=SEEDS, epoch=st.integers(0, 10**6), share=st.floats(0, 0.999))
def test_the_network_backwards_finds_the_position_of_every_sample(num_samples, seed, epoch, share):
    """Each position has an index and each index one position, so that no two positions share one, at any size."""
    order = Order(num_samples, seed)
    positions = [int(share * num_samples), num_samples - 1, 0]
    indices = [order.indices(epoch * num_samples + position, 1).item() for position in positions]
    assert [undo(order, index, epoch) for index in indices] == positions


@settings(max_examples=40)
@given(num_samples=st.integers(1, 10**12), seed=SEEDS, share=st.floats(0, 0.999))
def test_no_sample_comes_twice_in_a_stretch_of_an_epoch_of_any_size(num_samples, seed, share):
    start = int(share * num_samples)
    count = min(3000, num_samples - start)
    assert Order(num_samples, seed).indices(start, count).unique().numel() == count


@given(num_samples=st.integers(1, 10**12), places=st.lists(st.integers(0, 10**14), min_size=1, max_size=20))
def test_places_asked_for_one_by_one_are_those_of_the_order(num_samples, places):
    order = Order(num_samples, 0)
    expected = [order.indices(place, 1).item() for place in places]
    assert order.at(np.array(places)).tolist() == order.at(torch.tensor(places)).tolist() == expected


@settings(max_examples=60)
@given(data=st.data(), num_samples=st.integers(1, 2000), seed=st.integers(0, 99))
def test_any_window_equals_the_same_slice_of_a_larger_one(data, num_samples, seed):
    order = Order(num_samples, seed)
    outer = data.draw(st.integers(0, 5 * num_samples))
    length = data.draw(st.integers(0, 3 * num_samples))
    offset = data.draw(st.integers(0, length))
    count = data.draw(st.integers(0, length - offset))
    window = order.indices(outer, length)
    assert torch.equal(order.indices(outer + offset, count), window[offset : offset + count])


def test_a_window_longer_than_a_chunk_of_work_is_seamless():
    order = Order(50_000, seed=2)
    whole = order.indices(7, 40_000)
    assert torch.equal(whole, torch.cat([order.indices(7 + start, 1000) for start in range(0, 40_000, 1000)]))


def test_seeds_epochs_and_purposes_give_different_orders():
    variants = [Order(1000, seed).indices(0, 1000) for seed in range(5)]
    variants += [Order(1000, 0).indices(epoch * 1000, 1000) for epoch in range(1, 5)]
    variants.append(Order(1000, 0, purpose="split").indices(0, 1000))
    for one, other in itertools.combinations(variants, 2):
        assert (one == other).sum() < 10  # one place in a thousand agrees by chance


def test_the_same_seed_gives_the_same_order_again():
    assert torch.equal(Order(999, 4).indices(0, 999), Order(999, 4).indices(0, 999))


@pytest.mark.parametrize("num_samples", [16, 97, 100, 257])
def test_every_sample_comes_equally_often_at_every_position(num_samples):
    num_epochs = 40 * num_samples
    positions = torch.arange(num_samples).repeat(num_epochs)
    values = Order(num_samples, seed=11).indices(0, num_epochs * num_samples)
    table = torch.bincount(positions * num_samples + values, minlength=num_samples**2)
    expected = num_epochs / num_samples
    chi_square = ((table - expected) ** 2 / expected).sum().item()
    freedom = (num_samples - 1) ** 2
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("num_samples", [1797, 60_000])
@pytest.mark.parametrize("lag", [1, 2, 42, "one epoch"])
def test_neighbours_and_epochs_are_not_correlated(num_samples, lag):
    lag = num_samples if lag == "one epoch" else lag
    values = Order(num_samples, seed=0).indices(0, 4 * num_samples).double()
    correlation = torch.corrcoef(torch.stack([values[:-lag], values[lag:]]))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(len(values) - lag)


def test_neighbours_are_as_far_apart_as_chance_puts_them():
    num_samples = 60_000
    steps = Order(num_samples, seed=8).indices(0, num_samples).diff() % num_samples
    assert stats.kstest(steps.numpy() / num_samples, "uniform").pvalue > 1e-4


@pytest.mark.parametrize(("num_samples", "num_orders"), [(2, 2), (3, 6), (4, 24)])
def test_all_permutations_of_a_few_samples_come_about_equally_often(num_samples, num_orders):
    epochs = Order(num_samples, seed=0).indices(0, num_samples * 1000 * num_orders).view(-1, num_samples)
    counts = Counter(tuple(epoch) for epoch in epochs.tolist())
    assert len(counts) == num_orders
    assert all(850 < count < 1150 for count in counts.values())


def test_a_stretch_of_a_trillion_samples_takes_little_memory():
    tracemalloc.start()
    Order(10**12, seed=0).indices(7 * 10**11, 20_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


@pytest.mark.parametrize("num_samples", [0, -1, MAX_SAMPLES + 1])
def test_a_number_of_samples_out_of_range_is_refused_with_the_number(num_samples):
    with pytest.raises(ValueError, match=rf"between 1 and 2\^46 samples, not {num_samples}"):
        Order(num_samples, seed=0)


@pytest.mark.slow
def test_the_passes_of_a_device_suffice_for_every_number_of_samples():
    for num_samples in range(1, 3001):
        order = Order(num_samples, seed=num_samples)
        assert not order.shuffle or longest_walk(order, num_epochs=3) <= order.num_passes, num_samples


@pytest.mark.parametrize("num_samples", [3, 5, 7, 50, 63, 65, 1000, 2999])
def test_a_device_never_runs_out_of_passes(num_samples):
    assert OUT_OF_PASSES not in masked(Order(num_samples, seed=1), 0, 5 * num_samples)


def test_a_place_that_runs_out_of_passes_is_marked():
    order = Order(1000, seed=0)
    order.num_passes = 1
    assert OUT_OF_PASSES in masked(order, 0, 1000)
