"""What a step of a LightningModule costs with callbacks on, by Lightning's Trainer and by isoscale's.

    python benchmarks/lightning_callbacks.py --repeats 5

Processor time from on_train_start to on_train_end, validations and checkpoint files of the callbacks included, on one
thread of a CPU; the sides take turns.
"""

import argparse
import logging
import platform
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import isoscale

ROWS, BATCH, EPOCHS = 8000, 40, 10
STEPS = ROWS // BATCH * EPOCHS


class Mlp(pl.LightningModule):
    """91-100-11, Adam with OneCycleLR."""

    inputs, outputs = 91, 11

    def __init__(self) -> None:
        """A network and nothing else."""
        super().__init__()
        self.net = nn.Sequential(nn.Linear(91, 100), nn.ReLU(), nn.Linear(100, 11))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """What is trained on."""
        return functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Log and return the loss."""
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the error."""
        self.log("val_loss", functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        """A schedule that moves in every step."""
        optimizer = torch.optim.Adam(self.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Pinn(Mlp):
    """2-32-32-1 with second derivatives in the loss."""

    inputs, outputs = 2, 1

    def __init__(self) -> None:
        """A network and nothing else."""
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The residual of a heat equation, and the data."""
        points = x.clone().requires_grad_(True)
        values = self.net(points)
        (first,) = torch.autograd.grad(values.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        return (first[:, 1] - 0.1 * second[:, 0]).square().mean() + functional.mse_loss(values, y)


class Clock(pl.Callback):
    """Processor time of a training."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """It begins."""
        self.began = time.process_time()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """It ends."""
        self.seconds = time.process_time() - self.began


def microseconds(side: str, cls: type[Mlp]) -> float:
    """Of processor time for a step."""
    torch.manual_seed(0)
    module, clock = cls(), Clock()
    x, y = torch.randn(ROWS, cls.inputs), torch.randn(ROWS, cls.outputs)
    loaders = DataLoader(TensorDataset(x, y), BATCH), DataLoader(TensorDataset(x[:400], y[:400]), BATCH)
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "max_epochs": EPOCHS, "accelerator": "cpu", "default_root_dir": folder, "enable_progress_bar": False,
            "callbacks": [clock, EarlyStopping("val_loss", patience=99), ModelCheckpoint(monitor="val_loss"),
                          LearningRateMonitor("epoch")],
        }  # fmt: skip
        if side == "isoscale":
            trainer: Any = isoscale.Trainer(**given, **{"train.threads": 1, "observe.level": "error"})
        else:
            trainer = pl.Trainer(**given, enable_model_summary=False)
        trainer.fit(module, *loaders)
    return clock.seconds / STEPS * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{platform.machine()}, torch {torch.__version__}, lightning {pl.__version__}, {repeats} repeats\n")
    print("| module | Lightning, µs a step | isoscale, µs a step | ratio of medians |\n|---|---|---|---|")
    for cls in (Mlp, Pinn):
        found: dict[str, list[float]] = {"Lightning": [], "isoscale": []}
        for _ in range(repeats):
            for side, times in found.items():
                times.append(microseconds(side, cls))
        cells = [f"{statistics.median(each):,.0f} ({min(each):,.0f}–{max(each):,.0f})" for each in found.values()]
        ratio = statistics.median(found["isoscale"]) / statistics.median(found["Lightning"])
        print(f"| {cls.__doc__} | {cells[0]} | {cells[1]} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
