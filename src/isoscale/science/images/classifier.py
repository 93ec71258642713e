"""A task that sorts images into classes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from isoscale.data.batches import Batch
from isoscale.data.sources import Source
from isoscale.engine.task import Supervised, Tally, WeightedSum, check_labels, class_numbers
from isoscale.errors import UserError
from isoscale.observe.figures import Detection, Figure, Matrix, Pictures, PrecisionRecall


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


NUM_SHOWN = 32
"""Pictures in a grid of predictions."""
MOST_CURVES = 100
"""Classes with a precision-recall curve of their own; with more, the most frequent ones have."""


class Classifier(Supervised):
    """Images to classes: a loss, accuracy, and in evaluations precision, recall and F1 (means over classes)."""

    class_weights: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[..., Any] = "cross_entropy",
        label_smoothing: float = 0.0,
        class_weights: list[float] | None = None,
        average_over: Literal["none", "mirror", "mirror and shift"] = "none",
        metrics: Sequence[str | Callable[..., Any]] = (),
    ) -> None:
        """`model` gives a score for each class; evaluations may average its scores over variants of each image.

        `metrics` are those besides accuracy, precision, recall and F1.
        """
        super().__init__(model, loss, metrics=["accuracy", *metrics])
        if not 0 <= label_smoothing <= 1:
            raise UserError(f"label_smoothing is {label_smoothing}; expected a fraction from 0 to 1, such as 0.1")
        if (label_smoothing or class_weights is not None) and not isinstance(loss, str):
            raise UserError(
                "label_smoothing and class_weights are for loss: cross_entropy, and this loss is a function or class: "
                "use task.label_smoothing=0 and task.class_weights=null, and give the loss arguments of its own"
            )
        weights = None if class_weights is None else torch.tensor(class_weights)
        self.register_buffer("class_weights", weights, persistent=False)
        if label_smoothing:
            self._loss = partial(self._loss, label_smoothing=label_smoothing)
        self._variants = VARIANTS[average_over]

    def training_step(self, batch: Batch, batch_idx: int) -> WeightedSum:
        """The loss and the accuracy."""
        images, target = self.split(batch)
        scores = self.model(images)
        self._measure(scores.detach(), target, "train")
        return self._weighted_loss(scores, target)

    def validation_step(self, batch: Batch, batch_idx: int) -> WeightedSum:
        """The loss, the accuracy, and the counts from which precision, recall and F1 follow."""
        return self._evaluate(batch, "val")

    def _evaluate(self, batch: Batch, stage: str) -> WeightedSum:
        images, target = self.split(batch)
        scores = self.scores(images)
        self._measure(scores, target, stage)
        counts = confusion_counts(scores.argmax(1), class_numbers(scores, target), scores.shape[1])
        self.log("confusion", Tally(counts, macro_scores))
        return self._weighted_loss(scores, target)

    def test_step(self, batch: Batch, batch_idx: int) -> WeightedSum:
        """As in validation."""
        return self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """The class of each image, and the probability of every class."""
        probability = torch.softmax(self.scores(self.input_of(batch)).float(), 1)
        return {"class": probability.argmax(1), "probability": probability}

    def scores(self, images: Tensor) -> Tensor:
        """The model's scores, averaged over the variants of each image."""
        variants = self._variants(images)
        if len(variants) == 1:
            return self.model(images)
        return torch.stack([weight * self.model(variant).float() for variant, weight in variants]).sum(0)

    def _weighted_loss(self, scores: Tensor, target: Tensor) -> WeightedSum:
        if self.class_weights is None:
            return self._loss(scores, target)
        return self._loss(scores, target, weight=self.class_weights.to(scores.dtype))

    def check_data(self, split: str, source: Source) -> None:
        """Refuse labels that the model has no score for, and class weights of another number of classes."""
        target, num_classes = self.targets(source), self._num_classes()
        if num_classes is None:
            return
        if self.class_weights is not None and len(self.class_weights) != num_classes:
            raise UserError(
                f"task.class_weights has {len(self.class_weights)} weights, but the model has {num_classes} classes; "
                "give one for each"
            )
        if target is not None:
            check_labels(target, split, num_classes, ignored=None)

    def _num_classes(self) -> int | None:
        """As many as the last linear layer has outputs."""
        linear = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        return linear[-1].out_features if linear else None

    def show_inputs(self, source: Source, batch: Batch) -> dict[str, Figure]:
        """Some training images as the network sees them, or as they are stored where it sees rows of numbers."""
        images, target = self.split(batch)
        target = target.argmax(1) if target.dim() > 1 and target.shape[1] > 1 else target.flatten().to(torch.int64)
        pixels = as_pixels(images)
        if pixels is None:
            pixels = as_pixels(self.split(source.fetch(torch.arange(len(target))))[0])
        names = class_names(source, 1 + int(target.max()))
        return {} if pixels is None else {"inputs": Pictures(pixels, [names[int(label)] for label in target])}

    def show_results(self, source: Source, outputs: dict[str, Tensor]) -> dict[str, Figure]:
        """The confusion matrix, precision-recall curves, and a grid of predictions."""
        probability, predicted = outputs["probability"], outputs["class"]
        indices = torch.arange(len(predicted))
        target = self.targets(source)
        target = self.split(source.fetch(indices))[1] if target is None else target[: len(predicted)]
        target = class_numbers(probability, target)
        names = class_names(source, probability.shape[1])[: probability.shape[1]]
        counts = confusion_counts(predicted, target, len(names)).numpy()
        shown: dict[str, Figure] = {"confusion": Matrix(counts, names)}
        frequent = torch.argsort(torch.from_numpy(counts.sum(1)), descending=True, stable=True)[:MOST_CURVES]
        shown["precision_recall"] = PrecisionRecall(
            {names[index]: detection(probability[:, index], target == index) for index in sorted(frequent.tolist())}
        )
        pixels = as_pixels(self.split(source.fetch(indices[:NUM_SHOWN]))[0])
        if pixels is not None:
            shown["predictions"] = _predictions(pixels, names, probability, predicted, target)
        return shown


