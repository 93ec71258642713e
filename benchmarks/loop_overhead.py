"""What the loop itself costs: a training step of small networks on a CPU, against a loop written by hand.

    python benchmarks/loop_overhead.py [--out FILE.md] [--repeats 25] [--alone] [--case linear --case network …]

Fused Adam on every side, and the same duties: samples shuffled, loss accumulated, learning rate scheduled every step,
both written to a file every 50 steps. Each figure is the difference of a long and a short training, so that start-up
cancels out, in processor time of the process; sides are interleaved within each repeat. With `--alone`, Lightning is
left out.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import isoscale

NUM_ROWS, EVERY, LR = 4096, 50, 1e-3
SHORT, LONG = 200, 2200


@dataclass
class Case:
    """A network, and the shapes of its samples."""

    title: str
    make: Callable[[], nn.Module]
    batch: int
    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    def rows(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(NUM_ROWS, *self.inputs, generator=generator)
        return inputs, torch.randn(NUM_ROWS, *self.targets, generator=generator)

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(91, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 11))


def _convolutions() -> nn.Module:
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


CASES = {
    "linear": Case("Linear(8, 8), batch 8", lambda: nn.Linear(8, 8), 8, (8,), (8,)),
    "network": Case("91-100-100-11, batch 40", _layers, 40, (91,), (11,)),
    "convolutions": Case("two convolutions of 8 channels, 8×8 pixels, batch 32", _convolutions, 32, (1, 8, 8), (10,)),
}


def rate(step: int, num_steps: int) -> float:
    return LR * (1 - step / num_steps)


def loop(
    case: Case, num_steps: int, folder: Path, model: Any, optimizer: Any, backward: Callable[[Tensor], None]
) -> None:
    """The loop that an expert would write."""
    inputs, targets = case.rows()
    total = torch.zeros((), dtype=torch.float64)
    position, order = NUM_ROWS, torch.empty(0)
    with (folder / "log.jsonl").open("w") as log:
        for step in range(num_steps):
            if position + case.batch > NUM_ROWS:
                position, order = 0, torch.randperm(NUM_ROWS)
            index = order[position : position + case.batch]
            position += case.batch
            optimizer.param_groups[0]["lr"] = rate(step, num_steps)
            optimizer.zero_grad()
            loss = mse_loss(model(inputs[index]), targets[index])
            backward(loss)
            optimizer.step()
            total.add_(loss.detach())
            if step % EVERY == EVERY - 1:
                log.write(json.dumps({"step": step, "loss": total.item() / EVERY, "lr": rate(step, num_steps)}) + "\n")
                total.zero_()


def by_hand(case: Case, num_steps: int, folder: Path) -> None:
    """The loop with nothing around it."""
    model = case.network()
    loop(case, num_steps, folder, model, torch.optim.Adam(model.parameters(), lr=LR, fused=True), Tensor.backward)


def ours(case: Case, num_steps: int, folder: Path) -> None:
    """isoscale, eager."""
    inputs, targets = case.rows()
    recipe = {
        "data": {"batch_size": case.batch, "drop_last": True},
        "optimizer": {"name": "adam", "lr": LR},
        "schedule": {"name": "linear"},
        "train": {"steps": num_steps, "epochs": None, "program": "eager", "threads": 1},
        "checkpoint": {"every": "never"},
        "observe": {"every": EVERY, "tensorboard": 0, "level": "error"},
    }
    task = isoscale.Supervised(case.network(), "mse")
    isoscale.Trainer(recipe, run=folder / "run").fit(task, {"input": inputs, "target": targets})


def lightning_trainer(case: Case, num_steps: int, folder: Path) -> None:
    """Lightning's Trainer with the same duties, the rest off."""
    from lightning_side import Module, fit  # beside this file

    module = Module(case.network(), mse_loss, LR, lambda step: rate(step, num_steps))
    fit(module, DataLoader(TensorDataset(*case.rows()), case.batch, shuffle=True, drop_last=True), num_steps, "cpu", [])


def fabric(case: Case, num_steps: int, folder: Path) -> None:
    """The same loop with Lightning Fabric around model, optimizer and backward."""
    from lightning.fabric import Fabric

    around = Fabric(accelerator="cpu")
    model = case.network()
    model, optimizer = around.setup(model, torch.optim.Adam(model.parameters(), lr=LR, fused=True))
    loop(case, num_steps, folder, model, optimizer, around.backward)


SIDES: dict[str, Callable[[Case, int, Path], None]] = {
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


def extra_operations(case: Case) -> list[str]:
    """What isoscale does besides the hand-written loop, and the other way round, per step."""
    hand, own = operations(partial(by_hand, case)), operations(partial(ours, case))
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
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--case", action="append", choices=CASES)
    options = parser.parse_args()
    sides = {name: side for name, side in SIDES.items() if not (options.alone and "Lightning" in name)}
    peer = ""
    if not options.alone:
        import lightning

        peer = f", lightning {lightning.__version__}"
        logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # processor time would count threads that only wait
    text = [
        "# What the loop costs",
        "",
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, one thread, "
        f"Python {platform.python_version()}, torch {torch.__version__}{peer}, "
        f"isoscale {isoscale.__version__}; {options.repeats} interleaved repeats of {LONG - SHORT} steps.",
        "",
    ]
    for case in (CASES[name] for name in options.case or CASES):
        text += [
            f"## {case.title}",
            "",
            "| side | µs a step (median) | min–max | against the hand-written loop (median of repeats) |",
            "|---|---|---|---|",
        ]
        times: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(options.repeats + 1):
            for name, side in sides.items():
                one = partial(side, case)
                step = 1e6 * (seconds(one, LONG) - seconds(one, SHORT)) / (LONG - SHORT)
                if repeat:  # the first one warms up
                    times[name].append(step)
        for name, values in times.items():
            ratio = statistics.median(a / b for a, b in zip(values, times["written by hand"], strict=True))
            span = f"{min(values):.1f}–{max(values):.1f}"
            text.append(f"| {name} | {statistics.median(values):.1f} | {span} | {ratio:.3f}× |")
        text += ["", *extra_operations(case), ""]
    print("\n".join(text))
    if options.out:
        options.out.write_text("\n".join(text))


if __name__ == "__main__":
    sys.exit(main())
