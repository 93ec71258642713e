"""Callbacks: Lightning's early stopping and checkpoints, a user's own, those that a module brings along."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from tests.engine.lightning.zoo.case import Case, Net


class Coarse(Net):
    """Learns so fast that it soon gets worse."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=3.0, momentum=0.9)


def stopped(module: Any, callbacks: list[Any]) -> Any:
    early, saved = callbacks[:2]
    best = torch.load(saved.best_model_path, weights_only=False)
    return (
        early.stopped_epoch, early.wait_count, float(early.best_score), float(saved.best_model_score),
        Path(saved.best_model_path).name, sorted(Path(each).name for each in saved.best_k_models),
        best["epoch"], best["global_step"], best["state_dict"],
    )  # fmt: skip


class History(Callback):
    """What people write to look at a training: losses of steps, metrics of epochs, the order of hooks."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.epochs: list[dict[str, float]] = []
        self.calls: list[str] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.calls.append(f"setup {str.__str__(stage)}")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append("on_fit_start")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append(f"on_train_start {trainer.max_epochs} {trainer.num_training_batches}")

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append(f"on_train_epoch_start {trainer.current_epoch}")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.calls.append(f"on_train_batch_end {batch_idx} {trainer.global_step} {trainer.is_last_batch}")

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append("on_validation_epoch_start")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append(f"on_validation_end {sorted(trainer.callback_metrics)}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.calls.append("on_train_epoch_end")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append("on_train_end")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append("on_fit_end")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.calls.append(f"teardown {str.__str__(stage)}")


class Changing(Callback):
    """Changes the module: a number in the loss, the weights, a layer's mode."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.smoothing = 0.1 * trainer.current_epoch
        pl_module.backbone.train(trainer.current_epoch != 1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in pl_module.head.parameters():
                parameter.clamp_(-0.4, 0.4)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.head.bias.grad.zero_()


class Changed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone.append(nn.BatchNorm1d(8))
        self.smoothing = 0.0

    def loss(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1], label_smoothing=self.smoothing)


class BringsCallbacks(Coarse):
    """Early stopping that belongs to the module."""

    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss", patience=1)]


class StopsAtLoss(Callback):
    """Stops when the loss is low enough."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.callback_metrics["train_loss"] < 1.0:
            trainer.should_stop = True


class Slow(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def reported(module: Any, callbacks: list[Any]) -> Any:
    return callbacks[0].losses, callbacks[0].epochs, callbacks[0].calls


def logging_callback() -> LambdaCallback:
    return LambdaCallback(
        on_train_epoch_end=lambda trainer, module: module.log("norm", module.head.weight.detach().norm())
    )


CASES = [
    Case("early-stopping", "EarlyStopping and ModelCheckpoint (top 2) on val_loss", Coarse, epochs=8, facts=stopped,
         trainer=lambda folder: {"callbacks": [EarlyStopping("val_loss", patience=2), ModelCheckpoint(
             folder, "{epoch}-{val_loss:.2f}", monitor="val_loss", save_top_k=2)]}),
    Case("rate-monitor", "LearningRateMonitor beside a user's callback that reads metrics and hooks", Slow,
         trainer=lambda folder: {"callbacks": [History(), LearningRateMonitor()],
                                 "logger": TensorBoardLogger(folder)},
         facts=reported),
    Case("changing-callback", "a callback that changes weights, modes, gradients and a number of the loss", Changed,
         trainer=lambda folder: {"callbacks": [Changing()]}),
    Case("configure-callbacks", "EarlyStopping from configure_callbacks", BringsCallbacks, epochs=8),
    Case("stop-at-loss", "a user's callback that sets trainer.should_stop", Slow, epochs=8,
         trainer=lambda folder: {"callbacks": [StopsAtLoss()]}),
    Case("accumulation-scheduler", "GradientAccumulationScheduler: two batches to an update from the second epoch on",
         Slow, trainer=lambda folder: {"callbacks": [GradientAccumulationScheduler({1: 2})]},
         refused="use train.accumulate, which is the same in every epoch"),
    Case("lambda-callback", "LambdaCallback that logs, and Timer", Slow,
         trainer=lambda folder: {"callbacks": [logging_callback(), Timer("00:01:00:00")]}),
    Case("checkpoint-every", "ModelCheckpoint every 4 steps, all kept, and save_last", Slow,
         trainer=lambda folder: {"callbacks": [ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1,
                                                               save_last=True)]},
         facts=lambda module, callbacks: sorted(each.name for each in Path(callbacks[0].dirpath).glob("*.ckpt"))),
]  # fmt: skip
