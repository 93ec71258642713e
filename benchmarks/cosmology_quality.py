"""What turning vectors with the axes brings: isoscale against a plain script with the augmentation of NERSC's trainer.

    python benchmarks/cosmology_quality.py [--seeds 3] [--epochs 5]

Both train the same network on the same simulated box for as many steps, with Adam and a cosine. The plain script draws
its crops and one of 24 rotations and reflections with torch, as that trainer does: velocities keep their components.
Both are judged by the same function, on the same crops of a box that neither has seen.
"""

import argparse
import math
import platform
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import isoscale
from isoscale.data.volumes import Crops
from isoscale.science.cosmology import SimulatedBoxes, UNet3d
from isoscale.science.cosmology.statistics import finish_spectra, spectra_sums

CELLS, CROP, BATCH, SAMPLES = 48, 32, 8, 512
NETWORK = {"width": 12, "depth": 4}
LR = 1e-3
AXES = [(0, 1, 2), (1, 2, 0), (2, 0, 1), (0, 2, 1), (1, 0, 2), (2, 1, 0)]


def ours(seed: int, epochs: int, folder: Path) -> nn.Module:
    """The preset, with as many steps."""
    keys = {"train.epochs": epochs, "observe.level": "error", "observe.tensorboard": 0}
    run = isoscale.train("cosmology/small", run=folder / f"seed{seed}", seed=seed, **keys)
    return run.model()


def plain(seed: int, epochs: int, box: Crops) -> nn.Module:
    """A loop by hand."""
    torch.manual_seed(seed)
    model = UNet3d(**NETWORK)
    steps = epochs * SAMPLES // BATCH
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)))
    for _ in range(steps):
        batch = box.fetch(torch.randint(len(box), (BATCH,)))
        pairs = [turned(*pair) for pair in zip(batch["input"], batch["target"], strict=True)]
        inputs, targets = (torch.stack(each) for each in zip(*pairs, strict=True))
        optimizer.zero_grad()
        functional.l1_loss(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    return model


def turned(*fields: Tensor) -> list[Tensor]:
    """One of 24 rotations and reflections of the cells; all fields are taken for scalars."""
    order = [axis + 1 for axis in AXES[int(torch.randint(6, ()))]]
    mirrored = [(), (1,), (2,), (3,)][int(torch.randint(4, ()))]
    return [field.permute(0, *order).flip(mirrored) for field in fields]


@torch.no_grad()
def judged(model: nn.Module, crops: Crops, count: int = 64) -> dict[str, float]:
    """The mean absolute error of all fields, and how far the power spectrum of the gas density is off."""
    model.eval()
    batch = crops.draw(count).fetch(torch.arange(count))
    predicted = torch.cat([model(inputs) for inputs in batch["input"].split(8)])
    contrasts = [torch.exp(14 * fields[:, :1]) for fields in (predicted, batch["target"])]
    spectra = finish_spectra(*spectra_sums(*contrasts, hann=True), box_size=1.0, n=CROP)
    waves = slice(2, CROP // 4)
    return {
        "L1 of all fields": float((predicted - batch["target"]).abs().mean()),
        "L1 of velocities": float((predicted - batch["target"])[:, 1:4].abs().mean()),
        "|P_pred/P_true − 1| of gas": float((spectra.ratio[0, waves] - 1).abs().mean()),
        "r(k) of gas": float(spectra.correlation[0, waves].mean()),
    }


def main() -> None:
    """Print a row for each seed and side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/quality"))
    given = parser.parse_args()
    boxes = SimulatedBoxes(cells=CELLS, crop=CROP, wrap=True)
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{CELLS}³ cells, crops of {CROP}³, {given.epochs * SAMPLES // BATCH} steps of {BATCH}\n")
    for seed in range(given.seeds):
        for name, made in (
            ("isoscale", lambda seed: ours(seed, given.epochs, given.folder)),
            ("plain", lambda seed: plain(seed, given.epochs, boxes.crops["train"])),
        ):
            began = time.perf_counter()
            found = judged(made(seed), boxes.crops["test"])
            words = " | ".join(f"{value:.5f}" for value in found.values())
            if not seed and name == "isoscale":
                print(f"| seed | side | {' | '.join(found)} | s |\n|---|---|{'---|' * len(found)}---|")
            print(f"| {seed} | {name} | {words} | {time.perf_counter() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main()
