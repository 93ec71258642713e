"""What a training shows besides numbers: its inputs, the distributions of its parameters, the results of its task."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isoscale.data import keyed
from isoscale.data.batches import Batch, map_tensors
from isoscale.data.keyed import StepRandom
from isoscale.data.sources import Source
from isoscale.engine.assembly import Assembly
from isoscale.engine.evaluate import show_results
from isoscale.engine.loaders import seeded
from isoscale.engine.roles import Role
from isoscale.engine.step import Forward, cast
from isoscale.engine.task import Task
from isoscale.observe.exhibits import Exhibit, Histogram

NUM_BINS = 64
NUM_SHOWN = 16


def inputs(parts: Assembly) -> dict[str, Exhibit]:
    """What the task shows of some training samples as the network sees them, augmentation included."""
    show = getattr(parts.task, "show_inputs", None)
    if show is None or getattr(show, "__func__", None) is Task.show_inputs:
        return {}
    dtype = parts.precision.dtype
    batch = sample(parts.train.source, NUM_SHOWN, parts.transforms, parts.accelerator.device, dtype, parts.random)
    return _named("train", show(parts.train.source, map_tensors(batch, lambda tensor: tensor.cpu())))


def results(parts: Assembly, role: Role, loss_weights: Mapping[str, float]) -> dict[str, Exhibit]:
    """What the task shows of its predictions on the validation data."""
    forward: Forward = parts.forward("predict", loss_weights)
    shown = _named("val", show_results(forward, role))
    parts.train_stage.enter()
    return shown


def distributions(task: nn.Module, gradient_scale: float = 1.0) -> dict[str, Exhibit]:
    """Histograms of every parameter and of its last gradient; those that hold no finite number are left out."""
    shown: dict[str, Exhibit] = {}
    for name, parameter in task.named_parameters():
        gradient = parameter.grad
        shown.update(_histogram(f"parameters/{name}", parameter.detach()))
        if gradient is not None:
            shown.update(_histogram(f"gradients/{name}", gradient / gradient_scale))
    return shown


def _histogram(name: str, values: Tensor) -> dict[str, Exhibit]:
    finite = values[torch.isfinite(values)].float()
    if not finite.numel():
        return {}
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(finite, NUM_BINS, low, high).cpu().numpy().astype(np.float64)
    return {name: Histogram(counts, np.linspace(low, high, NUM_BINS + 1))}


def _named(stage: str, shown: Mapping[str, Exhibit]) -> dict[str, Exhibit]:
    return {f"{stage}/{name}": exhibit for name, exhibit in shown.items()}


def sample(
    source: Source, count: int, transforms: Sequence[Any], device: torch.device, dtype: torch.dtype,
    random: StepRandom | None = None,
) -> Batch:  # fmt: skip
    """The first samples of a source as the network sees them; with `random`, augmented as in a first step."""
    indices = torch.arange(min(count, len(source)))
    with seeded(0), keyed.use(random):
        if random is not None:
            random.step, random.samples = 0, indices.to(device)
        batch = map_tensors(source.fetch(indices), lambda tensor: tensor.to(device))
        for transform in transforms:
            batch = transform(batch)
    return cast(batch, dtype)
