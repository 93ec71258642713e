"""CIFAR-10 on a GPU: samples a second of ResNet-18 beside a plain loop and Lightning, and the time to 94 %.

    python benchmarks/images_device.py [--out FILE.md] [--runs 12] [--epochs 4] [--workers 4 12]

Every side trains the same ResNet-18 (CIFAR stem, channels last) in bf16 on 45,000 images in batches of 512, with SGD,
random flips and shifts. The plain loop and Lightning read through a DataLoader with worker processes and torchvision's
transforms; a second plain loop has its images on the device, as isoscale does. A figure is the median over logging
windows of the last epochs: start-up, capture and compilation are not in it. The data is looked for in ISOSCALE_DATA.
"""

import argparse
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import isoscale
from isoscale.science.images import CIFAR10, ResNet

BATCH = 512
EVERY = 20
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
Rates = list[float]


class Pictures(Dataset):
    """CIFAR-10 as people read it: one picture at a time, transformed on a worker."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        from torchvision.transforms import v2

        self.images, self.labels = images, labels.tolist()
        self.transform = v2.Compose(
            [
                v2.RandomHorizontalFlip(),
                v2.RandomCrop(32, padding=4),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


def loader(source: Any, workers: int) -> DataLoader:
    columns = source.fetch(torch.arange(len(source)))
    return DataLoader(
        Pictures(columns["input"], columns["target"]), BATCH, shuffle=True, num_workers=workers, pin_memory=True,
        persistent_workers=True, drop_last=True,
    )  # fmt: skip


def plain(network: nn.Module, batches: Callable[[], Iterator[tuple[Tensor, Tensor]]], epochs: int) -> Rates:
    """A loop as a careful user writes it: channels last, bf16, fused optimizer, autotuned convolutions."""
    torch.backends.cudnn.benchmark = True
    network = network.cuda().train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=True)
    rates: Rates = []
    step, begin = 0, time.perf_counter()
    for _ in range(epochs):
        for images, labels in batches():
            images = images.cuda(non_blocking=True).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cuda", torch.bfloat16):
                loss = nn.functional.cross_entropy(network(images), labels.cuda(non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                loss.item()
                now = time.perf_counter()
                rates.append(EVERY * BATCH / (now - begin))
                begin = now
    torch.backends.cudnn.benchmark = False
    return rates


def resident(source: Any) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    """Batches of images that live on the device, flipped and shifted a batch at a time."""
    columns = source.fetch(torch.arange(len(source)))
    images, labels = columns["input"].cuda(), columns["target"].cuda()
    mean, std = (torch.tensor(values, device="cuda").view(3, 1, 1) * 255 for values in (MEAN, STD))

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(images), device="cuda")
        for rows in order.split(BATCH)[:-1]:
            values = (images[rows] - mean) / std
            values = torch.where(torch.rand(len(rows), 1, 1, 1, device="cuda") < 0.5, values.flip(3), values)
            top, left = torch.randint(0, 9, (2,)).tolist()
            values = nn.functional.pad(values, (4, 4, 4, 4))[:, :, top : top + 32, left : left + 32]
            yield values, labels[rows]

    return batches


def lightning(data: DataLoader, epochs: int) -> Rates:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = ResNet(18)
            self.rates: Rates = []
            self.begin = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images, labels = batch
            loss = nn.functional.cross_entropy(self.network(images), labels)
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *arguments: Any) -> None:
            if (self.global_step) % EVERY == 0:
                torch.cuda.synchronize()
                now = time.perf_counter()
                self.rates.append(EVERY * BATCH / (now - self.begin))
                self.begin = now

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=True)

    module = Module()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(
            max_epochs=epochs, precision="bf16-mixed", logger=False, enable_checkpointing=False, devices=1,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, benchmark=True,
        ).fit(module, data)  # fmt: skip
    return module.rates


def ours(recipe: str, program: str, epochs: int) -> Rates:
    settings = {
        "train.program": program, "train.epochs": epochs, "train.evaluate": "never", "checkpoint.every": "never",
        "checkpoint.monitor": "train/loss_epoch", "checkpoint.mode": "min", "data.drop_last": True,
        "observe.every": EVERY, "observe.tensorboard": 0, "observe.level": "warning",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = isoscale.train(recipe, run=Path(folder) / "run", **settings)
        decided = run.record["decided"]["program"]
        assert decided == program, f"asked for {program}, got {decided}: {run.record['decided']['why']}"
        return [rate for _, rate in run.history("time/samples_per_second")]


def settled(rates: Rates) -> float:
    """The median of the second half."""
    return statistics.median(rates[len(rates) // 2 :])


PROGRAMS = {
    "eager": "eager",
    "graphed": "graphed (the default)",
    "compiled": "compiled",
    "compiled+graphed": "compiled and graphed",
}


def rate_table(epochs: int, workers: list[int]) -> list[str]:
    source = CIFAR10().train
    loaders = {count: loader(source, count) for count in workers}
    sides: dict[str, Callable[[], Rates]] = {}
    for count, data in loaders.items():
        sides[f"plain loop, DataLoader, {count} workers"] = lambda data=data: plain(ResNet(18), data.__iter__, epochs)
        sides[f"Lightning, DataLoader, {count} workers"] = lambda data=data: lightning(data, epochs)
    on_device = resident(source)
    sides["plain loop, images on the device"] = lambda: plain(ResNet(18), on_device, epochs)
    sides["the same, torch.compile"] = lambda: plain(torch.compile(ResNet(18)), on_device, epochs)
    for program, words in PROGRAMS.items():
        sides[f"isoscale, {words}"] = lambda program=program: ours("images/cifar10-resnet18", program, epochs)
    return measured(sides)


def measured(sides: dict[str, Callable[[], Rates]]) -> list[str]:
    """A table of the sides, each beside the first."""
    rows, base = [], None
    for name, measure in sides.items():
        begin = time.perf_counter()
        try:
            rate = settled(measure())
        except isoscale.UserError as error:
            rows.append(f"| {name} | {error} | | |")
            continue
        base = base or rate
        rows.append(f"| {name} | {rate:,.0f} | {rate / base:.2f}× | {time.perf_counter() - begin:.0f} s |")
        print(rows[-1], flush=True)
    return ["| side | samples/s | to the first | all of it |", "|---|---|---|---|", *rows]


def program_table(recipe: str, epochs: int) -> list[str]:
    return measured({words: lambda p=program: ours(recipe, p, epochs) for program, words in PROGRAMS.items()})


def fast_table(num_runs: int) -> list[str]:
    """Train images/cifar10-fast with many seeds."""
    accuracies, seconds = [], []
    for seed in range(num_runs):
        with tempfile.TemporaryDirectory() as folder:
            quiet = {"observe.tensorboard": 0, "observe.level": "warning"}
            run = isoscale.train("images/cifar10-fast", run=Path(folder) / "run", seed=seed, **quiet)
            accuracies.append(run.metrics["val/accuracy"])
            seconds.append(run.record["seconds"])
        print(f"seed {seed}: {accuracies[-1]:.4f} in {seconds[-1]:.2f} s", flush=True)
    spread = statistics.stdev(accuracies) if num_runs > 1 else 0.0
    return [
        "| runs | test accuracy, mean ± deviation | lowest | time, mean | longest |",
        "|---|---|---|---|---|",
        f"| {num_runs} | {100 * statistics.mean(accuracies):.2f} ± {100 * spread:.2f} % "
        f"| {100 * min(accuracies):.2f} % | {statistics.mean(seconds):.2f} s | {max(seconds):.2f} s |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 12])
    options = parser.parse_args()
    import lightning.pytorch

    device = torch.cuda.get_device_name()
    # first what forks workers: a process should fork before it has much on the device
    rates, fast = rate_table(options.epochs, options.workers), fast_table(options.runs)
    programs = program_table("images/cifar10-fast", options.epochs)
    lines = [
        f"# CIFAR-10 on one {device}, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python benchmarks/images_device.py --runs {options.runs} --epochs {options.epochs} "
        f"--workers {' '.join(map(str, options.workers))}`; torch {torch.__version__}, "
        f"Lightning {lightning.pytorch.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} CPU threads.",
        "",
        "## images/cifar10-fast: time to 94 %",
        "",
        "Training time as the run counts it: every step, capture and its proof, the one evaluation and the checkpoint",
        "at the end; not the start of Python and CUDA, reading the files, or building the network.",
        "",
        *fast,
        "",
        "Samples a second of its step, as it is run:",
        "",
        *programs,
        "",
        "## ResNet-18, bf16, batch 512",
        "",
        "Median over logging windows after start-up; the last column is all of that side's run, compilation included",
        "(a later side may find it done). Four workers is what many starter kits advise for one GPU.",
        "",
        *rates,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
