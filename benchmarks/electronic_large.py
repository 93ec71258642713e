"""A hundred million rows: snapshots made on the spot, and an epoch of training on them from the device and from disk.

    python benchmarks/electronic_large.py --out FOLDER --scratch DIR [--rows 100000000] [--budget 450] [--smoke]

Four snapshots of the made-up material (`isoscale data make electronic/box`), 91 descriptors and 11 energies in float32:
408 bytes a row that is trained on, 420 in the files. The network is 91-100-11, with the batches that --batches names;
rows are shuffled over all snapshots. isoscale runs with all that it does by default. Rows a second are those of the
steps after the first logging window. From disk, an epoch is trained with the files in the page cache, and for as long
as --cold says with files that were dropped from it, shuffled in full and in windows. Inputs and targets are scaled with
numbers of the validation snapshot; --scale lets isoscale measure all rows first, as a recipe usually does.
"""

import argparse
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import isoscale
from isoscale.science.electronic.synthetic import material
from isoscale.science.electronic.synthetic_files import make_boxes

SNAPSHOTS, ENERGIES = 4, 11
ROW_BYTES = 4 * (91 + ENERGIES)
WINDOWS = {"samples_per_block": 4096, "blocks_per_window": 256}


@dataclass(frozen=True)
class Side:
    """One way to train on the rows."""

    name: str
    residency: str
    batch: int
    cold: bool = False
    windows: bool = False


def sides(batches: list[int]) -> list[Side]:
    """The most important ones first."""
    first = [Side("device", "device", batch) for batch in batches] + [
        Side("disk, files cached", "disk", batch) for batch in batches
    ]
    cold = [("disk, cold, window shuffle", True), ("disk, cold, full shuffle", False)]
    return first + [Side(name, "disk", batches[0], cold=True, windows=windows) for name, windows in cold]


