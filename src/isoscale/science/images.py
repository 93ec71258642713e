"""Image classification: the embedded digits, and a task that classifies."""

from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import nn

from isoscale.data.batches import Batch
from isoscale.data.sources import Sources, TensorSource, split_source
from isoscale.engine.task import Supervised

DEFAULT_SPLIT = {"train": 0.8, "val": 0.1, "test": 0.1}


class Digits(Sources):
    """1,797 handwritten digits of 8×8 pixels from 0 to 16 (UCI, CC BY 4.0), inside the package."""

    def __init__(self, split: dict[str, float | int] | None = None, split_seed: int = 0) -> None:
        """`split` says how much is for train, val and test: fractions, or numbers of images."""
        with (files("isoscale.science") / "data" / "digits.npz").open("rb") as file, np.load(file) as arrays:
            whole = TensorSource({"input": arrays["images"], "target": arrays["labels"].astype(np.int64)})
        parts = split_source(whole, split or DEFAULT_SPLIT, split_seed)
        super().__init__(parts.train, parts.val, parts.test, parts.test)


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
