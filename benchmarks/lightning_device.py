"""Lightning's Trainer beside a loop written by hand and isoscale, on the same data, in one run.

    python benchmarks/lightning_device.py [--out FOLDER] [--repeats 5] [--budget 130] [--device cpu] [--smoke]

The networks, data and duties of device_step.py, in float32. Loops by hand and Lightning: 500 steady steps after 100
others of the same training, between two readings of the clock with the device at rest (see lightning_side.py).
isoscale: 500 steps (eager) or 5,000 (graphed) of one training, by the `time/seconds` that it logs, with all that it
does by default but checkpoints. That clock does not wait for the device: at a log line the host may be two windows of
50 steps ahead, which is 20 % (eager) and 2 % (graphed) of the time in the worst case, and cancels where it is as far
ahead at both readings; an eager step of these networks keeps the host busy, not the device. Whole rounds over all sides
are repeated, after one that is not counted, as long as there is time for another.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from device_step import CASES, Case, Resident, by_hand_eager, data_loader, fit, forever, with_lightning

import isoscale

HERE = Path(__file__).parent
Name = tuple[str, str]
"""Of a case and a side."""


def by_hand(case: Case, batches: Iterator[Any], device: str, warmup: int, num_steps: int) -> float:
    """Microseconds a step of the loop by hand."""
    run = by_hand_eager(case, batches, device)
    run(warmup)
    return 1e6 * run(num_steps) / num_steps


def ours(case: Case, program: str, moments: tuple[int, int]) -> float:
    """Microseconds a step of isoscale, between two steps at which it logs."""
    with tempfile.TemporaryDirectory() as folder:
        run = fit(case, program, "32", "device", moments[1], Path(folder))
        seconds, decided = dict(run.history("time/seconds")), run.record["decided"]["program"]
    assert decided == program, f"asked for {program}, got {decided}"
    assert max(seconds) == moments[1], f"{max(seconds)} steps were trained instead of {moments[1]}"
    return 1e6 * (seconds[moments[1]] - seconds[moments[0]]) / (moments[1] - moments[0])


def sides_of(case: Case, device: str, workers: int, smoke: bool) -> dict[str, Callable[[], float]]:
    """Every side of a case, as a call that measures it once."""
    warmup, num_steps = (50, 100) if smoke else (100, 500)
    resident, loader = Resident(case, device), data_loader(case, workers, device)

    def peer(batches: Any, barebones: bool = False) -> float:
        return with_lightning(case, batches, device, warmup, barebones)(num_steps)

    sides = {
        "loop by hand, resident": lambda: by_hand(case, forever(resident), device, warmup, num_steps),
        "loop by hand, DataLoader": lambda: by_hand(case, forever(loader), device, warmup, num_steps),
        "Lightning Trainer, resident": lambda: peer(resident),
        "Lightning Trainer, DataLoader": lambda: peer(loader),
        "Lightning Trainer, resident, barebones": lambda: peer(resident, barebones=True),
        "isoscale, eager": lambda: ours(case, "eager", (warmup, warmup + num_steps)),
    }
    if device == "cuda":
        sides["isoscale, graphed"] = lambda: ours(case, "graphed", (500, 1_500 if smoke else 5_500))
    return sides


def measure(sides: dict[Name, Callable[[], float]], repeats: int, budget: float) -> dict[Name, list[float]]:
    """Microseconds a step of every side, a round over all of them at a time."""
    found: dict[Name, list[float]] = {name: [] for name in sides}
    begin = time.perf_counter()
    for repeat in range(repeats + 1):
        if repeat > 1 and (time.perf_counter() - begin) * (repeat + 1) / repeat > budget:
            break
        for name, side in sides.items():
            microseconds = side()
            if repeat:
                found[name].append(microseconds)
            print(
                f"  {f'repeat {repeat}' if repeat else 'warm-up '}  {', '.join(name):65s} {microseconds:9.1f} µs",
                flush=True,
            )
    return found


def table(results: dict[str, list[float]]) -> list[str]:
    """Median, range, and ratio to the loop over resident data."""
    hand = statistics.median(results["loop by hand, resident"])
    lines = ["| side | µs a step (median) | min–max | against the loop by hand, resident |", "|---|---|---|---|"]
    for name, times in results.items():
        median = statistics.median(times)
        lines.append(f"| {name} | {median:,.1f} | {min(times):,.1f}–{max(times):,.1f} | {median / hand:.2f}× |")
    return lines


def main() -> None:
    """Measure both networks and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="a folder")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=float, default=130, help="seconds for all rounds")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--workers", type=int, default=4, help="processes of a DataLoader")
    parser.add_argument("--smoke", action="store_true", help="few steps: a rehearsal")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    sides = {
        (case.name, name): side
        for case in CASES
        for name, side in sides_of(case, options.device, options.workers, options.smoke).items()
    }
    found = measure(sides, options.repeats, options.budget)
    num_repeats = len(next(iter(found.values())))
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    text = [
        f"# Lightning's Trainer beside a loop by hand, {device}, {time.strftime('%Y-%m-%d')}", "",
        f"`python benchmarks/lightning_device.py --repeats {options.repeats} --device {options.device} "
        f"--workers {options.workers}{' --smoke' if options.smoke else ''}`; Python {platform.python_version()}, torch "
        f"{torch.__version__}, lightning {lightning.__version__}, isoscale {isoscale.__version__}; "
        f"{torch.get_num_threads()} CPU threads; {num_repeats} repeats in rounds over all sides, float32.", "",
        f"`DataLoader`: {options.workers} workers. `barebones`: Lightning's mode for measuring the Trainer itself; it "
        "neither logs nor schedules, all other sides do.", "",
    ]  # fmt: skip
    for case in CASES:
        text += [
            f"## {case.name}",
            "",
            *table({name: found[case.name, name] for of, name in found if of == case.name}),
            "",
        ]
    options.out.mkdir(parents=True, exist_ok=True)
    name = device.split()[-1].lower()
    out = options.out / f"{time.strftime('%Y-%m-%d')}-lightning-{name}{'-smoke' if options.smoke else ''}.md"
    out.write_text("\n".join(text))
    print("\n".join(text), f"written to {out}", sep="\n")


if __name__ == "__main__":
    main()
