"""Training a Deep Potential of water on a GPU: time of a step, captured and eager, and the whole example to its end.

    python benchmarks/potentials_device.py --data DIR --out FOLDER [--parts …] [--budget 450] [--smoke]

DIR holds water/data_0 to data_3 (DeePMD-kit's example: 192 atoms, 320 frames to train on, 80 to validate). All goes
through the ordinary engine, from the preset potentials/water. `steps`: batches of 1, 8 and 32 frames in double and
single precision, each as one captured program and eagerly; the first interval holds statistics, capture and warm-up and
is left out; a figure is the median of the others. `example`: 100,000 steps of one frame, with validation on three
frames every 100 steps, checkpoints and a learning curve; at its end all 80 validation frames are tested. Where the time
left would not do, it has fewer steps, over which the learning rate falls as far, and the result says so.

Neighbours are found by vesin, once: where it is not installed, PYTHONPATH may name a folder that has it.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import isoscale

PEER = """DeePMD-kit 3.2.0 (PyTorch backend, one process) on the same type of card, measured before and not in this run:
29.4 ms a step at a batch of 1 in float64, 33.9 ms in float32, and 34.3 ms at a batch of 8 in float32. Its documented
table (TensorFlow, unnamed card) has 68.9 frames/s on one card."""
PEER_MS = {(1, "64"): 29.4, (1, "32"): 33.9, (8, "32"): 34.3}
STEPS = {"auto": 500, "eager": 150}
"""How long the trainings are whose steps are timed, by their program."""
EVERY = 50
"""Steps between readings of the clock."""
EXAMPLE = 100_000
PARTS = ["steps", "compiled", "example"]
SMOKE_STEPS = {"auto": 9, "eager": 9}


@dataclass(frozen=True)
class Case:
    """A batch and a precision."""

    batch: int
    precision: str


@dataclass(frozen=True)
class Found:
    """What a training took and gave."""

    milliseconds: float
    spread: tuple[float, float]
    losses: dict[int, float]
    program: str


class Clock:
    """How much of the time that was given is left."""

    def __init__(self, budget: float) -> None:
        self._end = time.monotonic() + budget

    def left(self) -> float:
        return self._end - time.monotonic()


def settings(data: Path, device: str) -> dict[str, Any]:
    """What all trainings have in common."""
    systems = [str(data.resolve() / "water" / f"data_{number}") for number in range(4)]
    return {
        "data.train": systems[:3], "data.val": systems[3:], "train.device": device, "observe.level": "error",
        "observe.tensorboard": 0,
    }  # fmt: skip


def time_steps(case: Case, program: str, num_steps: int, common: dict[str, Any]) -> Found:
    """A short training without validation, timed by its own record."""
    every = min(EVERY, num_steps // 3)
    with tempfile.TemporaryDirectory() as folder:
        run = isoscale.train("potentials/water", run=Path(folder) / "run", **{
            **common, "data.batch_size": case.batch, "train.precision": case.precision, "train.program": program,
            "train.steps": num_steps, "train.evaluate": f"{10 * num_steps} steps", "train.limit_val_batches": 1,
            "schedule.end": 1e-3, "checkpoint.every": "never", "observe.every": every, "observe.curve": None,
        })  # fmt: skip
        rates = [rate for step, rate in run.history("time/samples_per_second") if step > every]
        losses = dict(run.history("train/force_rmse"))
        chosen = str(run.record["decided"]["program"])
    times = [1000 * case.batch / rate for rate in rates]
    return Found(statistics.median(times), (min(times), max(times)), losses, chosen)


def attempt(case: Case, program: str, num_steps: int, common: dict[str, Any]) -> Found | str:
    """The same, or why it is not known; one broken case must not cost the others."""
    try:
        found: Found | str = time_steps(case, program, num_steps, common)
    except Exception as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
    print(f"  {case}, {program}: {found}", flush=True)
    return found


def steps_part(cases: list[Case], common: dict[str, Any], lengths: dict[str, int], clock: Clock) -> list[str]:
    """The table of times."""
    lines = [
        "| batch | precision | program | ms a step | min–max | frames/s | eager, ms | faster by | DeePMD-kit, ms "
        "| training force RMSE beside eager |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        if clock.left() < 30:
            lines.append(f"| {case.batch} | {case.precision} | no time was left for it | | | | | | | |")
            continue
        captured, eager = (attempt(case, program, lengths[program], common) for program in ("auto", "eager"))
        lines.append(row(case, captured, eager))
    return [*lines, ""]


def compiled_part(cases: list[Case], common: dict[str, Any], num_steps: int, clock: Clock) -> list[str]:
    """Steps that are compiled before they are captured."""
    lines = ["Compiled by torch.compile first (`train.program=compiled+graphed`):", ""]
    lines += ["| batch | precision | ms a step | min–max |", "|---|---|---|---|"]
    for case in cases:
        found = attempt(case, "compiled+graphed", num_steps, common) if clock.left() > 60 else "no time was left"
        words = (
            found
            if isinstance(found, str)
            else f"{found.milliseconds:.2f} | {found.spread[0]:.2f}–{found.spread[1]:.2f}"
        )
        lines.append(f"| {case.batch} | {case.precision} | {words} |")
    return [*lines, ""]


def row(case: Case, captured: Found | str, eager: Found | str) -> str:
    """One line of the table."""
    if not isinstance(captured, Found) or not isinstance(eager, Found):
        return f"| {case.batch} | {case.precision} | {captured} | {eager} | | | | | | |"
    peer = PEER_MS.get((case.batch, case.precision))
    low, high = captured.spread
    return (
        f"| {case.batch} | {case.precision} | {captured.program} | {captured.milliseconds:.2f} | {low:.2f}–{high:.2f} "
        f"| {1000 * case.batch / captured.milliseconds:,.0f} | {eager.milliseconds:.2f} "
        f"| {eager.milliseconds / captured.milliseconds:.1f}× | {peer or ''} | {agreement(captured, eager)} |"
    )


def agreement(captured: Found, eager: Found) -> str:
    """How far the curves of two programs are apart where both have a point over the same steps."""
    first = sorted(set(captured.losses) & set(eager.losses))
    if not first:
        return "no common step"
    step = first[-1]
    change = abs(captured.losses[step] / eager.losses[step] - 1)
    return f"step {step}: {f'{change:.1e} apart' if change else 'equal to the bit'}"


def example_part(precision: str, num_steps: int, common: dict[str, Any], every: int, clock: Clock) -> list[str]:
    """The example's training, timed from start to end, and its errors."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = isoscale.train("potentials/water", run=Path(folder) / "run", **{
            **common, "train.precision": precision, "train.steps": num_steps, "train.evaluate": f"{every} steps",
            "observe.every": every, "checkpoint.every": f"{max(1, num_steps // 10)} steps",
        })  # fmt: skip
        seconds = time.perf_counter() - begin
        print(f"  example, {precision}: {seconds:.0f} s, {clock.left():.0f} s left", flush=True)
        errors = isoscale.test(run, checkpoint="last", role="val", device=common["train.device"])
        curves = [dict(run.history(f"val/{name}_rmse")) for name in ("force", "energy")]
        program = run.record["decided"]["program"]
    said = ", ".join(f"{name.removeprefix('val/')} {value:.4g}" for name, value in errors.items() if "_" in name)
    return [
        f"### float{precision}", "",
        f"{num_steps:,} steps in {seconds:.0f} s with everything (start, statistics, {num_steps // every:,} "
        f"validations, checkpoints): {1000 * seconds / num_steps:.2f} ms a step; program {program}.", "",
        f"All 80 validation frames with the last weights: {said} (eV/Å; eV per atom).", "",
        "| step | force RMSE (3 validation frames), eV/Å | energy RMSE, eV per atom |", "|---|---|---|",
        *(f"| {step:,} | {curves[0][step]:.4f} | {curves[1][step]:.5f} |"
          for step in sorted(marks(num_steps) & curves[0].keys())), "",
    ]  # fmt: skip


