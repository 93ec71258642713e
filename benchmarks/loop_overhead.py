"""What the loop itself costs: a training step of a tiny network on a CPU, against a loop written by hand.

    python benchmarks/loop_overhead.py [--out FILE.md] [--repeats 25]

Linear(8, 8), batch 8, fused Adam on every side, and the same duties: samples shuffled, loss accumulated, learning rate
scheduled every step, both written to a file every 50 steps. Each figure is the difference of a long and a short
training, so that start-up cancels out, in processor time of the process; sides are interleaved within each repeat.
"""

import argparse
import json
import logging
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import isoscale

NUM_ROWS, WIDTH, BATCH, EVERY, LR = 4096, 8, 8, 50, 1e-3
SHORT, LONG = 200, 2200


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(NUM_ROWS, WIDTH, generator=generator) for _ in range(2))  # type: ignore[return-value]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def rate(step: int, num_steps: int) -> float:
    return LR * (1 - step / num_steps)


def loop(num_steps: int, folder: Path, model: Any, optimizer: Any, backward: Callable[[Tensor], None]) -> None:
    """The loop that an expert would write."""
    inputs, targets = rows()
    total = torch.zeros((), dtype=torch.float64)
    position, order = NUM_ROWS, torch.empty(0)
    with (folder / "log.jsonl").open("w") as log:
        for step in range(num_steps):
            if position + BATCH > NUM_ROWS:
                position, order = 0, torch.randperm(NUM_ROWS)
            index = order[position : position + BATCH]
            position += BATCH
            optimizer.param_groups[0]["lr"] = rate(step, num_steps)
            optimizer.zero_grad()
            loss = mse_loss(model(inputs[index]), targets[index])
            backward(loss)
            optimizer.step()
            total.add_(loss.detach())
            if step % EVERY == EVERY - 1:
                log.write(json.dumps({"step": step, "loss": total.item() / EVERY, "lr": rate(step, num_steps)}) + "\n")
                total.zero_()


def by_hand(num_steps: int, folder: Path) -> None:
    """The loop with nothing around it."""
    model = network()
    loop(num_steps, folder, model, torch.optim.Adam(model.parameters(), lr=LR, fused=True), Tensor.backward)


def ours(num_steps: int, folder: Path) -> None:
    """isoscale, eager."""
    inputs, targets = rows()
    recipe = {
        "data": {"batch_size": BATCH},
        "optimizer": {"name": "adam", "lr": LR},
        "schedule": {"name": "linear"},
        "train": {"steps": num_steps, "epochs": None, "program": "eager", "threads": 1},
        "checkpoint": {"every": "never"},
        "observe": {"every": EVERY, "tensorboard": 0, "level": "error"},
    }
    task = isoscale.Supervised(network(), "mse")
    isoscale.Trainer(recipe, run=folder / "run").fit(task, {"input": inputs, "target": targets})


def lightning_trainer(num_steps: int, folder: Path) -> None:
    """Lightning's Trainer with the same duties, the rest off."""
    from lightning_side import Module, fit  # beside this file

    module = Module(network(), mse_loss, LR, lambda step: rate(step, num_steps))
    fit(module, DataLoader(TensorDataset(*rows()), BATCH, shuffle=True, drop_last=True), num_steps, "cpu", [])


def fabric(num_steps: int, folder: Path) -> None:
    """The same loop with Lightning Fabric around model, optimizer and backward."""
    from lightning.fabric import Fabric

    around = Fabric(accelerator="cpu")
    model = network()
    model, optimizer = around.setup(model, torch.optim.Adam(model.parameters(), lr=LR, fused=True))
    loop(num_steps, folder, model, optimizer, around.backward)


SIDES: dict[str, Callable[[int, Path], None]] = {
    "written by hand": by_hand,
    "isoscale, eager": ours,
    "Lightning Fabric": fabric,
    "Lightning Trainer": lightning_trainer,
}


def seconds(side: Callable[[int, Path], None], num_steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin = time.process_time()
        side(num_steps, Path(folder))
        return time.process_time() - begin


class Counting(TorchDispatchMode):
    """Counts tensor operations, those of the backward pass and of the optimizer included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations(side: Callable[[int, Path], None]) -> Counter[str]:
    """Tensor operations of 500 steps, as the difference of two trainings."""
    found = []
    for num_steps in (100, 600):
        with tempfile.TemporaryDirectory() as folder, Counting() as counting:
            side(num_steps, Path(folder))
        found.append(counting.counts)
    return Counter({name: count - found[0][name] for name, count in found[1].items() if count > found[0][name]})


def extra_operations() -> list[str]:
    """What isoscale does besides the hand-written loop, and the other way round, per step."""
    hand, own = operations(by_hand), operations(ours)
    lines = [
        f"Tensor operations a step: {hand.total() / 500:.2f} by hand, {own.total() / 500:.2f} in isoscale.",
        "",
        "| operation | by hand | isoscale |",
        "|---|---|---|",
    ]
    for name in sorted(hand.keys() | own.keys()):
        if abs(hand[name] - own[name]) >= 25:
            lines.append(f"| `{name}` | {hand[name] / 500:.2f} | {own[name] / 500:.2f} |")
    return lines


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    import lightning

    torch.set_num_threads(1)  # processor time would count threads that only wait
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for repeat in range(options.repeats + 1):
        for name, side in SIDES.items():
            step = 1e6 * (seconds(side, LONG) - seconds(side, SHORT)) / (LONG - SHORT)
            if repeat:  # the first one warms up
                times[name].append(step)
    text = [
        "# What the loop costs",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, one thread, "
        f"Python {platform.python_version()}, torch {torch.__version__}, lightning {lightning.__version__}, "
        f"isoscale {isoscale.__version__}; {options.repeats} interleaved repeats of {LONG - SHORT} steps.",
        "",
        "| side | µs a step (median) | min–max | against the hand-written loop (median of repeats) |",
        "|---|---|---|---|",
    ]
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, times["written by hand"], strict=True))
        span = f"{min(values):.1f}–{max(values):.1f}"
        text.append(f"| {name} | {statistics.median(values):.1f} | {span} | {ratio:.3f}× |")
    text += ["", *extra_operations(), ""]
    print("\n".join(text))
    if options.out:
        options.out.write_text("\n".join(text))


if __name__ == "__main__":
    sys.exit(main())
