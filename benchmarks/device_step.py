"""Time of a training step on an accelerator, side by side with a hand-written graph and with Lightning.

    python benchmarks/device_step.py [--out FILE.md] [--repeats 5] [--quick]

Two networks: 784-128-256-10 (cross entropy, batch 128, 60,000 rows) and 91-100-11 (mean squared error, batch 40,
34,992 rows); Adam, learning rate scheduled, loss accumulated, logged every 50 steps on every side. Sides by hand and
isoscale: the difference of two trainings of different length, so that start-up and capture cancel out (compiled steps:
the median of their logging windows, because compilation takes too long to cancel); Lightning: steady steps inside one
fit, see lightning_side.py. Sides are interleaved, and the median over the repeats is shown.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import isoscale

EVERY = 50
LR = 1e-3


@dataclass
class Case:
    """A network and its data."""

    name: str
    widths: list[int]
    batch_size: int
    num_rows: int
    classify: bool

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for number, (width_in, width_out) in enumerate(zip(self.widths[:-1], self.widths[1:], strict=True)):
            layers += [nn.Linear(width_in, width_out)] + [nn.ReLU()] * (number < len(self.widths) - 2)
        return nn.Sequential(*layers)

    def rows(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.num_rows, self.widths[0], generator=generator)
        if self.classify:
            return inputs, torch.randint(0, self.widths[-1], (self.num_rows,), generator=generator)
        return inputs, torch.randn(self.num_rows, self.widths[-1], generator=generator)

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return nn.functional.cross_entropy if self.classify else nn.functional.mse_loss


CASES = [
    Case("784-128-256-10, batch 128", [784, 128, 256, 10], 128, 60_000, True),
    Case("91-100-11, batch 40", [91, 100, 11], 40, 34_992, False),
]


def schedule(step: int) -> float:
    """The learning rate on the hand-written sides."""
    return LR * 0.999 ** (step // EVERY)


def by_hand_graphed(case: Case) -> Callable[[int], float]:
    """A whole-step graph of 50 steps as an expert would write it: returns seconds for a number of steps."""
    device = torch.device("cuda")
    model = case.network().to(device)
    inputs, targets = (tensor.to(device) for tensor in case.rows())
    rates = torch.full((EVERY,), LR, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(LR, device=device), fused=True, capturable=True)
    total = torch.zeros((), dtype=torch.float64, device=device)
    chosen = torch.zeros(EVERY * case.batch_size, dtype=torch.int64, device=device)

    def step(number: int) -> None:
        optimizer.param_groups[0]["lr"] = rates[number]
        index = chosen[number * case.batch_size : (number + 1) * case.batch_size]
        optimizer.zero_grad()
        loss = case.loss(model(inputs.index_select(0, index)), targets.index_select(0, index))
        loss.backward()
        optimizer.step()
        total.add_(loss.detach())

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(EVERY):
                step(number)

    def run(num_steps: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        position, order = 0, torch.randperm(case.num_rows, device=device)
        for start in range(0, num_steps, EVERY):
            if position + len(chosen) > case.num_rows:
                position, order = 0, torch.randperm(case.num_rows, device=device)
            chosen.copy_(order[position : position + len(chosen)])
            rates.copy_(torch.tensor([schedule(start + k) for k in range(EVERY)]).pin_memory(), non_blocking=True)
            graph.replay()
            position += len(chosen)
            total.item()
            total.zero_()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    run(5 * EVERY)
    keep = step, model, optimizer, inputs, targets  # the graph knows only addresses
    return lambda num_steps: run(num_steps) if keep else 0.0


def by_hand_eager(case: Case, batches: Iterator[Any], device: str = "cuda") -> Callable[[int], float]:
    """A plain loop over endless batches: returns seconds for a number of steps, which later calls go on from."""
    model = case.network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    total = torch.zeros((), dtype=torch.float64, device=device)

    def run(num_steps: int) -> float:
        wait_for(device)
        begin = time.perf_counter()
        for number in range(num_steps):
            inputs, targets = (tensor.to(device, non_blocking=True) for tensor in next(batches))
            optimizer.param_groups[0]["lr"] = schedule(number)
            optimizer.zero_grad()
            loss = case.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total.add_(loss.detach())
            if number % EVERY == EVERY - 1:
                total.item()
        wait_for(device)
        return time.perf_counter() - begin

    return run


def wait_for(device: str) -> None:
    """The clock is read with the device at rest."""
    if device == "cuda":
        torch.cuda.synchronize()


def fit(case: Case, program: str, precision: str, residency: str, num_steps: int, folder: Path) -> isoscale.Run:
    """isoscale with everything a user has by default: shuffle, metrics.jsonl, TensorBoard, NaN check, log every 50."""
    inputs, targets = case.rows()
    recipe = {
        "data": {"batch_size": case.batch_size, "residency": residency},
        "optimizer": {"name": "adam", "lr": LR},
        "schedule": {"name": "exponential", "gamma": 0.999, "every": EVERY},
        "train": {"steps": num_steps, "epochs": None, "program": program, "precision": precision},
        "checkpoint": {"every": "never"},
        "observe": {"every": EVERY, "level": "error"},
    }
    task = isoscale.Supervised(case.network(), "cross_entropy" if case.classify else "mse")
    return isoscale.Trainer(recipe, run=folder / "run").fit(task, {"input": inputs, "target": targets})


def ours(case: Case, program: str, precision: str = "32", residency: str = "device") -> Callable[[int], float]:
    """Seconds of a training with isoscale."""

    def run(num_steps: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            fit(case, program, precision, residency, num_steps, Path(folder))
            torch.cuda.synchronize()
            return time.perf_counter() - begin

    return run


def by_windows(case: Case, program: str) -> Callable[[int], float]:
    """Microseconds a step of a training with isoscale, as the median of its logging windows in the second half."""

    def run(num_steps: int) -> float:
        torch.compiler.reset()
        with tempfile.TemporaryDirectory() as folder:
            rates = fit(case, program, "32", "device", num_steps, Path(folder)).history("time/samples_per_second")
            return 1e6 * case.batch_size / statistics.median(rate for step, rate in rates if step > num_steps // 2)

    return run


class Resident:
    """Batches of resident tensors, in the form of a data loader: the best data path that Lightning can have."""

    def __init__(self, case: Case, device: str = "cuda") -> None:
        self.inputs, self.targets = (tensor.to(device) for tensor in case.rows())
        self.batch_size = case.batch_size

    def __len__(self) -> int:
        return len(self.inputs) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.inputs), device=self.inputs.device)
        for index in order[: len(self) * self.batch_size].split(self.batch_size):
            yield self.inputs[index], self.targets[index]


def data_loader(case: Case, workers: int = 4, device: str = "cuda") -> Any:
    """A DataLoader at sensible settings, of whole batches."""
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(
        TensorDataset(*case.rows()), case.batch_size, shuffle=True, drop_last=True, num_workers=workers,
        pin_memory=device == "cuda", persistent_workers=workers > 0,
    )  # fmt: skip


def forever(loader: Any) -> Iterator[Any]:
    """Batches without an end."""
    while True:
        yield from loader


def with_lightning(
    case: Case, loader: Any, device: str = "cuda", warmup: int = 100, barebones: bool = False
) -> Callable[[int], float]:
    """Microseconds a step of Lightning's Trainer."""
    from lightning_side import Module, step_seconds  # beside this file

    def run(num_steps: int) -> float:
        rates = None if barebones else schedule
        module = Module(case.network(), case.loss, LR, rates, logs=not barebones)
        return 1e6 * step_seconds(module, loader, warmup, num_steps, device)

    return run


