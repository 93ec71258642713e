"""What it costs to add gradients over ranks: tree, flat and overlap, beside DistributedDataParallel by hand.

    python benchmarks/ranks.py [--ranks 2] [--trials 5] [--out FILE.md]

Starts its own ranks on this machine, with one CPU thread each, over Gloo. In each trial the sides take turns on the
same network and batches, and the median over trials of the milliseconds a step is shown. `tree` cuts a batch into 8
shards and computes each by itself, which is the price of equal bits on any number of ranks; how much that is depends
on how long a shard computes, so three sizes are measured.
"""

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

SIZES = {  # widths of a fully connected network, and the batch
    "tiny": ([91, 32, 11], 256),
    "small": ([91, 400, 400, 201], 1024),
    "large": ([512, 1024, 1024, 512], 2048),
}
STEPS = {"tiny": 300, "small": 60, "large": 24}


def network(widths: list[int]) -> Any:
    from torch import nn

    layers: list[Any] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def rows(widths: list[int], batch: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    count = 4 * batch
    return {
        "input": torch.randn(count, widths[0], generator=generator),
        "target": torch.randn(count, widths[-1], generator=generator),
    }


def ours(size: str, reduce: str, folder: str) -> float:
    """Milliseconds a step of a training."""
    import torch

    import isoscale

    widths, batch = SIZES[size]
    steps = STEPS[size]
    torch.manual_seed(0)
    keys = {
        "train.threads": 1, "observe.level": "error", "observe.tensorboard": 0, "data.batch_size": batch,
        "train.steps": 3 * steps, "train.epochs": None, "observe.every": steps, "parallel.reduce": reduce,
        "checkpoint.every": "never", "train.evaluate": "never", "parallel.verify": 0,
    }  # fmt: skip
    run = isoscale.Trainer(run=folder, **keys).fit(
        isoscale.Supervised(network(widths), loss="mse"), rows(widths, batch)
    )
    rates = [value for _, value in run.history("time/samples_per_second")][1:]
    return 1000 * batch / statistics.median(rates)


def by_hand(size: str) -> float:
    """Milliseconds a step of a loop around DistributedDataParallel, as its tutorial writes it."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    widths, batch = SIZES[size]
    torch.manual_seed(0)
    model = network(widths)
    data = rows(widths, batch)
    model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = batch // world
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for step in range(STEPS[size]):
            first = (step % 4) * batch + rank * share
            chosen = slice(first, first + share)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(data["input"][chosen]), data["target"][chosen]).backward()
            optimizer.step()
        times.append(1000 * (time.perf_counter() - begin) / STEPS[size])
    return statistics.median(times[1:])


def shard_milliseconds(size: str) -> float:
    """How long one shard computes by itself."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    widths, batch = SIZES[size]
    model, data = network(widths), rows(widths, batch)
    inputs, targets = data["input"][: batch // 8].clone(), data["target"][: batch // 8].clone()
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        nn.functional.mse_loss(model(inputs), targets).backward()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def be_rank(trials: int, out: Path) -> None:
    """Measure on one of the ranks; the first one writes."""
    from isoscale.parallel import world

    ranks = world.join("cpu")
    lines = []
    for size in SIZES:
        found: dict[str, list[float]] = {side: [] for side in ("tree", "flat", "overlap", "by hand")}
        for trial in range(trials):
            for side in found:
                folder = ranks.broadcast(tempfile.mkdtemp() if ranks.is_main else None)
                found[side].append(by_hand(size) if side == "by hand" else ours(size, side, f"{folder}/{trial}"))
        shard = max(ranks.all_gather(shard_milliseconds(size)))
        lines += table_rows(size, shard, found)
    if ranks.is_main:
        out.write_text("\n".join(lines) + "\n")


def table_rows(size: str, shard: float, found: dict[str, list[float]]) -> list[str]:
    widths, batch = SIZES[size]
    flat = statistics.median(found["flat"])
    lines = []
    for side, times in found.items():
        ratios = [time / other for time, other in zip(times, found["flat"], strict=True)]
        middle = statistics.median(times)
        spread = f"{min(times):.2f}–{max(times):.2f}"
        name = f"{size}: {'-'.join(map(str, widths))}, batch {batch:,}, a shard {shard:.2f} ms"
        ratio = f"{statistics.median(ratios):.2f}×" if flat else ""
        lines.append(f"| {name} | {side} | {middle:.2f} | {spread} | {ratio} |")
    return lines


def start(num_ranks: int, trials: int, out: Path) -> str:
    """Start the ranks and collect what the first one found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table"
        processes = []
        for rank in range(num_ranks):
            variables = {
                "RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
            }  # fmt: skip
            words = [sys.executable, __file__, "--trials", str(trials), "--out", str(table), "--as-rank"]
            environment = {**os.environ, **{key: str(value) for key, value in variables.items()}}
            processes.append(subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL))
        if any(process.wait() for process in processes):
            raise SystemExit("a rank failed")
        return table.read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = options.out or Path(__file__).parent / "results" / f"{time.strftime('%Y-%m-%d')}-ranks.md"
    if options.as_rank:
        be_rank(options.trials, out)
        return
    import torch

    import isoscale

    text = "\n".join([
        f"# What adding gradients over ranks costs, {time.strftime('%Y-%m-%d')}",
        "",
        f"{options.ranks} ranks over Gloo on {platform.processor() or platform.machine()}, {os.cpu_count()} cores, one "
        f"thread a rank; Python {platform.python_version()}, torch {torch.__version__}, isoscale "
        f"{isoscale.__version__}; median of {options.trials} trials, in which the sides take turns. Adam, float32. "
        "`by hand` is a loop around DistributedDataParallel without logging, metrics or checks.",
        "",
        "| network | side | ms a step | min–max | against flat (median of trials) |",
        "|---|---|---|---|---|",
        start(options.ranks, options.trials, out).rstrip(),
        "",
    ])  # fmt: skip
    out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
