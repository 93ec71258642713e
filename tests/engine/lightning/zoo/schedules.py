"""Optimizers and learning rates: schedules of steps, epochs and metrics, groups, warm-up by hand."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from torch.optim import lr_scheduler

from tests.engine.lightning.zoo.case import Case, Net, loaders


class OneCycle(Net):
    """A cycle over the epochs that the script knows, too."""

    def __init__(self, steps_per_epoch: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.01)
        scheduler = lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.05, epochs=self.trainer.max_epochs, steps_per_epoch=self.hparams.steps_per_epoch
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OneCycleEstimated(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.2, total_steps=self.trainer.estimated_stepping_batches, cycle_momentum=True
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": "one_cycle"}]


class WarmRestarts(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4, T_mult=2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Groups(Net):
    """No weight decay for biases, and a smaller rate for the backbone."""

    def configure_optimizers(self) -> Any:
        decayed = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.001}]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        scheduler = lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.9**epoch, lambda epoch: 0.5**epoch])
        return [optimizer], [scheduler]


class WarmUp(Net):
    """The warm-up of Lightning's documentation, in `optimizer_step`."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 10:
            scale = min(1.0, float(self.trainer.global_step + 1) / 10)
            for group in optimizer.param_groups:
                group["lr"] = scale * 0.02


class WarmedCosine(pl.callbacks.Callback):
    """A schedule that a callback writes into the optimizer."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.02 * min(1.0, (trainer.global_step + 1) / 8)


class LBFGS(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=5)


def monitored(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "callbacks": [LearningRateMonitor(**options)], "logger": TensorBoardLogger(folder), "log_every_n_steps": 1,
    }  # fmt: skip


def rates(module: Any, callbacks: list[Any]) -> Any:
    return callbacks[0].lrs


CASES = [
    Case("one-cycle", "OneCycleLR per step, from trainer.max_epochs and hparams", OneCycle),
    Case("one-cycle-momentum", "OneCycleLR from estimated_stepping_batches, with momentum; LearningRateMonitor",
         OneCycleEstimated, trainer=partial(monitored, logging_interval="step", log_momentum=True), facts=rates),
    Case("warm-restarts", "CosineAnnealingWarmRestarts per step", WarmRestarts),
    Case("plateau", "ReduceLROnPlateau on val_loss; LearningRateMonitor", Plateau, epochs=6,
         trainer=monitored, facts=rates),
    Case("groups", "several parameter groups, each with a LambdaLR", Groups),
    Case("warm-up", "warm-up in optimizer_step", WarmUp),
    Case("callback-rate", "a callback that writes the learning rate", Net,
         trainer=lambda folder: {"callbacks": [WarmedCosine()]}),
    Case("lbfgs", "LBFGS under automatic optimisation", LBFGS, lambda: loaders(16, 16), epochs=4, of_step={
        "train_loss": "a step logs the mean of its evaluations, Lightning the last of them"}),
]  # fmt: skip
