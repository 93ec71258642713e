"""A task that sorts images into classes."""

from functools import partial
from typing import Any

import torch
from torch import nn

from isoscale.data.batches import Batch
from isoscale.engine.task import Supervised


class Classifier(Supervised):
    """Images to classes: cross entropy, accuracy, and predictions with their probability."""

    def __init__(self, model: nn.Module, loss: str = "cross_entropy", label_smoothing: float = 0.0) -> None:
        """`model` gives a score for each class."""
        super().__init__(model, loss, metrics=["accuracy"])
        if label_smoothing:
            self._loss = partial(self._loss, label_smoothing=label_smoothing)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """The class of each image, and the probability of every class."""
        probability = torch.softmax(self.model(self.split(batch)[0]).float(), 1)
        return {"class": probability.argmax(1), "probability": probability}
