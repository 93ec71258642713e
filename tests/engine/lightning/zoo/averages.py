"""Averages of weights: by Lightning's callbacks, by a callback of one's own, by hand in a hook."""

from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn

from tests.engine.lightning.modules import FEATURES
from tests.engine.lightning.zoo.case import Case, Net


class OwnAverage(Net):
    """An exponential moving average that is a part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.average = deepcopy(self.head).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), self.head.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)


class AverageOfWeights(pl.Callback):
    """The callback that every group has: averages, swapped in for validations."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.average: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {name: each.detach().clone() for name, each in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, value in pl_module.state_dict().items():
            self.average[name].mul_(self.decay).add_(value.detach(), alpha=1 - self.decay)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = {name: each.detach().clone() for name, each in pl_module.state_dict().items()}
        pl_module.load_state_dict(self.average)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.kept)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]


class Normed(Net):
    """A network with batch norm, whose statistics stochastic weight averaging has to take again."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


CASES = [
    Case("swa", "StochasticWeightAveraging", Net, epochs=5,
         refused="use train.ema, or Lightning's WeightAveraging",
         trainer=lambda folder: {"callbacks": [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)]}),
    Case("swa-batch-norm", "StochasticWeightAveraging of a network with batch norm", Normed, epochs=5,
         refused="use train.ema, or Lightning's WeightAveraging",
         trainer=lambda folder: {"callbacks": [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=0.5)]}),
    Case("ema-by-hand", "moving average in on_train_batch_end of the module", OwnAverage, quick=True),
    Case("ema-callback", "moving average by a user's callback, swapped in for validations", Net,
         trainer=lambda folder: {"callbacks": [AverageOfWeights()]},
         facts=lambda module, callbacks: callbacks[0].average),
    Case("ema-lightning", "EMAWeightAveraging", Net,
         trainer=lambda folder: {"callbacks": [EMAWeightAveraging(decay=0.9)]}),
]  # fmt: skip
