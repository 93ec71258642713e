"""Learning a local density of states on a CPU: isoscale, MALA, and loops written by hand, side by side.

    python benchmarks/electronic.py --data DIR [--peer PYTHON] [--out FILE.md] [--repeats 5] [--threads 1]

DIR holds snapshots of beryllium (Be_snapshot0.in.npy and so on). Two networks, 91-100-11 and 91-400-400-201, at batches
of 40 and 1,000, trained on three snapshots (26,244 rows); Adam, mean squared error, inputs and targets scaled. Targets
of 201 energies are those of the 11 energies, drawn finer, the same for all sides. Each side is a process of its own
with the same number of threads; sides take turns. A figure is the difference of a long and a short training, so that
start-up cancels out. `training` validates 1,458 rows an epoch (all sides do), `with evaluation` 8,748.

isoscale runs with all that it does by default: rows of all snapshots shuffled together, metrics, a NaN check, a log
line every 50 steps, TensorBoard, a checkpoint every epoch. MALA is run by the Python that --peer names, with its data
set as it comes and with its fast tensor data set, which leaves out the rows of the last, smaller batch.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

LR = 1e-3
EVERY = 50
TRAIN, VAL = (0, 1, 2), 3
SMALL_VAL = 3
"""Planes of the validation snapshot where training alone is timed."""


@dataclass(frozen=True)
class Case:
    """A network, a batch, and how many epochs the short and the long training have."""

    widths: tuple[int, ...]
    batch: int
    short: int
    long: int

    @property
    def name(self) -> str:
        return f"{'-'.join(map(str, self.widths))}, batch {self.batch:,}"

    @property
    def energies(self) -> dict[str, float]:
        return {"size": self.widths[-1], "spacing": 25.0 / (self.widths[-1] - 1), "offset": -5.0}


CASES = [
    Case((91, 100, 11), 40, 1, 5),
    Case((91, 100, 11), 1000, 1, 21),
    Case((91, 400, 400, 201), 40, 1, 2),
    Case((91, 400, 400, 201), 1000, 1, 4),
]


@dataclass(frozen=True)
class Files:
    """The snapshots of a case: paths of inputs and targets."""

    inputs: list[str]
    targets: list[str]
    val_input: str
    val_target: str


def stage(data: Path, folder: Path, num_energies: int, small: bool) -> Files:
    """Write the snapshots of a case into a folder."""
    folder.mkdir()
    paths: list[tuple[str, str]] = []
    for number in (*TRAIN, VAL):
        planes = SMALL_VAL if small and number == VAL else None
        pair = (folder / f"{number}.in.npy", folder / f"{number}.out.npy")
        np.save(pair[0], np.load(data / f"Be_snapshot{number}.in.npy")[:planes])
        np.save(pair[1], finer(np.load(data / f"Be_snapshot{number}.out.npy")[:planes], num_energies))
        paths.append((str(pair[0]), str(pair[1])))
    inputs, targets = (list(each) for each in zip(*paths, strict=True))
    return Files(inputs[:-1], targets[:-1], inputs[-1], targets[-1])


def finer(ldos: Any, num_energies: int) -> Any:
    """The same states on more energies."""
    places = np.linspace(0, ldos.shape[-1] - 1, num_energies)
    low = np.minimum(places.astype(int), ldos.shape[-1] - 2)
    share = (places - low).astype(np.float32)
    return ldos[..., low] * (1 - share) + ldos[..., low + 1] * share


# The sides: each is made for a case and its files, and then trains for a number of epochs as often as it is asked.

Train = Callable[[int], None]


def network(case: Case) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[Any] = []
    for widths in pairwise(case.widths):
        layers += [nn.Linear(*widths), nn.LeakyReLU()]
    return nn.Sequential(*layers[:-1])


def scaled(files: Files) -> list[Any]:
    """Rows for training and validation, scaled once."""
    import torch

    inputs = torch.cat([torch.tensor(np.load(path)).flatten(0, 2)[:, 3:] for path in files.inputs])
    targets = torch.cat([torch.tensor(np.load(path)).flatten(0, 2) for path in files.targets])
    val_input = torch.tensor(np.load(files.val_input)).flatten(0, 2)[:, 3:]
    val_target = torch.tensor(np.load(files.val_target)).flatten(0, 2)
    mean, std, low, high = inputs.mean(0), inputs.std(0), targets.min(), targets.max()
    return [(inputs - mean) / std, (targets - low) / (high - low), (val_input - mean) / std,
            (val_target - low) / (high - low)]  # fmt: skip


def with_data_loader(case: Case, files: Files) -> Train:
    """A loop as tutorials write it."""
    import torch
    from torch.nn.functional import mse_loss
    from torch.utils.data import DataLoader, TensorDataset

    inputs, targets, val_input, val_target = scaled(files)
    loader = DataLoader(TensorDataset(inputs, targets), case.batch, shuffle=True)
    val_loader = DataLoader(TensorDataset(val_input, val_target), case.batch)

    def train(epochs: int) -> None:
        model = network(case)
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
        for _ in range(epochs):
            for batch_input, batch_target in loader:
                optimizer.zero_grad()
                mse_loss(model(batch_input), batch_target).backward()
                optimizer.step()
            with torch.no_grad():
                sum(mse_loss(model(one), other).item() * len(one) for one, other in val_loader)

    return train


def by_hand(case: Case, files: Files) -> Train:
    """The loop that an expert would write: rows by index, a fused optimizer."""
    import torch
    from torch.nn.functional import mse_loss

    inputs, targets, val_input, val_target = scaled(files)

    def train(epochs: int) -> None:
        model = network(case)
        optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
        total, step = torch.zeros(()), 0
        for _ in range(epochs):
            for index in torch.randperm(len(inputs)).split(case.batch):
                optimizer.zero_grad()
                loss = mse_loss(model(inputs[index]), targets[index])
                loss.backward()
                optimizer.step()
                total += loss.detach()
                step += 1
                if step % EVERY == 0:
                    total.item()
            with torch.no_grad():
                sum(
                    mse_loss(model(one), other).item() * len(one)
                    for one, other in zip(val_input.split(case.batch), val_target.split(case.batch), strict=True)
                )

    return train


def ours(case: Case, files: Files) -> Train:
    """isoscale, as it comes."""
    import isoscale

    def snapshots(inputs: list[str], targets: list[str]) -> list[dict[str, str]]:
        return [{"input": one, "target": other} for one, other in zip(inputs, targets, strict=True)]

    def train(epochs: int) -> None:
        keys = {
            "task.model.widths": list(case.widths), "task.energies": case.energies, "task.physics": None,
            "data.path": "/", "data.train": snapshots(files.inputs, files.targets), "data.test": None,
            "data.val": snapshots([files.val_input], [files.val_target]), "data.batch_size": case.batch,
            "optimizer.lr": LR, "train.epochs": epochs, "observe.level": "error",
            "train.threads": int(os.environ["OMP_NUM_THREADS"]),
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            isoscale.train("electronic/be2", run=Path(folder) / "run", **keys)

    return train


def peer(case: Case, files: Files, fast: bool, gpu: bool = False, graphs: bool = False) -> Train:
    """MALA 1.4: its trainer, and one of its two data sets in memory."""
    import mala

    def parameters(epochs: int) -> Any:
        found = mala.Parameters()
        found.verbosity, found.use_gpu = 0, gpu
        found.data.input_rescaling_type, found.data.output_rescaling_type = "feature-wise-standard", "minmax"
        found.data.use_fast_tensor_data_set = fast
        found.targets.target_type = "LDOS"
        found.targets.ldos_gridsize = case.widths[-1]
        found.targets.ldos_gridspacing_ev, found.targets.ldos_gridoffset_ev = case.energies["spacing"], -5
        found.network.layer_activations, found.network.layer_activations_include_output_layer = "LeakyReLU", False
        found.network.layer_sizes = list(case.widths)
        found.running.max_number_epochs, found.running.mini_batch_size = epochs, case.batch
        found.running.learning_rate, found.running.optimizer = LR, "Adam"
        if graphs:
            found.running.use_graphs = True
        return found

    def train(epochs: int) -> None:
        chosen = parameters(epochs)
        handler = mala.DataHandler(chosen)
        roles = [*zip(files.inputs, files.targets, strict=True), (files.val_input, files.val_target)]
        for number, (one, other) in enumerate(roles):
            folder = str(Path(one).parent)
            role = "tr" if number < len(files.inputs) else "va"
            handler.add_snapshot(Path(one).name, folder, Path(other).name, folder, role)
        handler.prepare_data()
        mala.Trainer(chosen, mala.Network(chosen), handler).train_network()

    return train


SIDES: dict[str, Callable[[Case, Files], Train]] = {
    "isoscale": ours,
    "written by hand, index": by_hand,
    "written by hand, DataLoader": with_data_loader,
    "MALA, fast tensor data set": lambda case, files: peer(case, files, fast=True),
    "MALA, default data set": lambda case, files: peer(case, files, fast=False),
}


def be_side(name: str) -> None:
    """Train as often as asked: lines of JSON with a case, its files and epochs in, seconds out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the side prints is no answer
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    made: tuple[str, Train] | None = None
    for line in sys.stdin:
        if made is None or made[0] != line.partition("\t")[0]:
            asked = json.loads(line.partition("\t")[0])
            case = Case(**{**asked["case"], "widths": tuple(asked["case"]["widths"])})
            made = (line.partition("\t")[0], SIDES[name](case, Files(**asked["files"])))
        begin, begin_cpu = time.perf_counter(), time.process_time()
        made[1](int(line.partition("\t")[2]))
        seconds = [time.perf_counter() - begin, time.process_time() - begin_cpu]
        print(json.dumps(seconds), file=answers, flush=True)