def measure(sides: dict[str, tuple[Callable[[int], float], int | None, int]], repeats: int) -> dict[str, list[float]]:
    """Microseconds a step of every side in turn: the difference of a long and a short training, or what it says."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name, (run, short, long) in sides.items():
            if "compiled" in name and repeat >= 2:  # minutes of compilation each
                continue
            try:
                found[name].append(run(long) if short is None else 1e6 * (run(long) - run(short)) / (long - short))
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
                continue
            print(f"  repeat {repeat + 1}  {name:44s} {found[name][-1]:9.1f} us", flush=True)
    return found


def sides_of(case: Case, quick: bool) -> dict[str, tuple[Callable[[int], float], int | None, int]]:
    """Every side, with the two lengths it is timed at."""
    fast, slow = (500, 10_500), (100, 1_100)
    sides = {
        # captured anew each time: Lightning frees the workspaces that an older graph would still use
        "graph written by hand": (lambda num_steps: by_hand_graphed(case)(num_steps), *fast),
        "isoscale, graphed": (ours(case, "graphed"), *fast),
        "isoscale, graphed, host residency": (ours(case, "graphed", residency="host"), *fast),
        "isoscale, graphed, tf32 (the default)": (ours(case, "auto", "auto"), *fast),
        "loop written by hand, eager": (by_hand_eager(case, forever(Resident(case))), *slow),
        "isoscale, eager": (ours(case, "eager"), *slow),
        "Lightning Trainer, DataLoader": (with_lightning(case, data_loader(case)), None, 1_000),
        "Lightning Trainer, resident data": (with_lightning(case, Resident(case)), None, 1_000),
    }
    if not quick:
        sides["isoscale, compiled"] = (by_windows(case, "compiled"), None, 2_000)
        sides["isoscale, compiled and graphed"] = (by_windows(case, "compiled+graphed"), None, 5_000)
    return sides


def table(results: dict[str, list[float]]) -> str:
    """Median, range and ratio of every side."""
    hand = statistics.median(results["graph written by hand"])
    lines = ["| side | µs a step (median) | min–max | against the hand-written graph |", "|---|---|---|---|"]
    for name, times in results.items():
        if times:
            median = statistics.median(times)
            lines.append(f"| {name} | {median:.1f} | {min(times):.1f}–{max(times):.1f} | {median / hand:.2f}× |")
    return "\n".join(lines)


def main() -> None:
    """Measure all cases and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="leave out what compiles")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    import lightning

    text = [
        "# A training step on the accelerator", "",
        f"{time.strftime('%Y-%m-%d')}, {torch.cuda.get_device_name()}, {platform.processor() or platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, lightning {lightning.__version__}, "
        f"isoscale {isoscale.__version__}; {options.repeats} repeats, sides interleaved, float32 where not said.",
        "", "`" + " ".join(["python", *sys.argv]) + "`", "",
    ]  # fmt: skip
    for case in CASES:
        print(case.name, flush=True)
        text += [f"## {case.name}", "", table(measure(sides_of(case, options.quick), options.repeats)), ""]
    print("\n".join(text))
    if options.out:
        options.out.write_text("\n".join(text))


if __name__ == "__main__":
    main()