def _predictions(
    pixels: np.ndarray, names: list[str], probability: Tensor, predicted: Tensor, target: Tensor
) -> Pictures:
    captions, right = [], []
    for index in range(len(pixels)):
        guess, truth = int(predicted[index]), int(target[index])
        words = f"{names[guess]} {100 * float(probability[index, guess]):.0f} %"
        captions.append(words if guess == truth else f"{words}, is {names[truth]}")
        right.append(guess == truth)
    return Pictures(pixels, captions, right)


def class_names(source: Any, num_classes: int) -> list[str]:
    """The names of the classes that a source knows, or their numbers."""
    known = getattr(source, "classes", None)
    return list(known) if known is not None and len(known) >= num_classes else [str(n) for n in range(num_classes)]


def as_pixels(images: Tensor) -> np.ndarray | None:
    """Images (n, channels, height, width) or (n, height, width) as bytes (n, height, width, 3); None for others.

    Values are stretched from their smallest to their largest; images of more than three channels show the first.
    """
    if images.dim() == 3:
        images = images[:, None]
    if images.dim() != 4:
        return None
    if images.dtype != torch.uint8 or int(images.max()) < 128:
        values = images.float()
        low, high = values.min(), values.max()
        images = ((values - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    colours = images if images.shape[1] == 3 else images[:, :1].expand(-1, 3, -1, -1)
    return colours.permute(0, 2, 3, 1).contiguous().numpy()


def _mirrored(images: Tensor) -> list[tuple[Tensor, float]]:
    return [(images, 0.5), (images.flip(3), 0.5)]


def _mirrored_and_shifted(images: Tensor) -> list[tuple[Tensor, float]]:
    """Half of the weight for the images in place, half for them one pixel off, up left and down right."""
    padded = nn.functional.pad(images, (1, 1, 1, 1), "reflect")
    shifted = (padded[:, :, :-2, :-2], padded[:, :, 2:, 2:])
    return [
        (variant, share * weight)
        for each, share in ((images, 0.5), *((each, 0.25) for each in shifted))
        for variant, weight in _mirrored(each)
    ]


VARIANTS: dict[str, Callable[[Tensor], list[tuple[Tensor, float]]]] = {
    "none": lambda images: [(images, 1.0)],
    "mirror": _mirrored,
    "mirror and shift": _mirrored_and_shifted,
}
"""Variants of images over which evaluations average, with their weights."""
