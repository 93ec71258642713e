"""Losses and metrics by name, as functions of (prediction, target) that return a pair."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from isoscale.engine.metrics.weighted_sum import WeightedSum
from isoscale.errors import UserError

Criterion = Callable[..., WeightedSum]


IGNORED = -100
"""The label of samples that torch's losses of classes leave out."""


def class_labels(prediction: Tensor, target: Tensor) -> Tensor:
    """Class labels as torch wants them: int64 without a dimension of classes, or floats of the prediction's shape.

    `prediction` has the shape (batch, classes, …). Labels may be of any type and may have one column, (batch, 1, …);
    integers of the prediction's shape are one-hot, which is to say probabilities. Nothing here waits for the device.
    """
    if target.shape == prediction.shape:
        return target if target.is_floating_point() else target.to(prediction.dtype)
    sizes = prediction.shape[:1] + prediction.shape[2:]
    if target.shape == (*prediction.shape[:1], 1, *prediction.shape[2:]):
        target = target.squeeze(1)
    if target.shape != sizes or prediction.dim() < 2:
        raise UserError(
            f"the targets have the shape {tuple(target.shape)} and the scores {tuple(prediction.shape)}: expected one "
            f"label each, {tuple(sizes)}, or a probability for each class, {tuple(prediction.shape)}; reshape them"
        )
    return target if target.dtype == torch.int64 else target.to(torch.int64)


def class_numbers(prediction: Tensor, target: Tensor) -> Tensor:
    """Class labels as int64 without a dimension of classes; of probabilities, the most probable class."""
    labels = class_labels(prediction, target)
    return labels.argmax(1) if labels.is_floating_point() else labels


def check_labels(
    target: Tensor, split: str, num_classes: int | None, ignored: int | None = IGNORED
) -> tuple[int, int] | None:
    """Refuse labels that are not the number of a class, looking at all of them; the lowest and the highest.

    Floats with several columns may be probabilities, and pass.
    """
    if not target.numel() or (target.is_floating_point() and target.dim() > 1 and target.shape[1] != 1):
        return None
    if target.is_complex():
        raise UserError(f"the labels of the {split} data are {_dtype(target)}; expected whole numbers from 0")
    if target.is_floating_point():
        broken = target[target != target.round()].flatten()
        if len(broken):
            raise UserError(
                f"the labels of the {split} data are {_dtype(target)}, and {float(broken[0]):g} is among them; "
                "expected whole numbers, one for each class from 0; for values that are to be predicted, use loss: mse"
            )
    labels = target.to(torch.int64)
    labels = labels if ignored is None else labels[labels != ignored]
    if not labels.numel():
        return None
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or (num_classes is not None and high >= num_classes):
        raise UserError(_out_of_range(split, low, high, num_classes, ignored))
    return low, high


def _out_of_range(split: str, low: int, high: int, num_classes: int | None, ignored: int | None = None) -> str:
    has = "" if num_classes is None else f"the model has {num_classes} classes, "
    are = "classes are numbered" if num_classes is None else "numbered"
    text = f"the labels of the {split} data run from {low} to {high}, but {has}{are} from 0; "
    if low >= 0:
        return f"{text}set the size of its last layer to {high + 1} or correct the labels"
    return f"{text}correct the labels" + (
        "" if ignored is None else f", or give those to be left out the number {ignored}"
    )


