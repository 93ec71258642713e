"""Training a Deep Potential of water on a CPU: isoscale and DeePMD-kit, side by side, from one input file.

    python benchmarks/potentials.py --data DIR [--peer DP] [--out FILE.md] [--repeats 3] [--steps 60] [--threads 1 2]

DIR holds DeePMD-kit's water example: input_torch.json and water/data_0 to data_3. Both sides train what the file says
(se_e2_a, 192 atoms, a frame a step) for a few steps, in double and in single precision, each in a process of its own
with the same number of threads; they take turns. Both write their learning curve every 20 steps, after three
validation frames. The clock, and the processor's time of all threads and children, are read when the line of step 20
appears in it and when the last one does: start-up is not counted.

isoscale runs with all that it does by default. DP is the command of DeePMD-kit (PyTorch backend), by default the `dp`
that the shell finds; without it only isoscale is timed. It runs without its neighbour statistics, and both sides find
the statistics of the descriptor in a file after their first start.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

EVERY = 20
"""Steps between lines of the learning curves; those before the first one warm up."""
PRECISIONS = {"64": "float64", "32": "float32"}


class Moment(NamedTuple):
    """Seconds by the clock, and of the processor."""

    wall: float
    processor: float


@dataclass(frozen=True)
class Found:
    """What a training took: seconds for 100 steps, and from the start of the process to the first line."""

    wall: float
    processor: float
    start: float
    own: float | None = None
    """By the side's own log, where it says so."""


@dataclass(frozen=True)
class Side:
    """A program that trains from the input file."""

    name: str
    command: list[str]
    env: dict[str, str]


def input_file(data: Path, precision: str, steps: int, folder: Path) -> Path:
    """The example's input, shortened."""
    asked: dict[str, Any] = json.loads((data / "input_torch.json").read_text())
    for part in ("descriptor", "fitting_net"):
        asked["model"][part]["precision"] = PRECISIONS[precision]
    training = asked["training"]
    for part in ("training_data", "validation_data"):
        systems = [str(data.resolve() / "water" / Path(name).name) for name in training[part]["systems"]]
        training[part]["systems"] = systems
    last = EVERY + steps + 1  # one more, so that the process is still there when the last line is seen
    training |= {"numb_steps": last, "disp_freq": EVERY, "stat_file": str(folder / "statistics.hdf5")}
    asked["learning_rate"]["stop_lr"] = asked["learning_rate"]["start_lr"]
    path = folder / "input.json"
    path.write_text(json.dumps(asked))
    return path


