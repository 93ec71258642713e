"""What it costs to gather the rows of a batch inside a captured step, on a GPU.

    python benchmarks/data_device.py [--out FILE.md] [--repeats 3]

The network 91-400-400-201 (mean squared error, Adam) at batch 1,000 on a million rows in the device's memory, captured
50 steps at a time. The phases of a step are told apart by events on the device, which are part of the graph; an event
takes about 1.3 µs, which each phase includes. Rows are gathered for all steps of a launch at once, as isoscale does
where there is room, or step by step. Training on one batch that lies ready would be no fair comparison: the fused Adam
of torch 2.11 takes half the time when gradients vanish.
"""

import argparse
import platform
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import isoscale
from isoscale.data.feeds import device as device_feed
from isoscale.engine.diagnose.profile import Marks, Profile
from isoscale.runs.open import Given, open_run
from isoscale.runs.session import Session

NUM_ROWS, BATCH, EVERY, STEPS = 1_000_000, 1000, 50, 1500
WIDTHS = [91, 400, 400, 201]
PHASES = ("data", "forward", "backward", "optimizer")


def task() -> isoscale.Supervised:
    torch.manual_seed(0)
    layers = [layer for widths in pairwise(WIDTHS) for layer in (nn.Linear(*widths), nn.ReLU())]
    return isoscale.Supervised(nn.Sequential(*layers[:-1]), "mse")


class Phases(Profile):
    """Keeps the times of replayed steps alone."""

    seen: dict[str, list[float]] = {}

    def replayed(self, marks: Marks) -> None:
        marks[-1][1].synchronize()
        for (_, earlier), (phase, event) in pairwise(marks):
            if phase:
                self.seen.setdefault(phase, []).append(1000 * earlier.elapsed_time(event))


def phases(data: Any, precision: str, launch_bytes: int) -> dict[str, float]:
    """Mean microseconds of each phase."""
    recipe = {
        "data": {"batch_size": BATCH, "residency": "device"},
        "train": {"steps": STEPS, "epochs": None, "program": "graphed", "precision": precision},
        "checkpoint": {"every": "never", "monitor": "train/loss_epoch"},
        "observe": {"every": EVERY, "tensorboard": 0, "level": "error"},
    }
    before, device_feed.LAUNCH_BYTES = device_feed.LAUNCH_BYTES, launch_bytes
    Phases.seen = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            Session(open_run(recipe, {}, Path(folder) / "run", Given(task(), data), profile=True)).train()
    finally:
        device_feed.LAUNCH_BYTES = before
    return {phase: statistics.mean(Phases.seen[phase]) for phase in PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    Profile.replayed = Phases.replayed  # type: ignore[method-assign]
    Profile.seen = property(lambda self: Phases.seen)  # type: ignore[attr-defined]
    data = isoscale.Sources(train={"input": torch.randn(NUM_ROWS, 91), "target": torch.randn(NUM_ROWS, 201)})
    sides = {"all steps of a launch at once": device_feed.LAUNCH_BYTES, "step by step": 0}
    rows = []
    for precision in ("tf32", "32"):
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for _ in range(options.repeats):
            for name, launch_bytes in sides.items():
                found[name].append(phases(data, precision, launch_bytes))
        for name, times in found.items():
            mean = {phase: statistics.median(time[phase] for time in times) for phase in PHASES}
            rest = sum(mean.values()) - mean["data"]
            cells = " | ".join(f"{mean[phase]:.1f} µs" for phase in PHASES)
            rows.append(f"| {precision}, {name} | {cells} | {100 * mean['data'] / rest:.1f} % |")
            print(rows[-1], flush=True)
    lines = [
        f"# Gathering rows in a captured step, on one {torch.cuda.get_device_name()}, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python benchmarks/data_device.py --repeats {options.repeats}`; torch {torch.__version__}, Python "
        f"{platform.python_version()}; 91-400-400-201, batch {BATCH:,}, {NUM_ROWS:,} rows, {STEPS:,} steps a run.",
        "",
        "| rows gathered | gather | forward | backward | optimizer | the gather adds |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
