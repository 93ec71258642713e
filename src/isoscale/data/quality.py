"""How well an order mixes: a number to compare it with an exact shuffle."""

from collections.abc import Iterator

import numpy as np

from isoscale.data.columns import Rows
from isoscale.data.feeds.feed import Indices
from isoscale.data.window_order import WindowOrder

NUM_REGIONS = 128
NUM_BATCHES = 400
MOST_SAMPLES = 1 << 23
"""To look at: large batches are measured on fewer of them."""


def shuffle_quality(order: Indices, num_samples: int, batch_size: int) -> float:
    """How evenly batches represent a source of `num_samples`: 1 is as good as an exact shuffle, 0 is no shuffle.

    The source is cut into regions of equal size. Of each batch, chi-square says how far the numbers of its samples in
    the regions are from even; the quality is the value that chance gives an exact shuffle over the mean that is found.
    """
    batch_size = min(batch_size, order.num_samples)
    num_regions = min(NUM_REGIONS, num_samples)
    found = np.mean([_chi_square(batch, num_samples, num_regions) for batch in _some_batches(order, batch_size)])
    chance = (num_regions - 1) * (num_samples - batch_size) / max(1, num_samples - 1)
    return float(chance / found) if found > 0 else 1.0


def _some_batches(order: Indices, batch_size: int) -> Iterator[Rows]:
    """Batches from all over the first epoch, or all of the first epochs where one has few."""
    per_epoch = order.num_samples // batch_size
    count = max(16, min(NUM_BATCHES, MOST_SAMPLES // batch_size))
    for number in np.linspace(0, max(per_epoch, count) - 1, count).astype(int).tolist():
        epoch, within = divmod(number, per_epoch)
        yield order.indices(epoch * order.num_samples + within * batch_size, batch_size).numpy()


def _chi_square(batch: Rows, num_samples: int, num_regions: int) -> float:
    edges = -(-np.arange(num_regions + 1) * num_samples // num_regions)
    expected = np.diff(edges) * (len(batch) / num_samples)
    counts = np.bincount(batch * num_regions // num_samples, minlength=num_regions)
    return float(((counts - expected) ** 2 / expected).sum())


def describe_windows(order: WindowOrder, batch_size: int) -> str:
    """A window shuffle in words, with its quality for batches of a size."""
    quality = shuffle_quality(order, order.num_samples, batch_size)
    blocks = f"{order.blocks_per_window:,} blocks × {order.samples_per_block:,} samples"
    return f"window shuffle of {blocks}, quality {quality:.2f}"