def marks(num_steps: int) -> set[int]:
    """Steps of the curve that are shown: powers of ten with their halves and fifths, and every tenth part."""
    early = {base * factor for base in (100, 1000, 10_000) for factor in (1, 2, 5)}
    return {step for step in early if step <= num_steps} | {num_steps * part // 10 for part in range(1, 11)}


def affordable(precision: str, common: dict[str, Any], clock: Clock, most: int) -> int:
    """How many steps of the example the time left is enough for, in thousands, by what a step takes."""
    found = time_steps(Case(1, precision), "auto", STEPS["auto"], common)
    seconds = (found.milliseconds * 1.15 + 0.15) / 1000  # validation and checkpoints on top
    return min(most, int(max(1.0, clock.left() - 45) / seconds) // 1000 * 1000)


def header(options: argparse.Namespace, device: str) -> list[str]:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU (a rehearsal: no figures to quote)"
    return [
        f"# A Deep Potential of water on one {name}, {time.strftime('%Y-%m-%d')}", "",
        f"`python benchmarks/potentials_device.py --parts {' '.join(options.parts)} --budget {options.budget:.0f}`; "
        f"Python {platform.python_version()}, torch {torch.__version__}, isoscale {isoscale.__version__}; se_e2_a, 192 "
        "atoms, 1,014,182 parameters.", "", PEER, "",
    ]  # fmt: skip


def main() -> None:
    """Measure what was asked for and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["steps", "example"])
    parser.add_argument("--precisions", nargs="+", choices=["64", "32"], default=["64"], help="of the example")
    parser.add_argument("--budget", type=float, default=450, help="seconds for all of it")
    parser.add_argument("--smoke", action="store_true", help="everything once, tiny, on a CPU")
    options = parser.parse_args()
    clock, device = Clock(options.budget), "cpu" if options.smoke else "cuda"
    common = settings(options.data, device)
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out / f"{time.strftime('%Y-%m-%d')}-potentials-{'smoke' if options.smoke else 'device'}.md"
    text = header(options, device)

    def add(lines: list[str]) -> None:
        text.extend(lines)
        out.write_text("\n".join(text) + "\n")  # what is known is kept, whatever happens next

    if "steps" in options.parts:
        batches, lengths = ((1, 2), SMOKE_STEPS) if options.smoke else ((1, 8, 32), STEPS)
        cases = [Case(batch, precision) for precision in ("64", "32") for batch in batches]
        add(["## Steps", "", *steps_part(cases, common, lengths, clock)])
    if "compiled" in options.parts:
        cases = [Case(batch, precision) for precision in ("64", "32") for batch in (1, 8)]
        add(compiled_part(cases, common, STEPS["auto"], clock))
    if "example" in options.parts:
        add(["## The example", ""])
        for precision in options.precisions:
            num_steps = 10 if options.smoke else affordable(precision, common, clock, EXAMPLE)
            if num_steps:
                add(example_part(precision, num_steps, common, 5 if options.smoke else 100, clock))
            else:
                add([f"No time was left for float{precision}.", ""])
    print("\n".join(text))


if __name__ == "__main__":
    sys.exit(main())