def generate(folder: Path, num_rows: int, device: str) -> dict[str, Any]:
    """Snapshots for training and a small one for validation; what that took."""
    material()
    edge = round((num_rows / SNAPSHOTS) ** (1 / 3))
    grid = [max(2, num_rows // SNAPSHOTS // edge**2), edge, edge]
    begin = time.perf_counter()
    make_boxes(folder / "train", lambda *_: None, grid=grid, snapshots=SNAPSHOTS, energies=ENERGIES, device=device)
    seconds = time.perf_counter() - begin
    small = [max(2, min(100, edge // 2))] * 3
    make_boxes(folder / "val", lambda *_: None, grid=small, snapshots=1, energies=ENERGIES, seed=1, device=device)
    rows = SNAPSHOTS * int(np.prod(grid))
    return {"rows": rows, "seconds": seconds, "bytes": 4 * rows * (94 + ENERGIES), "grid": grid}


def scaling(folder: Path) -> list[dict[str, Any]]:
    """Transforms with numbers of the validation snapshot, so that nothing is measured before the training."""
    inputs = np.load(folder / "val/snapshot0.in.npy", mmap_mode="r").reshape(-1, 94)[:200_000, 3:]
    targets = np.load(folder / "val/snapshot0.out.npy", mmap_mode="r")
    low, high = float(targets.min()), float(targets.max())
    mean, std = inputs.mean(0, dtype=np.float64), inputs.std(0, dtype=np.float64)
    return [
        {"class": "normalize", "key": "input", "mean": mean.tolist(), "std": std.tolist()},
        {"class": "normalize", "key": "target", "mean": low, "std": high - low},
    ]


def drop_from_cache(folder: Path) -> None:
    """Ask the system to forget the files, which it need not do."""
    for path in folder.rglob("*.npy"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(folder: Path) -> float:
    """How much of the files is in memory, by reading some pages of them and looking how long that takes."""
    times = []
    generator = np.random.default_rng(0)
    for path in sorted(folder.rglob("*.in.npy")):
        with path.open("rb") as file:
            for place in generator.integers(0, max(1, path.stat().st_size - 4096), 50):
                begin = time.perf_counter()
                os.pread(file.fileno(), 64, int(place))
                times.append(time.perf_counter() - begin)
    return sum(each < 15e-6 for each in times) / len(times)


@dataclass(frozen=True)
class Found:
    """What a training took."""

    rows_per_second: float
    steps: int
    wall: float
    val_loss: float
    cached: float


def train(side: Side, folder: Path, num_rows: int, options: argparse.Namespace) -> Found:
    """An epoch, or a part of it where the files are cold."""
    cold_steps = max(20, int(options.cold_rows // side.batch))
    keys: dict[str, Any] = {
        "data.path": str(folder), "data.train": [f"train/snapshot{number}" for number in range(SNAPSHOTS)],
        "data.val": ["val/snapshot0"], "data.test": None, "data.batch_size": side.batch,
        "data.residency": side.residency, "data.shuffle": WINDOWS if side.windows else True, "train.epochs": 1,
        "observe.level": "error", "data.on_nan": "keep",
        "task.model.widths": [91, 100, ENERGIES],
    }  # fmt: skip
    if not options.scale:
        keys["data.transforms"] = scaling(folder)
    if side.cold:
        drop_from_cache(folder / "train")
        keys["train.limit_train_batches"] = min(cold_steps, max(1, num_rows // side.batch))
    cached = cached_share(folder / "train")
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as runs:
        run = isoscale.train("electronic/be2", run=Path(runs) / "run", **keys)
        wall = time.perf_counter() - begin
        history = run.history("time/samples_per_second")
        windows = [(b[0] - a[0]) * side.batch / b[1] for a, b in pairwise(history)]
        steps = history[-1][0] - history[0][0]
        rate = steps * side.batch / sum(windows) if windows else statistics.mean(rate for _, rate in history)
        return Found(rate, history[-1][0], wall, float(run.metrics["val/loss"]), cached)


def measured(side: Side, folder: Path, num_rows: int, options: argparse.Namespace) -> Found | str:
    """Train in a process of its own: files that a process has mapped cannot be dropped from the cache."""
    print(f"{side.name}, batch {side.batch:,}", flush=True)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            found: Found | str = process.submit(train, side, folder, num_rows, options).result()
    except Exception as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    print(f"  {found}", flush=True)
    return found


def table(found: dict[Side, Found | str]) -> list[str]:
    lines = ["| data | batch | million rows/s | of the device's | GB/s | files cached | steps | all of it | val/loss |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    best = {side.batch: each.rows_per_second for side, each in found.items()
            if side.residency == "device" and isinstance(each, Found)}  # fmt: skip
    for side, each in found.items():
        if isinstance(each, str):
            lines.append(f"| {side.name} | {side.batch:,} | {each} | | | | | | |")
            continue
        share = f"{100 * each.rows_per_second / best[side.batch]:.0f} %" if side.batch in best else ""
        lines.append(
            f"| {side.name} | {side.batch:,} | {each.rows_per_second / 1e6:.2f} | {share} "
            f"| {each.rows_per_second * ROW_BYTES / 1e9:.2f} | {100 * each.cached:.0f} % | {each.steps:,} "
            f"| {each.wall:.0f} s | {each.val_loss:.3e} |"
        )
    return lines


def memory() -> str:
    """Of the host, in words."""
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB of memory"


def main() -> None:
    """Generate, train, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--scratch", type=Path, required=True, help="a folder with room for the rows")
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--batches", type=int, nargs="+", default=[8192, 1000])
    parser.add_argument("--cold-rows", type=float, default=4e6, help="rows to train on where files are cold")
    parser.add_argument("--budget", type=float, default=450, help="seconds for all of it")
    parser.add_argument("--scale", action="store_true", help="measure the scale of all rows before training")
    parser.add_argument("--smoke", action="store_true", help="everything once, tiny, on a CPU")
    options = parser.parse_args()
    end = time.monotonic() + options.budget
    device = "cpu" if options.smoke else "cuda"
    if options.smoke:
        options.rows, options.batches, options.cold_rows = 200_000, [1000], 50_000
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out / f"{time.strftime('%Y-%m-%d')}-electronic-large{'-smoke' if options.smoke else ''}.md"
    options.scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="electronic-large-", dir=options.scratch))
    try:
        made = generate(folder, options.rows, device)
        print(made, flush=True)
        found: dict[Side, Found | str] = {}
        for side in sides(options.batches):
            # The cold ones and those of a small batch are the first to be given up.
            if end - time.monotonic() > 30:
                found[side] = measured(side, folder, made["rows"], options)
            out.write_text("\n".join(text(options, device, made, found)) + "\n")
        print(out.read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def text(options: argparse.Namespace, device: str, made: dict[str, Any], found: dict[Side, Found | str]) -> list[str]:
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU (a rehearsal: no figures to quote)"
    return [
        f"# {made['rows']:,} rows on {name}, {time.strftime('%Y-%m-%d')}", "",
        f"`python benchmarks/electronic_large.py {' '.join(sys.argv[1:])}`; Python {platform.python_version()}, torch "
        f"{torch.__version__}, isoscale {isoscale.__version__}, {len(os.sched_getaffinity(0))} cores, {memory()}.", "",
        f"Made {SNAPSHOTS} snapshots of {' × '.join(map(str, made['grid']))} points in {made['seconds']:.1f} s, until "
        f"they were on the disk: {made['rows'] / made['seconds'] / 1e6:.2f} million rows/s, "
        f"{made['bytes'] / made['seconds'] / 1e9:.2f} GB/s.", "",
        "An epoch of 91-100-11, everything on. `all of it` includes the start, reading the data where it is kept on "
        "the device, validation and checkpoint; nobody looks for NaN (data.on_nan: keep). `files cached`: the share of "
        "places in the files that answered from memory just before.", "",
        *table(found),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