def sides(peer: str | None, threads: int) -> list[Side]:
    """Both sides, or ours alone."""
    count = str(threads)
    env = {**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    own = Path(sys.executable).with_name("isoscale")
    found = [Side("isoscale", [str(own), "train", "input.json", "--run", "run"], env)]
    if peer:
        more = {"DP_INTRA_OP_PARALLELISM_THREADS": count, "DP_INTER_OP_PARALLELISM_THREADS": "1"}
        found.append(Side("DeePMD-kit", [peer, "--pt", "train", "input.json", "--skip-neighbor-stat"], {**env, **more}))
    return found


def train(side: Side, folder: Path, steps: int) -> Found:
    """One training, watched from outside."""
    curve = folder / ("run/lcurve.out" if side.name == "isoscale" else "lcurve.out")
    shutil.rmtree(folder / "run", ignore_errors=True)
    curve.unlink(missing_ok=True)
    begin = time.perf_counter()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(side.command, env=side.env, cwd=folder, stdout=log, stderr=log)
        try:
            first = wait_for(EVERY, curve, process)
            last = wait_for(EVERY + steps, curve, process)
            process.wait(120)
        finally:
            process.kill()
    text = (folder / "log.txt").read_text()
    if first is None or last is None:
        raise SystemExit(f"{side.name} failed:\n{text[-3000:]}")
    own = re.search(r"average training time: ([\d.]+) s/batch", text)
    wall, processor = (100 * (b - a) / steps for a, b in zip(first, last, strict=True))
    return Found(wall, processor, first.wall - begin, 100 * float(own[1]) if own else None)


def wait_for(step: int, curve: Path, process: "subprocess.Popen[bytes]") -> Moment | None:
    """When the line of a step appears, or None if the process ends before."""
    while True:
        if has_line(step, curve):
            return Moment(time.perf_counter(), processor_seconds(process.pid))
        if process.poll() is not None:
            return None
        time.sleep(0.01)


def has_line(step: int, curve: Path) -> bool:
    """Whether a learning curve has got as far as a step."""
    lines = curve.read_text().splitlines() if curve.exists() else []
    return any(line.split()[:1] == [str(step)] for line in lines)


def processor_seconds(pid: int) -> float:
    """Of a process, all of its threads, and its children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children")
                    for child in file.read_text().split()]  # fmt: skip
    except OSError:
        return 0.0
    own = sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return own + sum(processor_seconds(child) for child in children)


Trials = dict[str, list[Found]]


def measure(data: Path, peer: str | None, precision: str, threads: int, options: argparse.Namespace) -> Trials:
    """All repeats of one setting, sides in turn; a first round, which is not counted, fills caches."""
    with tempfile.TemporaryDirectory() as scratch:
        both = sides(peer, threads)
        found: Trials = {side.name: [] for side in both}
        folders = {side.name: Path(scratch) / side.name for side in both}
        for folder in folders.values():
            folder.mkdir()
        for repeat in range(options.repeats + 1):
            steps = options.steps if repeat else EVERY
            for side in both:
                input_file(data, precision, steps, folders[side.name])
                trial = train(side, folders[side.name], steps)
                if repeat:
                    found[side.name].append(trial)
                    print(f"  {precision}, {threads} thread(s), {side.name:11s} {trial}", flush=True)
    return found


def table(trials: Trials) -> list[str]:
    """Medians and ranges; the ratio is the median of those of each repeat."""
    lines = [
        "| side | s for 100 steps | min–max | of processor time | by its own log | to step 20, s "
        "| isoscale is faster by | of processor time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in trials.items():
        walls = [trial.wall for trial in found]
        own = [trial.own for trial in found if trial.own is not None]
        lines.append(
            f"| {name} | {statistics.median(walls):.1f} | {min(walls):.1f}–{max(walls):.1f} "
            f"| {middle(found, 'processor'):.1f} | {f'{statistics.median(own):.1f}' if own else ''} "
            f"| {middle(found, 'start'):.1f} | {ratio(found, trials['isoscale'], 'wall'):.2f}× "
            f"| {ratio(found, trials['isoscale'], 'processor'):.2f}× |"
        )
    return lines


def middle(found: Sequence[Found], field: str) -> float:
    """The median of something over repeats."""
    return statistics.median(getattr(trial, field) for trial in found)


def ratio(found: Sequence[Found], ours: Sequence[Found], field: str) -> float:
    """The median over repeats of how much more a side took than ours in the same repeat."""
    return statistics.median(getattr(a, field) / getattr(b, field) for a, b in zip(found, ours, strict=True))


def versions(peer: str | None) -> str:
    """What ran."""
    import torch

    import isoscale

    said = f"Python {platform.python_version()}, torch {torch.__version__}, isoscale {isoscale.__version__}"
    if not peer:
        return f"{said}; DeePMD-kit is not installed, so isoscale ran alone"
    done = subprocess.run([peer, "--version"], capture_output=True, text=True, check=False)
    return f"{said}, {(done.stdout.strip().splitlines() or ['DeePMD-kit'])[-1]} with its PyTorch backend"


def main() -> None:
    """Measure all settings and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer", default=shutil.which("dp"), metavar="DP")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help=f"a multiple of {EVERY}")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    options = parser.parse_args()
    if options.peer is None:
        print("DeePMD-kit is not installed (--peer names its `dp`): isoscale alone")
    date = time.strftime("%Y-%m-%d")
    out = options.out or Path(__file__).parent / "results" / f"{date}-potentials.md"
    lines = [
        f"# A Deep Potential of water on a CPU, {date}", "",
        f"`python benchmarks/potentials.py --repeats {options.repeats} --steps {options.steps}`; {platform.machine()}, "
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the start, {versions(options.peer)}; "
        f"median of {options.repeats} repeats in which the sides take turns, {options.steps} steps each after "
        f"{EVERY} of warm-up.", "",
        "DeePMD-kit's example from its own input file: se_e2_a, 192 atoms, a frame a step, three validation frames "
        "every 20 steps. isoscale runs with everything on. `to step 20`: from the start of the process, with caches "
        "filled. `faster by`: the median over repeats of the ratio in the same repeat.", "",
    ]  # fmt: skip
    for precision in options.precisions:
        for threads in options.threads:
            trials = measure(options.data, options.peer, precision, threads, options)
            lines += [f"## float{precision}, {threads} thread{'s' * (threads > 1)}", "", *table(trials), ""]
            out.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