def check_scores(prediction: Tensor, split: str, found: tuple[int, int] | None) -> None:
    """Refuse scores for fewer classes than the labels have; `found` is what `check_labels` returned."""
    if found is not None and prediction.dim() > 1 and found[1] >= prediction.shape[1]:
        raise UserError(_out_of_range(split, *found, prediction.shape[1]))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _whole(loss: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """The loss; NaN where a label is a fraction, which the run then reports: to ask would wait for the device."""
    if not target.is_floating_point() or labels.is_floating_point():
        return loss
    return torch.where((target == labels.view(target.shape)).all(), loss, torch.nan)


def cross_entropy(
    prediction: Tensor, target: Tensor, weight: Tensor | None = None, label_smoothing: float = 0.0
) -> WeightedSum:
    """Cross entropy of class scores (batch, classes, …); with class weights, their sum is the pair's weight.

    That holds for probabilities too, so that one-hot labels and their numbers have the same loss.
    """
    labels = class_labels(prediction, target)
    if weight is None:
        mean = functional.cross_entropy(prediction, labels, label_smoothing=label_smoothing)
        return WeightedSum.of_mean(_whole(mean, target, labels), target.shape[0])
    if len(weight) != prediction.shape[1]:
        raise UserError(
            f"there are {len(weight)} class weights, but the model has {prediction.shape[1]} classes; give one for each"
        )
    total = functional.cross_entropy(prediction, labels, weight, reduction="sum", label_smoothing=label_smoothing)
    if labels.is_floating_point():
        return WeightedSum(total, (labels.movedim(1, -1) * weight).sum())
    weights = weight[labels.clamp(min=0)]
    return WeightedSum(_whole(total, target, labels), torch.where(labels == IGNORED, 0, weights).sum())


def nll(prediction: Tensor, target: Tensor) -> WeightedSum:
    """Negative log likelihood of log probabilities (batch, classes, …)."""
    labels = class_labels(prediction, target)
    if labels.is_floating_point():
        raise UserError(
            f"nll needs the number of a class for each sample, but the targets have a column for each class, "
            f"{tuple(target.shape)}; use their argmax(1), or loss: kl"
        )
    return WeightedSum.of_mean(_whole(functional.nll_loss(prediction, labels), target, labels), target.shape[0])


def accuracy(prediction: Tensor, target: Tensor) -> WeightedSum:
    """Share of samples whose highest score is that of the right class, or of the most probable one."""
    if prediction.dim() < 2 or prediction.shape[1] == 1:
        raise UserError(
            f"accuracy needs a score for each class, (batch, classes), but the predictions have the shape "
            f"{tuple(prediction.shape)}; for two classes with one score, use torchmetrics.Accuracy(task='binary')"
        )
    labels = class_numbers(prediction, target)
    return WeightedSum((prediction.argmax(1) == labels).sum(), labels.numel())


def as_numbers(prediction: Tensor, target: Tensor) -> Tensor:
    """Targets that are values, as floats: integers and booleans in the precision that torch compares them in."""
    if target.is_complex() and not prediction.is_complex():
        raise UserError(
            f"the target holds complex numbers ({_dtype(target)}), but the model predicts real ones "
            f"({_dtype(prediction)}); give its real and imaginary parts as columns of their own"
        )
    if target.is_floating_point() or target.is_complex():
        return target
    return target.to(torch.promote_types(prediction.dtype, torch.float32))


def _regression(function: Callable[..., Tensor]) -> Callable[..., WeightedSum]:
    def criterion(prediction: Tensor, target: Tensor, **arguments: Any) -> WeightedSum:
        if prediction.shape != target.shape:
            raise UserError(
                f"prediction {tuple(prediction.shape)} and target {tuple(target.shape)} have different shapes, "
                "which would be broadcast against each other; reshape one of them"
            )
        mean = function(prediction, as_numbers(prediction, target), **arguments)
        return WeightedSum.of_mean(mean, target.shape[0])

    return criterion


def _mse(prediction: Tensor, target: Tensor) -> Tensor:
    """Not torch.nn.functional's, which broadcasts first: in Python, and what is refused here."""
    return torch._C._nn.mse_loss(prediction, target, _MEAN)  # type: ignore[arg-type]


_MEAN = 1
"""As torch counts reductions."""

LOSSES: dict[str, Callable[..., WeightedSum]] = {
    "cross_entropy": cross_entropy,
    "mse": _regression(_mse),
    "mae": _regression(functional.l1_loss),
    "l1": _regression(functional.l1_loss),
    "huber": _regression(functional.huber_loss),
    "smooth_l1": _regression(functional.smooth_l1_loss),
    "bce": _regression(functional.binary_cross_entropy_with_logits),
    "nll": nll,
    "kl": _regression(lambda prediction, target: functional.kl_div(prediction, target, reduction="batchmean")),
}
METRICS: dict[str, Callable[..., WeightedSum]] = {
    "accuracy": accuracy,
    "mse": LOSSES["mse"],
    "mae": LOSSES["mae"],
}


def find_loss(loss: str | Callable[..., Any]) -> Criterion:
    """A loss by name, or any callable that returns a mean over the batch or a pair."""
    return _named(loss, LOSSES, "loss") if isinstance(loss, str) else _returning_pair(loss)


def find_metric(metric: str | Callable[..., Any]) -> Criterion:
    """A metric by name, or any callable that returns a mean over the batch or a pair."""
    return _named(metric, METRICS, "metric") if isinstance(metric, str) else _returning_pair(metric)


_CLASSES: tuple[Any, ...] = (
    nn.CrossEntropyLoss, nn.NLLLoss, functional.cross_entropy, functional.nll_loss, cross_entropy, nll,
)  # fmt: skip
_NUMBERS: tuple[Any, ...] = (
    nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss, nn.BCELoss, nn.BCEWithLogitsLoss,
    functional.mse_loss, functional.l1_loss, functional.huber_loss, functional.smooth_l1_loss,
    functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits,
)  # fmt: skip


def takes_classes(loss: str | Callable[..., Any]) -> bool:
    """Whether the targets of a loss are the numbers of classes, as far as that is known."""
    return _is_one(LOSSES.get(loss) if isinstance(loss, str) else loss, _CLASSES)


def _is_one(function: Any, known: tuple[Any, ...]) -> bool:
    function = getattr(function, "func", function)  # of a partial
    return any(function is one or type(function) is one for one in known)


def name_of(function: Any) -> str:
    """What a loss or metric is called: its name, that of the function inside a partial, or that of its class."""
    function = getattr(function, "func", function)
    return function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)


