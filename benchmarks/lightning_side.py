"""The one way in which Lightning's Trainer is timed here: steady steps inside one `Trainer.fit`.

A callback reads a clock, after waiting for the device, when the warm-up batches have been trained and again when the
measured ones have. Building the Trainer, its first batches, starting the workers of a DataLoader, and taking everything
down lie outside both readings; so do the costs that only the first fit of a process has. An epoch that begins between
the readings counts. The batches that were really trained are counted, and a wrong count is an error.

Progress bar, model summary, checkpoints, validation and its sanity check are off. What is left are the duties that
every other side has too: the loss accumulated and written every 50 steps (Lightning's default) to the lightest of its
loggers, and, where there is a schedule, the learning rate set at every step. With `barebones`, Lightning's own mode for
measuring the Trainer itself, these are off as well, and nothing is left but the steps.
"""

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import Tensor, nn

EVERY = 50


class Module(lightning.LightningModule):
    """A network and a loss, trained with fused Adam."""

    def __init__(
        self,
        network: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        learning_rate: float,
        schedule: Callable[[int], float] | None = None,
        logs: bool = True,
    ) -> None:
        """`schedule` gives the learning rate of a step."""
        super().__init__()
        self.network, self.loss, self.learning_rate = network, loss, learning_rate
        self.schedule, self.logs = schedule, logs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.network(batch[0]), batch[1])
        if self.logs:
            self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate, fused=True)
        if self.schedule is None:
            return optimizer
        schedule, start = self.schedule, self.learning_rate
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step) / start)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Stopwatch(lightning.Callback):
    """Reads a clock, with the device at rest, after some of the batches."""

    def __init__(self, moments: tuple[int, ...]) -> None:
        """`moments` are numbers of batches trained."""
        self.moments, self.readings, self.num_batches = moments, list[float](), 0

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.num_batches += 1
        if self.num_batches in self.moments:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()
            self.readings.append(time.perf_counter())


def fit(module: Module, batches: Iterable[Any], num_steps: int, device: str, callbacks: list[Any]) -> None:
    """Train a number of steps and no fewer, in a folder that is thrown away."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        off: dict[str, Any] = {"barebones": True}
        if module.logs:
            off = {
                "logger": lightning.loggers.CSVLogger(folder), "log_every_n_steps": EVERY, "num_sanity_val_steps": 0,
                "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
            }  # fmt: skip
        trainer = lightning.Trainer(
            max_steps=num_steps, max_epochs=-1, accelerator="gpu" if device == "cuda" else "cpu", devices=1,
            default_root_dir=folder, callbacks=callbacks, **off,
        )  # fmt: skip
        trainer.fit(module, batches)
    assert trainer.global_step == num_steps, f"{trainer.global_step} steps were trained instead of {num_steps}"


def step_seconds(module: Module, batches: Iterable[Any], warmup: int, num_steps: int, device: str) -> float:
    """Seconds a step, over `num_steps` steps after `warmup` others."""
    stopwatch = Stopwatch((warmup, warmup + num_steps))
    fit(module, batches, warmup + num_steps, device, [stopwatch])
    assert stopwatch.num_batches == warmup + num_steps, f"{stopwatch.num_batches} batches instead of one a step"
    begin, end = stopwatch.readings
    return (end - begin) / num_steps
