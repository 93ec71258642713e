"""Learning a local density of states on a GPU: time of a step beside loops and Lightning, and equal validation losses.

    python benchmarks/electronic_device.py --out FOLDER [--data DIR] [--peer-path DIR] [--budget 480] [--smoke]

Networks and batches of the field on random rows that fit the device (91 descriptors; 11 or 201 energies). Every side
trains with fused Adam and TF32 where not said. isoscale runs with all that it does by default: rows shuffled over the
whole data, metrics, a NaN check, a log line every 50 steps, TensorBoard, validation and a checkpoint every epoch, in a
run directory on the disk. Its first epoch holds capture and warm-up and is left out. `steps` is what the steps of the
later epochs took, `all` what the epochs took with validation and checkpoints. Other sides: steady steps of one
training after others that are not counted, between two readings of the clock with the device at rest.

DIR holds snapshots of beryllium (Be_snapshot0.in.npy and so on). On them, trainings with other programs, precisions
and places of the data are compared with each other and with other seeds. --peer-path is a folder from which MALA can
be imported. Parts that no time is left for are left out, and said.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import isoscale

EVERY, LR = 50, 1e-3
PEER = """MALA 1.4.0 on the same type of card (rows of beryllium, 3 snapshots; measured before, not in this run):

| network, batch | settings | µs a step |
|---|---|---|
| 91-100-11, 54 (it enlarged 40) | fast data set, graphs | 670 |
| 91-100-11, 54 (it enlarged 40) | fast data set, graphs, mixed precision | 963 |
| 91-400-400-11, 1,000 | as it comes | 8,677 |
| 91-400-400-11, 1,000 | fast data set | 2,089 |
| 91-400-400-11, 1,458 (it enlarged 1,000) | fast data set, graphs | 1,249 |
| 91-400-400-11, 1,458 (it enlarged 1,000) | fast data set, graphs, mixed precision | 1,726 |
"""


@dataclass(frozen=True)
class Case:
    """A network with its batch, and how long it is trained."""

    widths: tuple[int, ...]
    batch: int
    steps: int
    """Of an epoch of isoscale."""
    slow: tuple[int, int]
    """Steps of sides whose data path is slow: those before the clock starts, and where it stops."""
    eager: tuple[int, int]
    """The same for eager loops over resident data."""
    extra: tuple[str, ...] = ()
    """Precisions to try besides the default."""

    @property
    def name(self) -> str:
        return f"{'-'.join(map(str, self.widths))}, batch {self.batch:,}"

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        layers = [layer for widths in pairwise(self.widths) for layer in (nn.Linear(*widths), nn.LeakyReLU())]
        return nn.Sequential(*layers[:-1])


CASES = [
    Case((91, 100, 11), 40, 10_000, (100, 500), (100, 1100)),
    Case((91, 400, 400, 201), 1000, 3_000, (20, 120), (100, 1100)),
    Case((91, 400, 400, 201), 8192, 1_500, (5, 30), (50, 550), ("bf16",)),
    Case((91, 4000, 4000, 201), 8192, 300, (5, 25), (20, 120), ("bf16", "32")),
]
SMOKE = [Case((91, 20, 11), 40, 100, (5, 15), (5, 25)), Case((91, 20, 201), 500, 50, (2, 6), (5, 15), ("bf16",))]


class Rows:
    """Random rows, made once."""

    def __init__(self, num_rows: int, num_val: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(num_rows + num_val, 91, generator=generator)
        self._targets = torch.rand(num_rows + num_val, 201, generator=generator)
        self._num_rows = num_rows

    def training(self, case: Case) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        return self._inputs[: self._num_rows], self._targets[: self._num_rows, : case.widths[-1]].contiguous()

    def validation(self, case: Case) -> tuple[Tensor, Tensor]:
        """The same, of other rows."""
        return self._inputs[self._num_rows :], self._targets[self._num_rows :, : case.widths[-1]].contiguous()


@dataclass(frozen=True)
class Found:
    """Microseconds a step: of the steps alone, and with all that happens between them."""

    steps: float
    all: float | None = None


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def difference(train: Callable[[int], None], lengths: tuple[int, int], device: str) -> Found:
    """The time of a step, from two trainings of different length."""
    seconds = []
    for num_steps in lengths:
        wait_for(device)
        begin = time.perf_counter()
        train(num_steps)
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    return Found(1e6 * (seconds[1] - seconds[0]) / (lengths[1] - lengths[0]))


def forever(batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        yield from batches()


def loop(
    case: Case, batches: Iterator[Any], moments: tuple[int, int], device: str, precision: torch.dtype | None = None
) -> Found:
    """The loop that a careful user writes, between two moments, counted in steps."""
    model = case.network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    total = torch.zeros((), device=device)
    begin = 0.0
    for step in range(moments[1]):
        if step == moments[0]:
            wait_for(device)
            begin = time.perf_counter()
        inputs, targets = (each.to(device, non_blocking=True) for each in next(batches))
        optimizer.zero_grad()
        with torch.autocast(device, precision, enabled=precision is not None):
            loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if step % EVERY == EVERY - 1:
            total.item()
    wait_for(device)
    return Found(1e6 * (time.perf_counter() - begin) / (moments[1] - moments[0]))


def loader_of(case: Case, rows: Rows, device: str) -> DataLoader:
    """A DataLoader over tensors, as tutorials use it."""
    return DataLoader(TensorDataset(*rows.training(case)), case.batch, shuffle=True, pin_memory=device == "cuda")


def with_loader(case: Case, rows: Rows, device: str) -> Found:
    """The loop over a DataLoader."""
    return loop(case, forever(loader_of(case, rows, device).__iter__), case.slow, device)


def resident(case: Case, rows: Rows, device: str, precision: torch.dtype | None = None) -> Found:
    """The loop over rows on the device, drawn by index."""
    inputs, targets = (each.to(device) for each in rows.training(case))

    def batches() -> Iterator[Any]:
        for index in torch.randperm(len(inputs), device=device).split(case.batch):
            yield inputs[index], targets[index]

    return loop(case, forever(batches), case.eager, device, precision)


def with_lightning(case: Case, rows: Rows, device: str) -> Found:
    """Lightning's Trainer with a DataLoader."""
    from lightning_side import Module, step_seconds  # beside this file

    warmup, end = case.slow
    module = Module(case.network(), mse_loss, LR)
    return Found(1e6 * step_seconds(module, loader_of(case, rows, device), warmup, end - warmup, device))


