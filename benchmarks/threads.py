"""Where a second thread pays: steps of small networks with one and two threads, the cores idle and one of them busy.

    python benchmarks/threads.py [--out FILE.md] [--repeats 5] [--seconds 0.4]

Written by hand, without isoscale's loop: forward, backward, fused Adam. The size is what `train.threads: auto` looks
at, the floating point operations of a typical operation. Threads take turns within each repeat; wall-clock time,
because threads that wait are what this is about. The busy core runs an empty loop of Python.
"""

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from isoscale.engine.threads import WORTH_THREADS, Counting, typical


def network(*widths: int) -> nn.Module:
    return nn.Sequential(*(layer for one, other in pairwise(widths) for layer in (nn.Linear(one, other), nn.ReLU())))


def convolutions(channels: int) -> nn.Module:
    counts = (1, channels, channels, channels)
    layers = (layer for one, other in pairwise(counts) for layer in (nn.Conv2d(one, other, 3, padding=1), nn.ReLU()))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class Recurrent(nn.Module):
    """The last state of a recurrent network."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int) -> None:
        super().__init__()
        self.network = kind(inputs, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)[0][:, -1]


class Spectral(nn.Module):
    """Weights of frequencies."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.01 * torch.randn(channels, channels, modes, modes))

    def forward(self, x: Tensor) -> Tensor:
        modes = self.weight.shape[-1]
        seen = torch.fft.rfft2(x)[..., :modes, :modes]
        seen = torch.einsum("bixy,ioxy->boxy", seen, self.weight.to(torch.complex64))
        return torch.fft.irfft2(seen, s=x.shape[-2:])


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear(8, 8), batch 8": (lambda: nn.Linear(8, 8), (8, 8)),
    "91-100-11, batch 40": (lambda: network(91, 100, 11), (40, 91)),
    "91-100-11, batch 256": (lambda: network(91, 100, 11), (256, 91)),
    "91-100-11, batch 1,024": (lambda: network(91, 100, 11), (1024, 91)),
    "64-128-128-10, batch 128": (lambda: network(64, 128, 128, 10), (128, 64)),
    "64-256-256-10, batch 128": (lambda: network(64, 256, 256, 10), (128, 64)),
    "91-400-400-201, batch 256": (lambda: network(91, 400, 400, 201), (256, 91)),
    "91-400-400-201, batch 1,000": (lambda: network(91, 400, 400, 201), (1000, 91)),
    "3 convolutions of 8, 8×8, batch 32": (lambda: convolutions(8), (32, 1, 8, 8)),
    "3 convolutions of 16, 8×8, batch 64": (lambda: convolutions(16), (64, 1, 8, 8)),
    "3 convolutions of 16, 28×28, batch 32": (lambda: convolutions(16), (32, 1, 28, 28)),
    "GRU 16-32, 50 steps, batch 16": (lambda: Recurrent(nn.GRU, 16, 32), (16, 50, 16)),
    "GRU 16-64, 50 steps, batch 64": (lambda: Recurrent(nn.GRU, 16, 64), (64, 50, 16)),
    "GRU 16-128, 50 steps, batch 128": (lambda: Recurrent(nn.GRU, 16, 128), (128, 50, 16)),
    "LSTM 16-64, 50 steps, batch 64": (lambda: Recurrent(nn.LSTM, 16, 64), (64, 50, 16)),
    "LSTM 64-256, 50 steps, batch 64": (lambda: Recurrent(nn.LSTM, 64, 256), (64, 50, 64)),
    "FFT, 8 channels, 32×32, batch 16": (lambda: Spectral(8, 8), (16, 8, 32, 32)),
    "FFT, 16 channels, 64×64, batch 16": (lambda: Spectral(16, 12), (16, 16, 64, 64)),
}


def size(model: nn.Module, inputs: Tensor) -> float:
    with torch.no_grad(), Counting() as counting:
        model(inputs[:2])
    return typical(counting.works) * len(inputs) / 2


def milliseconds(model: nn.Module, inputs: Tensor, num_threads: int, seconds: float) -> float:
    """Of a step."""
    torch.set_num_threads(num_threads)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    begin, count = 0.0, -3
    while count < 1 or time.perf_counter() - begin < seconds:
        if count == 0:
            begin = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        count += 1
    return 1e3 * (time.perf_counter() - begin) / count


def measured(repeats: int, seconds: float) -> dict[str, tuple[float, float, float]]:
    """Size, and milliseconds of a step with one and two threads."""
    found = {}
    for name, (make, shape) in CASES.items():
        torch.manual_seed(0)
        model, inputs = make(), torch.randn(shape)
        pairs = [[milliseconds(model, inputs, count, seconds) for count in (1, 2)] for _ in range(repeats)]
        one, two = (statistics.median(side) for side in zip(*pairs, strict=True))
        found[name] = size(model, inputs), one, two
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4)
    options = parser.parse_args()
    idle = measured(options.repeats, options.seconds)
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        busy = measured(options.repeats, options.seconds)
    finally:
        other.kill()
    text = [
        "# Where a second thread pays",
        "",
        f"{time.strftime('%Y-%m-%d')}, `python benchmarks/threads.py --repeats {options.repeats}`; "
        f"{platform.machine()}, 2 cores, Python {platform.python_version()}, torch {torch.__version__}. Milliseconds a "
        f"step, medians of {options.repeats} repeats of {options.seconds:g} s; `auto` takes two threads from "
        f"{WORTH_THREADS / 1e6:g} MFLOP on.",
        "",
        "| network | MFLOP | `auto` | idle: 1 thread | 2 threads | gain | one core busy: 1 thread | 2 threads | gain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(CASES, key=lambda name: idle[name][0]):
        work, *_ = idle[name]
        sides = [f"{one:.2f} | {two:.2f} | {one / two:.2f}×" for _, one, two in (idle[name], busy[name])]
        text.append(f"| {name} | {work / 1e6:.2g} | {1 if work < WORTH_THREADS else 2} | {' | '.join(sides)} |")
    text.append("")
    print("\n".join(text))
    if options.out:
        options.out.write_text("\n".join(text))


if __name__ == "__main__":
    sys.exit(main())
