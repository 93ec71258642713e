"""What a training shows besides numbers: its inputs, the distributions of its parameters, the results of its task."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isoscale.data import rng
from isoscale.data.batches import Batch, map_tensors
from isoscale.data.combined import CombinedSource
from isoscale.data.generators import seeded
from isoscale.data.mixture import Mixture
from isoscale.data.rng import StepRandom
from isoscale.data.sources import Source, own_copy
from isoscale.engine.assembly import Assembly
from isoscale.engine.diagnose.layers import Model, look_at
from isoscale.engine.evaluation import show_results
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.splits import Split
from isoscale.engine.step.step import cast
from isoscale.engine.task import Task
from isoscale.observe.config import Observe
from isoscale.observe.events import FiguresMade
from isoscale.observe.figures import Figure, Histogram
from isoscale.observe.observers import Observers
from isoscale.parallel.collectives import ALONE, Ranks

NUM_BINS = 64
NUM_SHOWN = 16
NUM_LOOKED_AT = 2


class FigureWriter:
    """Shows a training to those who want to see more than numbers."""

    def __init__(self, parts: Assembly, section: Observe, observers: Observers, ranks: Ranks = ALONE) -> None:
        """What is shown of `parts` follows from the recipe's section."""
        self._ranks = ranks
        self._parts = parts
        self._observers = observers
        self.distributions = section.tensorboard == 2
        """Whether the distributions of parameters and gradients are wanted; only TensorBoard draws them."""
        self.wanted = self.distributions or bool(section.loggers)
        """Whether anybody looks at figures."""

    def begin(self, step: int) -> None:
        """At the start of a run: some training samples, and the network."""
        if self.wanted and step == 0:
            network = look(self._parts).network()
            self._show(0, 0, {**_inputs(self._parts), **({"model": network} if network else {})})

    def evaluated(self, step: int, epoch: int, split: Split, loss_weights: Mapping[str, float]) -> None:
        """After an evaluation: figures of the task, and distributions of parameters and gradients."""
        if not self.wanted:
            return
        parts = self._parts
        shown = distributions(parts.task, _gradient_scale(parts)) if self.distributions else {}
        with parts.ema.swapped_in() if parts.ema else nullcontext():
            shown.update(_named("val", show_results(parts.forward("predict", loss_weights), split, self._ranks)))
        parts.train_context.enter()
        self._show(step, epoch, shown)

    def _show(self, step: int, epoch: int, shown: dict[str, Figure]) -> None:
        if shown:
            self._observers.notify(FiguresMade(step, epoch, shown))


def look(parts: Assembly, beside: AbstractContextManager[Any] | None = None) -> Model:
    """The model's layers, seen at work on a few samples; a LightningModule's hooks are not called for that.

    Another one that looks may do so `beside`.
    """
    forward = parts.forward("predict", {})

    def predict() -> None:
        try:
            batch = samples_of(parts, NUM_LOOKED_AT)
            with parts.precision.applied(), beside or nullcontext():
                forward.compute(batch, 0)
        finally:
            parts.train_context.enter()

    return look_at(parts.task, predict if isinstance(parts.task, Task) else None)


def _inputs(parts: Assembly) -> dict[str, Figure]:
    """What the task shows of some training samples as the network sees them, augmentation included."""
    if not overrides(parts.task, "show_inputs"):
        return {}
    batch = map_tensors(samples_of(parts, NUM_SHOWN, parts.random), lambda tensor: tensor.cpu())
    return _named("train", parts.task.show_inputs(parts.train.source, batch))


def samples_of(parts: Assembly, count: int, random: StepRandom | None = None) -> Batch:
    """The first samples of the training data, as the network sees them."""
    device, dtype = parts.accelerator.device, parts.precision.dtype
    return sample(parts.train.source, count, parts.transforms, device, dtype, random)


def _gradient_scale(parts: Assembly) -> float:
    """What fp16 has multiplied the gradients by; clipping has undone it already."""
    step = parts.step
    return float(step.scaler.get_scale()) if step is not None and step.scaler is not None and step.clip is None else 1.0


def distributions(task: nn.Module, gradient_scale: float = 1.0) -> dict[str, Figure]:
    """Histograms of every parameter and of its last gradient; those that hold no finite number are left out."""
    shown: dict[str, Figure] = {}
    for name, parameter in task.named_parameters():
        gradient = parameter.grad
        shown.update(_histogram(f"parameters/{name}", parameter.detach()))
        if gradient is not None:
            shown.update(_histogram(f"gradients/{name}", gradient / gradient_scale))
    return shown


def _histogram(name: str, values: Tensor) -> dict[str, Figure]:
    finite = values[torch.isfinite(values)].float()
    if not finite.numel():
        return {}
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(finite, NUM_BINS, low, high).cpu().numpy().astype(np.float64)
    return {name: Histogram(counts, np.linspace(low, high, NUM_BINS + 1))}


def _named(stage: str, shown: Mapping[str, Figure]) -> dict[str, Figure]:
    return {f"{stage}/{name}": figure for name, figure in shown.items()}


def sample(
    source: Source, count: int, transforms: Sequence[Any], device: torch.device, dtype: torch.dtype,
    random: StepRandom | None = None,
) -> Batch:  # fmt: skip
    """The first samples of a source, or of its first system, as the network sees them.

    With `random`, they are augmented as in a first step.
    """
    first = source.systems[0] if isinstance(source, Mixture | CombinedSource) else source
    indices = torch.arange(min(count, len(first)))
    with seeded(0), rng.use(random):
        if random is not None:
            random.step, random.samples = 0, indices.to(device)
        batch = map_tensors(own_copy(source, source.fetch(indices)), lambda tensor: tensor.to(device))
        for transform in transforms:
            batch = transform(batch)
    return cast(batch, dtype)
