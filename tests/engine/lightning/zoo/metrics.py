"""Metrics: torchmetrics objects, collections, values of steps and epochs, several validation sets, the logger."""

from typing import Any

import torch
import torchmetrics
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.engine.lightning.modules import CLASSES, points
from tests.engine.lightning.zoo.case import Case, Net, loaders


class Torchmetrics(Net):
    """An object a stage, logged as objects."""

    def __init__(self) -> None:
        super().__init__()
        self.train_acc = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.val_acc = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.val_acc_best = torchmetrics.MaxMetric()

    def on_train_start(self) -> None:
        self.val_acc.reset()
        self.val_acc_best.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0])
        self.train_acc(scores, batch[1])
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return nn.functional.cross_entropy(scores, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_acc(self(batch[0]), batch[1])
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)


class Collection(Net):
    """A collection, cloned for a stage with a prefix, computed by hand at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        metrics = torchmetrics.MetricCollection(
            [torchmetrics.Accuracy("multiclass", num_classes=CLASSES),
             torchmetrics.F1Score("multiclass", num_classes=CLASSES, average="macro")]
        )  # fmt: skip
        self.train_metrics, self.val_metrics = metrics.clone(prefix="train_"), metrics.clone(prefix="val_")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch[0])
        self.log_dict(self.train_metrics(scores, batch[1]))
        return nn.functional.cross_entropy(scores, batch[1])

    def on_train_epoch_end(self) -> None:
        self.train_metrics.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_metrics.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()


class StepsAndEpochs(Net):
    """Every kind of `self.log`, and the metrics that hooks of later find."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("batch_loss", outputs["loss"], on_step=True, on_epoch=False)

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.seen.append({name: float(metrics[name]) for name in ("loss_epoch", "largest", "val_loss")})
        self.log("ratio", metrics["val_loss"] / metrics["loss_epoch"])


class SeveralValidations(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))
        self.log(f"own_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)


def several_validations() -> dict[str, Any]:
    both = [DataLoader(points(20, seed=1), batch_size=8), DataLoader(points(12, seed=2), batch_size=4)]
    return {**loaders(), "val_dataloaders": both}


class Experiment(Net):
    """Scalars and histograms straight to TensorBoard."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.logger.experiment.add_scalar("own/loss", loss.detach(), self.global_step)
        return loss

    def on_train_epoch_end(self) -> None:
        for name, parameter in self.named_parameters():
            self.logger.experiment.add_histogram(name, parameter.detach(), self.current_epoch)
        self.logger.log_metrics({"own/epoch": self.current_epoch}, step=self.global_step)


class ListsOfOutputs(Net):
    """Outputs that are kept in a list until the epoch ends, as since Lightning 2."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.outputs.append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log("val_mean", torch.stack(self.outputs).mean())
        self.outputs.clear()


CASES = [
    Case("torchmetrics", "Accuracy and MaxMetric objects, as in the lightning-hydra-template", Torchmetrics,
         quick=True),
    Case("metric-collection", "MetricCollection cloned with prefixes, computed and reset by hand", Collection),
    Case("log", "self.log per step, per epoch, by max, in on_train_batch_end; callback_metrics read", StepsAndEpochs,
         facts=lambda module, callbacks: module.seen),
    Case("validation-loaders", "two validation loaders, add_dataloader_idx", SeveralValidations, several_validations),
    Case("experiment", "self.logger.experiment.add_scalar, add_histogram, logger.log_metrics", Experiment,
         trainer=lambda folder: {"logger": TensorBoardLogger(folder)}),
    Case("outputs-list", "outputs kept in a list until on_validation_epoch_end", ListsOfOutputs),
]  # fmt: skip