class Side:
    """A process that trains when it is asked."""

    def __init__(self, name: str, python: str, threads: int, log: Path) -> None:
        words = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        self.name, self._log = name, log
        self._process = subprocess.Popen(
            [python, __file__, "--side", name], env={**os.environ, **words}, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=log.open("w"), text=True, cwd=log.parent,
        )  # fmt: skip

    def train(self, case: Case, files: Files, epochs: int) -> tuple[float, float]:
        """Seconds by the clock, and of the processor."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = json.dumps({"case": asdict(case), "files": asdict(files)})
        self._process.stdin.write(f"{asked}\t{epochs}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} failed:\n{self._log.read_text()[-3000:]}")
        wall, processor = json.loads(answer)
        return wall, processor

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


Found = dict[str, list[tuple[float, float]]]


def measure(sides: list[Side], case: Case, files: Files, repeats: int) -> Found:
    """Seconds of an epoch of every side, by the clock and of the processor, repeat by repeat."""
    found: Found = {side.name: [] for side in sides}
    for repeat in range(repeats + 1):
        for side in sides:
            short, long = side.train(case, files, case.short), side.train(case, files, case.long)
            if repeat:  # the first one warms up
                pair = [(b - a) / (case.long - case.short) for a, b in zip(short, long, strict=True)]
                found[side.name].append((pair[0], pair[1]))
                print(f"  {case.name:32s} {side.name:28s} {pair[0]:7.3f} s {pair[1]:7.3f} s", flush=True)
    return found


NUM_ROWS = 3 * 18 * 18 * 27


def table(training: Found, whole: Found) -> list[str]:
    """Rows a second by wall time of training, processor time beside it, and the ratio to ours."""
    lines = [
        "| side | rows/s, training | min–max | of processor time | rows/s, with evaluation | isoscale is faster by |",
        "|---|---|---|---|---|---|",
    ]
    for name, times in training.items():
        rates = [NUM_ROWS / wall for wall, _ in times]
        processor = statistics.median(NUM_ROWS / cpu for _, cpu in times)
        with_evaluation = statistics.median(NUM_ROWS / wall for wall, _ in whole[name])
        ratio = statistics.median(one / own for (_, one), (_, own) in zip(times, training["isoscale"], strict=True))
        lines.append(
            f"| {name} | {statistics.median(rates):,.0f} | {min(rates):,.0f}–{max(rates):,.0f} | {processor:,.0f} "
            f"| {with_evaluation:,.0f} | {ratio:.2f}× |"
        )
    return lines


def main() -> None:
    """Measure all cases and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pythons = {name: options.peer if "MALA" in name else sys.executable for name in SIDES}
        sides = [Side(name, python, options.threads, Path(scratch) / f"{number}.log")
                 for number, (name, python) in enumerate(pythons.items()) if python]  # fmt: skip
        lines = []
        for number in options.cases:
            case = CASES[number]
            small, full = (stage(options.data, Path(scratch) / f"{number}-{small}", case.widths[-1], small)
                           for small in (True, False))  # fmt: skip
            training = measure(sides, case, small, options.repeats)
            whole = measure(sides, case, full, max(2, options.repeats // 2))
            lines += [f"## {case.name}", "", *table(training, whole), ""]
            write(options, lines)
        for side in sides:
            side.close()
    print("\n".join(lines))


def write(options: argparse.Namespace, lines: list[str]) -> None:
    """Put what is known into the file."""
    import torch

    import isoscale

    out = options.out or Path(__file__).parent / "results" / f"{time.strftime('%Y-%m-%d')}-electronic.md"
    text = [
        f"# Learning a local density of states on a CPU, {time.strftime('%Y-%m-%d')}", "",
        f"`python benchmarks/electronic.py --repeats {options.repeats} --threads {options.threads}`; "
        f"{platform.machine()}, {options.threads} thread{'s' * (options.threads > 1)} for every side, Python "
        f"{platform.python_version()}, torch {torch.__version__}, MALA 1.4.0, isoscale {isoscale.__version__}; median "
        f"of {options.repeats} repeats in which the sides take turns; {NUM_ROWS:,} rows an epoch.", "",
        "isoscale runs with everything on: shuffle over all snapshots, metrics, NaN check, log every 50 steps, "
        "TensorBoard, a checkpoint every epoch; the loops by hand do none of it but the shuffle. `faster by`: the "
        "median over repeats of the ratio of processor times in training.", "",
    ]  # fmt: skip
    out.write_text("\n".join([*text, *lines]))


if __name__ == "__main__":
    if "--side" in sys.argv:
        be_side(sys.argv[sys.argv.index("--side") + 1])
    else:
        main()
