"""Convolutions on a GPU: torch's with cuDNN's heuristic, torch's chosen by timing, and as matrix products.

    python benchmarks/convolutions.py [--out FILE.md] [--quick]

Two networks in bf16 autocast, contiguous and channels last: a U-Net as in pix2pix (4×4×4, stride 2, channels
4-64-128-256-512-512 and back, batch 64 at 64³), and one with odd numbers of channels (3×3×3, 1-30-30-50-7, batch 8 at
48³). For each convolution the best of three forward and backward passes, for a whole training step (Adam, eager) the
median of five. Products are used in the step where they are 1.5 times faster, as `slow_convolutions` names them.
Choosing by timing (cudnn.benchmark) runs in a process of its own, because torch keeps its first choice; `--quick`
leaves it out.
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isoscale.engine.step.convolutions import as_products
from isoscale.engine.step.slow_convolutions import MIN_GAIN, measure
from isoscale.system.devices import deterministic_kernels

FORMATS = {"channels_last_3d": torch.channels_last_3d, "contiguous": torch.contiguous_format}
MAX_SECONDS = 80.0
NUM_STEPS = 5
NONE = "–"


class UNet(nn.Module):
    """Five levels that halve the edge, and back, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        widths = [4, 64, 128, 256, 512, 512]
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(nn.Conv3d(above, below, 4, 2, 1) for above, below in pairs)
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(below * (1 + (level < 4)), above, 4, 2, 1)
            for level, (above, below) in reversed(list(enumerate(pairs)))
        )
        self.down_norms = nn.ModuleList(nn.BatchNorm3d(below) for _, below in pairs)
        self.up_norms = nn.ModuleList(nn.BatchNorm3d(above) for above, _ in reversed(pairs[1:]))

    def forward(self, values: Tensor) -> Tensor:
        levels = []
        for convolution, norm in zip(self.down, self.down_norms, strict=True):
            values = nn.functional.leaky_relu(norm(convolution(values)), 0.2)
            levels.append(values)
        levels.pop()
        for convolution, norm in zip(self.up[:-1], self.up_norms, strict=True):
            values = torch.cat([norm(convolution(values)).relu(), levels.pop()], 1)
        return self.up[-1](values)


def odd() -> nn.Module:
    widths = [1, 30, 30, 50, 7]
    layers = [nn.Conv3d(given, found, 3, padding=1) for given, found in pairwise(widths)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.ReLU())))[:-1]


class Case(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


CASES = [
    Case("U-Net, 4×4×4, stride 2, batch 64 at 64³", UNet, (64, 4, 64, 64, 64)),
    Case("1-30-30-50-7, 3×3×3, batch 8 at 48³", odd, (8, 1, 48, 48, 48)),
]


class Figures(NamedTuple):
    """Milliseconds of each convolution and of a step, and the memory of a step in GiB."""

    torch: dict[str, float]
    products: dict[str, float]
    step: float
    memory: float
    step_with_products: float = math.nan
    memory_with_products: float = math.nan


def figures(case: Case, layout: str, with_products: bool) -> Figures:
    torch.manual_seed(0)
    network = case.make().cuda().to(memory_format=FORMATS[layout])
    values = torch.randn(case.shape, device="cuda").contiguous(memory_format=FORMATS[layout])
    optimizer = torch.optim.Adam(network.parameters(), fused=True)

    def forward() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return network(values)

    def step() -> None:
        optimizer.zero_grad()
        forward().float().square().mean().backward()
        optimizer.step()

    times = measure(network, forward, math.inf)
    own, products = ({name: each[side] for name, each in times.items()} for side in (0, 1))
    found = Figures(own, products, *timed(step))
    if not with_products:
        return found
    undo = as_products(network, [name for name in own if own[name] >= MIN_GAIN * products[name]])
    found = found._replace(**dict(zip(("step_with_products", "memory_with_products"), timed(step), strict=True)))
    undo()
    return found


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """The median of some steps in milliseconds, and the most memory that they held in GiB."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    spans = []
    for number in range(3 + NUM_STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        if number >= 3:
            spans.append(begin.elapsed_time(end))
    return statistics.median(spans), torch.cuda.max_memory_allocated() / 2**30


def chosen_by_timing(layout: str) -> list[Figures]:
    """Both networks with cudnn.benchmark, in this process."""
    torch.backends.cudnn.benchmark = True
    return [figures(case, layout, with_products=False) for case in CASES]


def ask_other_process(layout: str, seconds: float) -> list[Figures | None]:
    """The same in a process of its own; nothing where it takes too long."""
    command, seconds = [sys.executable, __file__, "--autotuned", layout], max(seconds, 1.0)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{layout}, chosen by timing: stopped after {seconds:.0f} s", flush=True)
        return [None] * len(CASES)
    return [Figures(*each) for each in json.loads(done.stdout.splitlines()[-1])]


def table(case: Case, sides: dict[str, tuple[Figures, Figures | None]]) -> list[str]:
    lines = [
        f"## {case.name}",
        "",
        "| convolution | memory format | heuristic, ms | by timing, ms | products, ms | in the step |",
        "|---|---|---|---|---|---|",
    ]
    for layout, (own, other) in sides.items():
        for name, time_of_torch in own.torch.items():
            time_of_products = own.products[name]
            is_used = time_of_torch >= MIN_GAIN * time_of_products
            lines.append(
                f"| {name} | {layout} | {time_of_torch:.2f} | {shown(other and other.torch.get(name))} "
                f"| {time_of_products:.2f} | {'products' if is_used else 'torch'} |"
            )
    lines += ["", "| step | memory format | heuristic | by timing | with products |", "|---|---|---|---|---|"]
    for layout, (own, other) in sides.items():
        lines.append(
            f"| time, ms | {layout} | {own.step:.1f} | {shown(other and other.step)} | {own.step_with_products:.1f} |"
        )
        lines.append(
            f"| memory, GiB | {layout} | {own.memory:.1f} | {shown(other and other.memory)} "
            f"| {own.memory_with_products:.1f} |"
        )
    return [*lines, ""]


def shown(value: Any) -> str:
    return NONE if value is None else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="leave out what cuDNN chooses by timing")
    parser.add_argument("--autotuned", choices=FORMATS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.autotuned:
        print(json.dumps(chosen_by_timing(options.autotuned)))
        return
    begin = time.perf_counter()
    with deterministic_kernels(allow_tf32=False):
        own = {layout: [figures(case, layout, with_products=True) for case in CASES] for layout in FORMATS}
    torch.cuda.empty_cache()  # the other process needs the memory
    other: dict[str, list[Figures | None]] = {layout: [None] * len(CASES) for layout in FORMATS}
    for layout in () if options.quick else FORMATS:
        other[layout] = ask_other_process(layout, MAX_SECONDS - (time.perf_counter() - begin))
    lines = [
        f"# Convolutions on one {torch.cuda.get_device_name()}, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python benchmarks/convolutions.py{' --quick' * options.quick}`; torch {torch.__version__}, cuDNN "
        f"{torch.backends.cudnn.version()}, Python {platform.python_version()}; bf16 autocast; a convolution's time is "
        f"the best of 3 forward and backward passes, a step's the median of {NUM_STEPS}.",
        "",
    ]
    for number, case in enumerate(CASES):
        lines += table(case, {layout: (own[layout][number], other[layout][number]) for layout in FORMATS})
    text = "\n".join(lines)
    print(text)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