def ours(case: Case, rows: Rows, program: str, precision: str, epochs: int) -> Found:
    """isoscale, as it comes."""
    steps = case.steps if program != "eager" else min(case.steps, case.eager[1])
    recipe = {
        "data": {"batch_size": case.batch, "samples_per_epoch": steps * case.batch, "eval_batch_size": 8192},
        "optimizer": {"name": "adam", "lr": LR},
        "train": {"epochs": epochs + 1, "program": program, "precision": precision},
        "observe": {"every": EVERY, "level": "error"},
    }
    names = ("input", "target")
    data = isoscale.Sources(
        train=dict(zip(names, rows.training(case), strict=True)),
        val=dict(zip(names, rows.validation(case), strict=True)),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = isoscale.Trainer(recipe, run=Path(folder) / "run").fit(isoscale.Supervised(case.network(), "mse"), data)
        rates = [rate for step, rate in run.history("time/samples_per_second") if step > steps]
        ends = dict(run.history("time/seconds"))  # the last one of a step is that of its evaluation
    seconds = statistics.mean(case.batch / rate for rate in rates)
    return Found(1e6 * seconds, 1e6 * (ends[(epochs + 1) * steps] - ends[steps]) / (epochs * steps))


def sides_of(case: Case, rows: Rows, device: str) -> dict[str, Callable[[], Found]]:
    """Every side of a case."""
    epochs = 2
    sides: dict[str, Callable[[], Found]] = {
        "isoscale": lambda: ours(case, rows, "auto", "auto", epochs),
        **{f"isoscale, {precision}": lambda p=precision: ours(case, rows, "auto", p, epochs)
           for precision in case.extra},
        "isoscale, program=eager": lambda: ours(case, rows, "eager", "auto", 1),
        "loop by hand, resident": lambda: resident(case, rows, device),
        "loop by hand, DataLoader": lambda: with_loader(case, rows, device),
        "Lightning Trainer, DataLoader": lambda: with_lightning(case, rows, device),
    }  # fmt: skip
    if "bf16" in case.extra:
        sides["loop by hand, resident, bf16"] = lambda: resident(case, rows, device, torch.bfloat16)
    return sides


class Clock:
    """How much of the time that was given is left."""

    def __init__(self, budget: float) -> None:
        self._end = time.monotonic() + budget

    def left(self) -> float:
        return self._end - time.monotonic()


def measured(name: str, side: Callable[[], Found]) -> Found | str:
    """What a side takes, or why that is not known; one broken side must not cost the others."""
    begin = time.perf_counter()
    try:
        found: Found | str = side()
    except Exception as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(f"  {name:34s} {found}  ({time.perf_counter() - begin:.1f} s)", flush=True)
    return found


def speed(case: Case, rows: Rows, device: str, repeats: int, clock: Clock) -> list[str]:
    """The table of a case: the medians of the repeats, sides in turn."""
    print(case.name, flush=True)
    found: dict[str, list[Found | str]] = {}
    for repeat in range(repeats):
        for name, side in sides_of(case, rows, device).items():
            if clock.left() > 20 and not (repeat and "DataLoader" in name):
                found.setdefault(name, []).append(measured(name, side))
    base = next((each.steps for each in found.get("isoscale", []) if isinstance(each, Found)), None)
    lines = ["| side | µs a step: steps | all | isoscale is faster by |", "|---|---|---|---|"]
    for name, times in found.items():
        good = [each for each in times if isinstance(each, Found)]
        if not good:
            lines.append(f"| {name} | {times[0]} | | |")
            continue
        steps = statistics.median(each.steps for each in good)
        everything = [each.all for each in good if each.all is not None]
        whole = f"{statistics.median(everything):,.1f}" if everything else ""
        ratio = f"{steps / base:.2f}×" if base else ""
        lines.append(f"| {name} | {steps:,.1f} | {whole} | {ratio} |")
    return [f"## {case.name}", "", *lines, ""]


@dataclass(frozen=True)
class Switches:
    """One way to run the same training."""

    program: str = "auto"
    precision: str = "auto"
    residency: str = "device"

    def __str__(self) -> str:
        return f"{self.program}, {self.precision}, {self.residency}"


def all_switches(device: str) -> list[Switches]:
    """The ordinary one, then one switch at a time, then all the rest."""
    programs = ("graphed", "eager") if device == "cuda" else ("eager",)
    precisions = ("tf32", "32", "bf16") if device == "cuda" else ("32", "bf16")
    every = [Switches(p, q, r) for p in programs for q in precisions for r in ("device", "host", "disk")]
    return sorted(
        every, key=lambda one: sum(a != b for a, b in zip(str(one).split(), str(every[0]).split(), strict=True))
    )


def final_loss(data: Path, switches: Switches, seed: int, epochs: int) -> float:
    """The validation loss at the end of a training on beryllium."""
    with tempfile.TemporaryDirectory() as folder:
        run = isoscale.train("electronic/be2", run=Path(folder) / "run", **{
            "seed": seed, "data.path": str(data), "data.train": [f"Be_snapshot{number}" for number in range(3)],
            "data.val": ["Be_snapshot3"], "data.test": None, "data.batch_size": 1000, "task.physics": None,
            "train.epochs": epochs, "train.program": switches.program, "train.precision": switches.precision,
            "data.residency": switches.residency, "checkpoint.every": "never", "observe.level": "error",
            "observe.tensorboard": 0,
        })  # fmt: skip
        return float(run.metrics["val/loss"])


def equal_losses(data: Path, device: str, seeds: int, epochs: int, clock: Clock) -> list[str]:
    """Final validation losses for every switch and seed, as long as there is time."""
    found: dict[Switches, list[float]] = {}
    longest = 0.0
    for switches in all_switches(device):
        for seed in range(seeds):
            if clock.left() < 5 + 2 * longest:
                break
            begin = time.perf_counter()
            try:
                found.setdefault(switches, []).append(final_loss(data, switches, seed, epochs))
            except Exception:
                traceback.print_exc()
            longest = max(longest, time.perf_counter() - begin)
        print(f"  {switches}: {found.get(switches)}", flush=True)
    return loss_table({switches: losses for switches, losses in found.items() if len(losses) == seeds})


def loss_table(found: dict[Switches, list[float]]) -> list[str]:
    if not found:
        return ["No time was left for it.", ""]
    plain = next(iter(found.values()))
    lines = ["| program, precision, data on | final validation loss by seed | mean | largest change of a seed's loss |",
             "|---|---|---|---|"]  # fmt: skip
    for switches, losses in found.items():
        change = max(abs(one / other - 1) for one, other in zip(losses, plain, strict=True))
        values = ", ".join(f"{loss:.4e}" for loss in losses)
        words = f"{100 * change:.3f} %" if change else "none, to the bit"
        lines.append(f"| {switches} | {values} | {statistics.mean(losses):.4e} | {words} |")
    by_seed = statistics.stdev(plain) if len(plain) > 1 else 0.0
    means = [statistics.mean(losses) for losses in found.values()]
    by_switch = statistics.stdev(means) if len(means) > 1 else 0.0
    return [*lines, "", f"Deviation between seeds: {by_seed:.2e} ({100 * by_seed / statistics.mean(plain):.2f} %); "
            f"between the means of the switches: {by_switch:.2e} "
            f"({100 * by_switch / statistics.mean(plain):.3f} %).", ""]  # fmt: skip


def peer_side(electronic: Any, case: Any, data: Path, fast: bool, graphs: bool) -> Found:
    """The time of a step of MALA, from two trainings of one and three epochs."""
    with tempfile.TemporaryDirectory() as folder:
        files = electronic.stage(data, Path(folder) / "data", case.widths[-1], True)
        train = electronic.peer(case, files, fast, gpu=True, graphs=graphs)
        return Found(difference(train, (1, 3), "cuda").steps / -(-electronic.NUM_ROWS // case.batch))


def peer_in_this_run(data: Path, where: Path, clock: Clock) -> list[str]:
    """MALA here and now, on the rows of beryllium."""
    import electronic  # beside this file

    sys.path.insert(0, str(where))
    lines = ["| network, batch | settings | µs a step |", "|---|---|---|"]
    for case in electronic.CASES[:2]:
        for words, fast, graphs in (("as it comes", False, False), ("fast", True, False), ("fast, graphs", True, True)):
            if clock.left() < 60:
                break
            found = measured(f"MALA, {words}", partial(peer_side, electronic, case, data, fast, graphs))
            value = f"{found.steps:,.0f}" if isinstance(found, Found) else found
            lines.append(f"| {case.name} | {words} | {value} |")
    return [*lines, ""]


def header(options: argparse.Namespace, device: str) -> list[str]:
    try:
        import lightning

        version = lightning.__version__
    except ImportError:
        version = "not there"
    name = torch.cuda.get_device_name() if device == "cuda" else "the CPU (a rehearsal: no figures to quote)"
    return [
        f"# Learning a local density of states on one {name}, {time.strftime('%Y-%m-%d')}", "",
        f"`python benchmarks/electronic_device.py {' '.join(sys.argv[1:])}`; Python {platform.python_version()}, torch "
        f"{torch.__version__}, lightning {version}, isoscale {isoscale.__version__}; {options.rows:,} rows, "
        f"{options.repeats} repeats, sides in turn (DataLoader sides once).", "",
        "`steps`: the steps alone. `all`: with validation, checkpoints and logging in between, a checkpoint every "
        + ", ".join(f"{case.steps:,} ({case.name})" for case in (SMOKE if options.smoke else CASES)) + " steps.", "",
    ]  # fmt: skip


def main() -> None:
    """Measure all of it and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--data", type=Path, help="the snapshots of beryllium")
    parser.add_argument("--peer-path", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20, help="of the trainings whose losses are compared")
    parser.add_argument("--budget", type=float, default=450, help="seconds for all of it")
    parser.add_argument("--only", choices=["speed", "losses"])
    parser.add_argument("--smoke", action="store_true", help="everything once, tiny, on a CPU")
    options = parser.parse_args()
    clock, device = Clock(options.budget), "cpu" if options.smoke else "cuda"
    if options.smoke:
        options.rows, options.repeats, options.seeds, options.epochs = 5_000, 1, 2, 2
    torch.set_float32_matmul_precision("high")  # isoscale sets its own, and puts this back
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out / f"{time.strftime('%Y-%m-%d')}-electronic-{'smoke' if options.smoke else 'device'}.md"
    text = [*header(options, device), "## The peer", "", PEER]

    def add(lines: list[str]) -> None:
        text.extend(lines)
        out.write_text("\n".join(text) + "\n")  # what is known is kept, whatever happens next

    if options.only != "losses":
        rows = Rows(options.rows, min(100_000, options.rows // 5))
        for case in SMOKE if options.smoke else CASES:
            add(speed(case, rows, device, options.repeats, clock))
        del rows
    if options.peer_path is not None and options.data is not None:
        add(["## MALA in this run", "", *peer_in_this_run(options.data, options.peer_path, clock)])
    if options.data is not None and options.only != "speed":
        words = f"91-100-11 on beryllium, batch 1,000, {options.epochs} epochs, {options.seeds} seeds."
        found = equal_losses(options.data, device, options.seeds, options.epochs, clock)
        add(["## Equal validation losses", "", words, "", *found])
    print("\n".join(text))


if __name__ == "__main__":
    main()
