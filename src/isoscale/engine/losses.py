"""Losses and metrics by name, as functions of (prediction, target) that return a pair."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from isoscale.engine.pairs import Pair
from isoscale.errors import UserError

Criterion = Callable[..., Pair]


def _of_mean(function: Callable[..., Tensor]) -> Callable[..., Pair]:
    def criterion(prediction: Tensor, target: Tensor, **arguments: Any) -> Pair:
        return Pair.of_mean(function(prediction, target, **arguments), target.shape[0])

    return criterion


def cross_entropy(
    prediction: Tensor, target: Tensor, weight: Tensor | None = None, label_smoothing: float = 0.0
) -> Pair:
    """Cross entropy of class scores (batch, classes, …); with class weights, their sum is the pair's weight."""
    if weight is None:
        mean = functional.cross_entropy(prediction, target, label_smoothing=label_smoothing)
        return Pair.of_mean(mean, target.shape[0])
    total = functional.cross_entropy(prediction, target, weight, reduction="sum", label_smoothing=label_smoothing)
    return Pair(total, weight[target].sum())


def accuracy(prediction: Tensor, target: Tensor) -> Pair:
    """Share of samples whose highest score is that of the right class."""
    return Pair((prediction.argmax(1) == target).sum(), target.numel())


def _regression(function: Callable[..., Tensor]) -> Callable[..., Pair]:
    def criterion(prediction: Tensor, target: Tensor, **arguments: Any) -> Pair:
        if prediction.shape != target.shape:
            raise UserError(
                f"prediction {tuple(prediction.shape)} and target {tuple(target.shape)} have different shapes, "
                "which would be broadcast against each other; reshape one of them"
            )
        return Pair.of_mean(function(prediction, target, **arguments), target.shape[0])

    return criterion


def _mse(prediction: Tensor, target: Tensor) -> Tensor:
    """Not torch.nn.functional's, which broadcasts first: in Python, and what is refused here."""
    return torch._C._nn.mse_loss(prediction, target, _MEAN)  # type: ignore[arg-type]


_MEAN = 1
"""As torch counts reductions."""

LOSSES: dict[str, Callable[..., Pair]] = {
    "cross_entropy": cross_entropy,
    "mse": _regression(_mse),
    "mae": _regression(functional.l1_loss),
    "l1": _regression(functional.l1_loss),
    "huber": _regression(functional.huber_loss),
    "smooth_l1": _regression(functional.smooth_l1_loss),
    "bce": _regression(functional.binary_cross_entropy_with_logits),
    "nll": _of_mean(functional.nll_loss),
    "kl": _of_mean(lambda prediction, target: functional.kl_div(prediction, target, reduction="batchmean")),
}
METRICS: dict[str, Callable[..., Pair]] = {
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


def _returning_pair(function: Callable[..., Any]) -> Criterion:
    def criterion(prediction: Tensor, target: Tensor) -> Pair:
        return as_pair(function(prediction, target), target.shape[0])

    return criterion


def _named(name: str, known: dict[str, Callable[..., Pair]], what: str) -> Criterion:
    if name in known:
        return known[name]
    close = get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
    raise UserError(f"unknown {what} {name!r}: {hint}")


def as_pair(value: Any, count: int) -> Pair:
    """A pair from what a step returned or logged: a pair, (sum, weight), or a mean over `count` samples."""
    if isinstance(value, Pair):
        return value
    if isinstance(value, tuple) and len(value) == 2:
        return Pair(*value)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UserError(
            f"a loss or metric must be one number, not a tensor of shape {tuple(value.shape)}; take its mean"
        )
    if isinstance(value, Tensor):
        return Pair.of_mean(value.reshape(()) if value.dim() else value, count)
    if not isinstance(value, int | float | np.number | np.ndarray):
        raise UserError(
            f"a loss or metric must be a number, a tensor of one, or a pair, not {type(value).__name__}"
            + (": does the step return its loss?" if value is None else "")
        )
    return Pair(torch.as_tensor(float(value) * count), count)
