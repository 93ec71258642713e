"""How fast a map-style Dataset is read in the training process, beside torch's DataLoader with num_workers=0.

    python benchmarks/dataset_reading.py [--out FILE.md] [--repeats 15]

Rows of 91 numbers and a target, 20,000 of them in random order, in batches of 32, 256 and 1,024, one thread. Each
figure is rows per second of processor time over an epoch without its first two batches; sides are interleaved within
each repeat. Samples that draw are seeded one by one here, and not by a DataLoader, which draws other numbers for each
number of workers. What was imported is kept out of Python's garbage collection, which would go through all of it every
60,000 rows or so, in 80 ms, on whichever side that happens to be.
"""

import argparse
import gc
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import isoscale
from isoscale.data.batches import BatchPlan
from isoscale.data.feeds.host import HostFeed
from isoscale.data.order import Order
from isoscale.data.samples import InProcess
from isoscale.data.sources import DatasetSource

NUM_ROWS, WIDTH = 20_000, 91
BATCHES = (32, 256, 1024)
WARM = 2
INPUTS, TARGETS = torch.randn(NUM_ROWS, WIDTH), torch.randn(NUM_ROWS, 1)
ARRAYS = INPUTS.numpy(), TARGETS.numpy()


class Tensors(Dataset[Any]):
    """Rows of tensors."""

    title = "tensors"

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index], TARGETS[index]


class Arrays(Tensors):
    """Rows of numpy's arrays."""

    title = "arrays of numpy"

    def __getitem__(self, index: int) -> Any:
        return ARRAYS[0][index], ARRAYS[1][index]


class AtOnce(Tensors):
    """Rows of tensors, a batch of them at once."""

    title = "tensors, with `__getitems__`"

    def __getitems__(self, indices: list[int]) -> Any:
        return list(zip(INPUTS[indices], TARGETS[indices], strict=True))


class Flipped(Tensors):
    """Python draws one number per sample."""

    title = "tensors; Python draws"

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index] if random.random() < 0.5 else -INPUTS[index], TARGETS[index]


class NoisyArrays(Tensors):
    """Numpy draws noise."""

    title = "arrays; numpy draws"

    def __getitem__(self, index: int) -> Any:
        return ARRAYS[0][index] + np.random.randn(WIDTH).astype(np.float32), ARRAYS[1][index]


class Noisy(Tensors):
    """Torch draws noise."""

    title = "tensors; torch draws"

    def __getitem__(self, index: int) -> Any:
        return INPUTS[index] + torch.randn(WIDTH), TARGETS[index]


DATASETS = (Tensors(), Arrays(), AtOnce(), Flipped(), NoisyArrays(), Noisy())


def ours(dataset: Dataset[Any], batch: int) -> Iterator[Tensor]:
    source = DatasetSource(dataset)
    feed = HostFeed(source, Order(NUM_ROWS, 0), BatchPlan(NUM_ROWS, batch), torch.device("cpu"))
    feed.read_with(InProcess(source))
    for step in range(NUM_ROWS // batch):
        yield feed.parts(step)[0][0].batch[0]
    feed.close()


def of_torch(dataset: Dataset[Any], batch: int) -> Iterator[Tensor]:
    for inputs, _ in DataLoader(dataset, batch, shuffle=True, num_workers=0, drop_last=True):
        yield inputs


def rate(batches: Iterator[Tensor]) -> float:
    """Rows per second of processor time, once it runs."""
    for _ in range(WARM):
        next(batches)
    begin, count = time.process_time(), 0
    for inputs in batches:
        count += len(inputs)
    return count / (time.process_time() - begin)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    text = [
        "# Reading a Dataset in the training process",
        "",
        f"{time.strftime('%Y-%m-%d')}, `python benchmarks/dataset_reading.py --repeats {options.repeats}`; "
        f"{platform.machine()}, one thread, Python {platform.python_version()}, torch {torch.__version__}, numpy "
        f"{np.__version__}, isoscale {isoscale.__version__}; {NUM_ROWS:,} rows of {WIDTH} numbers and a target. Rows "
        f"per second of processor time, medians of {options.repeats} interleaved repeats (least–most).",
        "",
        "| dataset | batch | isoscale | DataLoader, `num_workers=0` | ratio (median of repeats) |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(text))
    for dataset in DATASETS:
        for batch in BATCHES:
            pairs = [(rate(ours(dataset, batch)), rate(of_torch(dataset, batch))) for _ in range(options.repeats)]
            sides = [
                f"{statistics.median(side):,.0f} ({min(side):,.0f}–{max(side):,.0f})"
                for side in zip(*pairs, strict=True)
            ]
            ratio = statistics.median(one / other for one, other in pairs)
            text.append(f"| {dataset.title} | {batch:,} | {' | '.join(sides)} | {ratio:.2f} |")
            print(text[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join([*text, ""]))


if __name__ == "__main__":
    sys.exit(main())
