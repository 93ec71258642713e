"""Rows a second that reach the step: from memory and from disk, beside torch's DataLoader.

    python benchmarks/data.py [--rows 1000000] [--repeats 7] [--out FILE.md] [--folder DIR]

Rows of 91 + 11 float32 in shuffled batches of 1,000, delivered to the CPU; nothing is trained. The sides take turns,
and the median over the repeats is shown. `disk` reads .npy files that are in the page cache (they were just written).
Afterwards, with --large GB, a file of that size is read once with a cold and once with a warm cache; root only, because
the cache is dropped through /proc/sys/vm/drop_caches.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from isoscale.data.batches import BatchPlan
from isoscale.data.feeds.residency import make_feed
from isoscale.data.formats.npy import open_npy
from isoscale.data.order import Order
from isoscale.data.sources import ColumnSource, Source, TensorSource

BATCH = 1000
WIDTHS = {"input": 91, "target": 11}
CPU = torch.device("cpu")


class Vectorised(Dataset):
    """A dataset that fetches whole batches, which is the best that a DataLoader can be given."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, rows: Any) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[rows] for tensor in self.tensors)


def timed(deliver: Callable[[], int]) -> float:
    """Rows a second."""
    begin = time.perf_counter()
    rows = deliver()
    return rows / (time.perf_counter() - begin)


def plain_loader(tensors: list[torch.Tensor], limit: int) -> Callable[[], int]:
    data = DataLoader(TensorDataset(*tensors), BATCH, shuffle=True)

    def deliver() -> int:
        rows = 0
        for batch in data:
            rows += len(batch[0])
            if rows >= limit:
                break
        return rows

    return deliver


def batch_loader(tensors: list[torch.Tensor]) -> Callable[[], int]:
    dataset = Vectorised(*tensors)
    sampler = BatchSampler(RandomSampler(dataset), BATCH, drop_last=False)
    data = DataLoader(dataset, sampler=sampler, batch_size=None)
    return lambda: sum(len(batch[0]) for batch in data)


def ours(source: Source, residency: Any) -> Callable[[], int]:
    plan = BatchPlan(len(source), BATCH)
    feed = make_feed(residency, source, Order(len(source), 0), plan, CPU)
    state = {"step": 0}

    def deliver() -> int:
        first, state["step"] = state["step"], state["step"] + plan.steps_per_epoch
        return sum(len(feed.parts(step)[0][0].samples) for step in range(first, state["step"]))

    return deliver


def write(folder: Path, num_rows: int) -> ColumnSource:
    generator = np.random.default_rng(0)
    columns = {}
    for name, width in WIDTHS.items():
        path = folder / f"{name}.npy"
        array = np.lib.format.open_memmap(path, "w+", np.float32, (num_rows, width))
        for start in range(0, num_rows, 100_000):
            stop = min(num_rows, start + 100_000)
            array[start:stop] = generator.random((stop - start, width), dtype=np.float32)
        array.flush()
        del array
        columns[name] = open_npy(path)
    return ColumnSource(columns)


def compare(num_rows: int, repeats: int, folder: Path) -> list[str]:
    source = write(folder, num_rows)
    batch = source.fetch(torch.arange(num_rows))
    tensors = [batch[name] for name in WIDTHS]
    sides = {
        "DataLoader(TensorDataset)": plain_loader(tensors, limit=100_000),
        "DataLoader, batch sampler, whole batches": batch_loader(tensors),
        "isoscale, host": ours(TensorSource(dict(zip(WIDTHS, tensors, strict=True))), "host"),
        "isoscale, disk (warm)": ours(source, "disk"),
        "isoscale, device (here the CPU's memory)": ours(
            TensorSource(dict(zip(WIDTHS, tensors, strict=True))), "device"
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, deliver in sides.items():
            rate = timed(deliver)
            if repeat:  # the first turn warms up
                rates[name].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    first, second, host = (list(medians.values())[place] for place in (0, 1, 2))
    rows = [
        f"| {name} | {rate:,.0f} | {rate / first:.1f}× | {rate / second:.2f}× | {rate / host:.2f}× |"
        for name, rate in medians.items()
    ]
    return ["| side | rows/s | to the first | to the second | to host |", "|---|---|---|---|---|", *rows]


def anonymous_memory() -> float:
    """Megabytes that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def read_large(gigabytes: float, folder: Path) -> list[str]:
    num_rows = int(gigabytes * 2**30 / (4 * sum(WIDTHS.values())))
    source = write(folder, num_rows)
    plan = BatchPlan(num_rows, BATCH)
    rows = []
    for name in ("cold", "warm"):
        if name == "cold":
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        feed = make_feed("disk", source, Order(num_rows, 1), plan, CPU)
        seen, most, begin = 0, 0.0, time.perf_counter()
        for step in range(plan.steps_per_epoch):
            seen += len(feed.parts(step)[0][0].samples)
            if step % 200 == 0:
                most = max(most, anonymous_memory())
        seconds = time.perf_counter() - begin
        feed.close()
        assert seen == num_rows
        rows.append(f"| {name} | {num_rows:,} | {seen / seconds:,.0f} | {seconds:.1f} s | {most:,.0f} MB |")
        print(rows[-1], flush=True)
    return ["| page cache | rows | rows/s | one epoch | most RssAnon |", "|---|---|---|---|---|", *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--large", type=float, metavar="GB")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        lines = [
            f"# Rows a second, {time.strftime('%Y-%m-%d')}",
            "",
            f"`python benchmarks/data.py --rows {options.rows} --repeats {options.repeats}"
            + (f" --large {options.large:g}`" if options.large else "`")
            + f"; {os.cpu_count()} cores ({platform.processor() or platform.machine()}), {torch.get_num_threads()} "
            f"threads, torch {torch.__version__}, numpy {np.__version__}, Python {platform.python_version()}.",
            "",
            *compare(options.rows, options.repeats, Path(folder)),
        ]
        print("\n".join(lines), flush=True)
        if options.large:
            table = read_large(options.large, Path(folder))
            lines += [
                "",
                f"One epoch over {options.large:g} GB of .npy files in an exact global shuffle, the cache dropped",
                "by `echo 3 > /proc/sys/vm/drop_caches` before the first:",
                "",
                *table,
            ]
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
