"""A case of the zoo: a module, its data and the arguments of its Trainer, as a script has them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.engine.lightning.modules import CLASSES, FEATURES, points


def loaders(num_train: int = 40, batch_size: int = 8) -> dict[str, Any]:
    """The data of most cases, as arguments of `Trainer.fit`; no case shuffles, so that the orders can be compared."""
    return {
        "train_dataloaders": DataLoader(points(num_train), batch_size=batch_size),
        "val_dataloaders": DataLoader(points(20, seed=1), batch_size=8),
    }


@dataclass(frozen=True)
class Case:
    """What a script gives to Lightning."""

    name: str
    what: str
    """What it does, for the table."""
    module: Callable[[], pl.LightningModule]
    data: Callable[[], dict[str, Any]] = loaders
    """The arguments of `fit` after the module."""
    trainer: Callable[[Path], dict[str, Any]] = field(default=lambda folder: {})
    """The arguments of the Trainer, which may write into a folder."""
    epochs: int = 3
    facts: Callable[[Any, list[Any]], Any] = field(default=lambda module, callbacks: None)
    """What else has to be equal, of the module and the Trainer's callbacks after training."""
    difference: str = ""
    """Why the weights differ, where they are meant to."""
    refused: str = ""
    """Words of the sentence by which it is refused, where it is."""
    of_step: dict[str, str] = field(default_factory=dict)
    """Metrics of a single step that differ, and why."""
    skipped: int = 0
    """Batches that the module passes over: a run counts them, Lightning's `global_step` does not."""
    quick: bool = False
    """Whether it is one of the few that every test run trains."""


class Net(pl.LightningModule):
    """A classifier of points, with a loss of validation."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.backbone(inputs))

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)
