"""The quality of a shuffle is 1 for an exact one, near 0 for none, and between them for windows."""

import pytest
import torch

from isoscale.data.order import Order
from isoscale.data.window_order import WindowOrder, describe_windows, shuffle_quality


@pytest.mark.parametrize("num_samples", [1000, 34_992, 10**6, 10**12])
@pytest.mark.parametrize("batch_size", [16, 128, 1000])
def test_an_exact_shuffle_has_the_quality_one(num_samples, batch_size):
    assert shuffle_quality(Order(num_samples, 0), num_samples, batch_size) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("num_samples", "batch_size"), [(1, 1), (2, 1), (7, 7), (10, 3), (100, 99), (10, 50)])
def test_few_samples_or_a_batch_of_all_are_no_special_case(num_samples, batch_size):
    assert shuffle_quality(Order(num_samples, 1), num_samples, batch_size) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("batch_size", [16, 128, 1000])
def test_no_shuffle_has_a_quality_near_zero(batch_size):
    num_samples = 10**6
    assert shuffle_quality(Order(num_samples, 0, shuffle=False), num_samples, batch_size) < 2 / batch_size


@pytest.mark.slow
def test_a_larger_window_has_a_better_quality_up_to_that_of_an_exact_shuffle():
    num_samples = 10**6
    windows = [WindowOrder(num_samples, 0, 1000, blocks) for blocks in (1, 4, 16, 64, 256, 1000)]
    found = [shuffle_quality(order, num_samples, 128) for order in windows]
    assert found == sorted(found)
    assert found[0] < 0.02 and 0.2 < found[3] < 0.5
    assert found[-1] == pytest.approx(1, abs=0.05)


def test_a_batch_from_few_blocks_is_worse_by_the_share_that_theory_gives():
    num_samples, blocks, batch_size = 10**7, 64, 128
    quality = shuffle_quality(WindowOrder(num_samples, 0, 1000, blocks), num_samples, batch_size)
    assert quality == pytest.approx(1 / (1 + (batch_size - 1) / blocks), rel=0.1)


def test_a_part_that_is_never_drawn_lowers_the_quality():
    class FirstHalf(Order):
        def indices(self, start: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
            return super().indices(start, count, device) // 2

    assert shuffle_quality(FirstHalf(10_000, 0), 10_000, 500) < 0.5


def test_a_window_shuffle_in_words_says_how_good_it_is():
    text = describe_windows(WindowOrder(10**6, 0, 1000, 64), 128)
    assert text.startswith("window shuffle of 64 blocks × 1,000 samples, quality 0.3")