def _check_called(function: Callable[..., Any]) -> None:
    """Refuse what cannot be called with a prediction and a target."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return  # some functions written in C do not tell theirs
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise UserError(
            f"a loss or metric is called with (prediction, target), but {name_of(function)} takes {signature}: {error};"
            " where a loss needs something else, write a task of your own whose training_step returns it"
        ) from None


def _returning_pair(function: Callable[..., Any]) -> Criterion:
    """Torch's own losses get targets in the form that they want; others as they are."""
    if not callable(function):
        raise UserError(
            f"{function!r} is not a loss or metric: give a name, such as mse or cross_entropy, or a function; in a "
            "recipe also a class path, {class: torch.nn.HuberLoss, delta: 0.5}"
        )
    _check_called(function)
    of_classes, of_numbers = _is_one(function, _CLASSES), _is_one(function, _NUMBERS)

    def criterion(prediction: Tensor, target: Tensor) -> WeightedSum:
        given = target
        if of_classes:
            given = class_labels(prediction, target)
        elif of_numbers:
            given = as_numbers(prediction, target)
        try:
            value = function(prediction, given)
        except (RuntimeError, IndexError, ValueError) as error:
            error.add_note(
                f"in {name_of(function)}, given predictions of "
                f"{_dtype(prediction)} {tuple(prediction.shape)} and targets of {_dtype(target)} {tuple(target.shape)}"
            )
            raise
        if of_classes and isinstance(value, Tensor):
            value = _whole(value, target, given)
        return as_weighted_sum(value, target.shape[0])

    return criterion


def _named(name: str, known: dict[str, Callable[..., WeightedSum]], what: str) -> Criterion:
    if name in known:
        return known[name]
    close = get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}, and class paths"
    raise UserError(f"unknown {what} {name!r}: {hint}")


def as_weighted_sum(value: Any, count: int) -> WeightedSum:
    """A pair from what a step returned or logged: a pair, (sum, weight), or a mean over `count` samples."""
    if isinstance(value, WeightedSum):
        return value
    if isinstance(value, tuple) and len(value) == 2:
        return WeightedSum(*value)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UserError(
            f"a loss or metric must be one number, not a tensor of shape {tuple(value.shape)}; take its mean"
        )
    if isinstance(value, Tensor):
        return WeightedSum.of_mean(value.reshape(()) if value.dim() else value, count)
    if not isinstance(value, int | float | np.number | np.ndarray):
        raise UserError(
            f"a loss or metric must be a number, a tensor of one, or a pair, not {type(value).__name__}"
            + (": does the step return its loss?" if value is None else "")
        )
    return WeightedSum(torch.as_tensor(float(value) * count), count)
