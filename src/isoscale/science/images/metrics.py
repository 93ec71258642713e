"""Metrics of a classification that are no means over samples: they follow from counts."""

import numpy as np
import torch
from torch import Tensor

from isoscale.observe.figures import Detection


def confusion_counts(predicted: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """How many samples of each class (row) were taken for each class (column), without waiting for the device."""
    labels = target.to(torch.int64).flatten()
    counts = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=target.device)
    counts.index_add_(0, labels * num_classes + predicted.flatten(), torch.ones_like(labels))
    return counts.view(num_classes, num_classes)


def macro_scores(confusion: Tensor) -> dict[str, float]:
    """Precision, recall and F1, each the plain mean over classes.

    A class that is neither there nor predicted does not count; one whose score would be 0 / 0 counts as 0.
    """
    counts = confusion.double()
    right, actual, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    occurs = (actual + predicted) > 0
    scores = {
        "f1": 2 * right / (actual + predicted).clamp(min=1),
        "precision": right / predicted.clamp(min=1),
        "recall": right / actual.clamp(min=1),
    }
    return {name: float(values[occurs].mean()) if bool(occurs.any()) else 0.0 for name, values in scores.items()}


def detection(score: Tensor, positive: Tensor) -> Detection:
    """How well `score` (samples,) finds the samples that are `positive` (samples,), at every distinct score."""
    order = torch.argsort(score, descending=True, stable=True)
    falling, found = score[order].double().numpy(), positive[order].numpy().astype(np.int64)
    last = np.flatnonzero(np.append(np.diff(falling) != 0, True)) if len(falling) else np.zeros(0, dtype=np.int64)
    true_positives = np.cumsum(found)[last] if len(falling) else last
    num_positives = int(found.sum())
    return Detection(
        falling[last], true_positives, last + 1 - true_positives, num_positives, len(falling) - num_positives
    )
