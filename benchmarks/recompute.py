"""Activation checkpointing of a 3-D U-Net: time of a step and peak of memory with `train.recompute`.

    python benchmarks/recompute.py [--out FILE.md] [--size 128] [--width 16] [--batch 2] [--steps 32]

Four levels, two convolutions with batch norm at each, strided convolutions down, transposed ones up, skip connections;
mean squared error on random volumes, Adam, float32 (tf32 products on CUDA). The budget lies halfway between what
activations take at most and at least, as `train.recompute` measures them. A time is the median over the last logging
windows, which start-up and capture are not in; the peak is that of a whole training, as torch's allocator counts it.
Every training must end with the same weights. Without a device it runs on the CPU, where memory is not measured.
"""

import argparse
import gc
import platform
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import isoscale
from isoscale.engine.diagnose.memory import size as in_words
from isoscale.engine.step.activations import best, measure, pieces_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EVERY = 4
NUM_WINDOWS = 4
"""The last ones, of which the median is taken."""
NUM_LEVELS = 4
PROGRAMS = ("eager", "graphed") if DEVICE.type == "cuda" else ("eager",)


def block(width_in: int, width: int) -> nn.Sequential:
    """Two convolutions with batch norm."""
    layers: list[nn.Module] = []
    for first, last in ((width_in, width), (width, width)):
        layers += [nn.Conv3d(first, last, 3, padding=1, bias=False), nn.BatchNorm3d(last), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """From one channel to one, with as many more channels at each level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(NUM_LEVELS)]
        pairs = list(pairwise(widths))
        self.encoder = nn.ModuleList([block(1, width), *(block(wide, wide) for _, wide in pairs)])
        self.down = nn.ModuleList([nn.Conv3d(narrow, wide, 2, 2) for narrow, wide in pairs])
        self.up = nn.ModuleList([nn.ConvTranspose3d(wide, narrow, 2, 2) for narrow, wide in reversed(pairs)])
        self.decoder = nn.ModuleList([block(2 * narrow, narrow) for narrow, _ in reversed(pairs)])
        self.head = nn.Conv3d(width, 1, 1)

    def forward(self, values: Tensor) -> Tensor:
        values = self.encoder[0](values)
        skips = []
        for down, encoder in zip(self.down, self.encoder[1:], strict=True):
            skips.append(values)
            values = encoder(down(values))
        for up, decoder in zip(self.up, self.decoder, strict=True):
            values = decoder(torch.cat([skips.pop(), up(values)], 1))
        return self.head(values)


def task(width: int) -> isoscale.Supervised:
    torch.manual_seed(0)
    return isoscale.Supervised(UNet(width), "mse")


def volumes(edge: int, batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, 4 * batch, 1, edge, edge, edge, generator=generator)
    return {"input": inputs, "target": targets}


def measured(width: int, edge: int, batch: int) -> tuple[int, int]:
    """Bytes that activations take: all of them, and with `all`."""
    made = task(width).to(DEVICE)
    rows = {name: tensor[:batch].to(DEVICE) for name, tensor in volumes(edge, batch).items()}
    pieces = pieces_of(made)
    found = measure(made, made.training_step, rows, 0, pieces)
    return found.peak(()), found.peak(best(found, made, pieces))


def trained(
    wanted: str, program: str, data: dict[str, Tensor], arguments: argparse.Namespace
) -> tuple[float, int, int, str, float]:
    """Milliseconds a step, peaks of allocated and reserved memory, the hash of the weights, seconds of all of it."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    recipe = {
        "data": {"batch_size": arguments.batch}, "train": {
            "steps": arguments.steps, "epochs": None, "recompute": wanted, "program": program, "evaluate": "never",
        },
        "observe": {"every": EVERY, "tensorboard": 0, "level": "info"}, "checkpoint": {"every": "never"},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = isoscale.Trainer(recipe, run=Path(folder) / "run")
        run = trainer.fit(task(arguments.width), isoscale.Sources(train=data))
        rates = [rate for _, rate in run.history("time/samples_per_second")][-NUM_WINDOWS:]
        weights = str(run.summary()["weights_sha256"])
    peaks = (0, 0)
    if DEVICE.type == "cuda":
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return arguments.batch / statistics.median(rates) * 1e3, *peaks, weights, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table to this Markdown file")
    parser.add_argument("--size", type=int, default=128, help="edge of a volume")
    parser.add_argument("--width", type=int, default=16, help="channels of the first level")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32, help="of each training, a multiple of 4")
    arguments = parser.parse_args()
    whole, least = measured(arguments.width, arguments.size, arguments.batch)
    budget = f"{(whole + least) // 2 / 1e6:.3f} MB"
    data = volumes(arguments.size, arguments.batch)
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or "CPU"
    lines = [
        f"# Activation checkpointing of a 3-D U-Net on {device}, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python benchmarks/recompute.py --size {arguments.size} --width {arguments.width} --batch {arguments.batch} "
        f"--steps {arguments.steps}`; torch {torch.__version__}, Python {platform.python_version()}. One training "
        f"each, and a time is the median of its last {NUM_WINDOWS} windows of {EVERY} steps.",
        "",
        f"Activations as `train.recompute` measures them: {in_words(whole)} without, {in_words(least)} with `all`; the "
        f"budget is `{budget}`.",
        "",
        "| program | `train.recompute` | ms a step | peak allocated | peak reserved | all of it |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    hashes = set()
    for program in PROGRAMS:
        for wanted in ("none", "all", budget):
            spent, allocated, reserved, weights, seconds = trained(wanted, program, data, arguments)
            hashes.add(weights)
            peaks = f"{in_words(allocated)} | {in_words(reserved)}"
            lines.append(f"| {program} | {wanted} | {spent:.1f} | {peaks} | {seconds:.0f} s |")
            print(lines[-1], flush=True)
    same = "All trainings ended with the same weights." if len(hashes) == 1 else f"THE WEIGHTS DIFFER: {hashes}"
    lines += ["", same]
    print(f"\n{same}")
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
