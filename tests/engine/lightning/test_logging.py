"""`self.log`, `trainer.callback_metrics` and `self.logger`, beside Lightning."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional

from tests.engine.lightning.modules import CLASSES, FEATURES, Points
from tests.engine.lightning.test_lightning import fit, fit_lightning

HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_validation_start",
    "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end",
    "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end",
)  # fmt: skip


class Net(pl.LightningModule):
    """Logs in most of the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(FEATURES, CLASSES)
        self.train_acc = torchmetrics.classification.MulticlassAccuracy(CLASSES)
        self.val_acc = torchmetrics.classification.MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        self.train_acc(logits, batch[1])
        self.log("train_loss", loss, on_epoch=True, prog_bar=True)
        self.log("step_only", loss * 2)
        self.log("epoch_only", loss * 3, on_step=False, on_epoch=True)
        self.log("both_acc", self.train_acc, on_step=True, on_epoch=True)
        self.log("hidden", loss, logger=False)
        self.log("shared", loss, on_step=True)
        self.log("loss", loss * 4)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("smallest", loss, reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log("total", loss, reduce_fx=sum, on_step=True, on_epoch=True)
        if batch_idx % 3 == 0:
            self.log("now_and_then", float(self.global_step))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        self.val_acc.update(logits, batch[1])
        self.log("val_loss", loss, True)
        self.log("acc", self.val_acc)
        self.log("shared", loss)
        self.log("weighed", loss, batch_size=batch_idx + 1)
        self.log_dict({"one": loss, "two": 2 * loss}, on_step=True, on_epoch=True)

    def on_train_epoch_start(self) -> None:
        self.log("epoch", float(self.current_epoch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late", float(self.global_step))

    def on_validation_epoch_end(self) -> None:
        self.log("val_late", 0.5 + self.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.log("train_late", 0.25 + self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def recording(cls: type[pl.LightningModule]) -> Any:
    """The module, which writes down in every hook what it finds in its trainer."""

    def seeing(name: str) -> Any:
        def hook(self: Any, *arguments: Any) -> Any:
            if not self.trainer.sanity_checking:
                shown = (self.trainer.callback_metrics, self.trainer.logged_metrics, self.trainer.progress_bar_metrics)
                self.seen.append((name, *({key: float(value) for key, value in each.items()} for each in shown)))
            return getattr(cls, name)(self, *arguments)

        return hook

    made = type("Recording", (cls,), {name: seeing(name) for name in HOOKS})()
    made.seen = []
    return made


def test_every_hook_finds_the_metrics_that_it_finds_under_lightning(tmp_path: Path) -> None:
    ours, theirs = recording(Net), recording(Net)
    fit(ours, Points(), tmp_path / "run", 3)
    fit_lightning(theirs, Points(), 3)
    assert [entry[0] for entry in ours.seen] == [entry[0] for entry in theirs.seen]
    for (name, *mine), (_, *other) in zip(ours.seen, theirs.seen, strict=True):
        for kind, found, expected in zip(("callback", "logged", "progress bar"), mine, other, strict=True):
            for key in ("one_step", "two_step"):  # of single batches of a validation, which are not kept here
                expected.pop(key, None)
            assert sorted(found) == sorted(expected), (name, kind)
            assert found == pytest.approx(expected, rel=1e-5), (name, kind)
