"""Learning rate schedules: pure functions of the step, and for plateau of the metric's history too."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from isoscale.engine.config import LossWeight, Schedule

Curve = Callable[[float], float]


def _scaled_steps(section: Schedule, batch_size: int) -> Schedule:
    """The schedule in fewer steps where a step takes more samples than the recipe was made for."""
    if not section.scale_steps:
        return section
    ratio = batch_size / (section.base_batch_size or batch_size)
    numbers = {"every": section.every, "warmup": section.warmup if isinstance(section.warmup, int) else None}
    fewer: dict[str, Any] = {key: max(1, round(number / ratio)) for key, number in numbers.items() if number}
    if section.milestones:
        fewer["milestones"] = [max(1, round(number / ratio)) for number in section.milestones]
    return section.model_copy(update=fewer)


def scaling(section: Schedule, batch_size: int) -> float:
    """The factor of the scaling rule for a global batch."""
    ratio = batch_size / (section.base_batch_size or batch_size)
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[section.scale]


@dataclass
class LearningRate:
    """The learning rate of every step of a run."""

    section: Schedule
    peak: float
    """The learning rate after warm-up, the scaling rule applied."""
    num_steps: int
    factor: float = 1.0
    """What plateau has multiplied the learning rate by."""
    _best: float = field(default=math.inf, repr=False)
    _stalled: int = field(default=0, repr=False)

    @classmethod
    def make(cls, section: Schedule, lr: float, batch_size: int, num_steps: int) -> "LearningRate":
        """The schedule of a recipe for a run of `num_steps`."""
        start = section.start if section.start is not None and section.name != "onecycle" else lr
        return cls(_scaled_steps(section, batch_size), start * scaling(section, batch_size), num_steps)

    @property
    def num_warmup(self) -> int:
        """Steps of linear rise."""
        warmup = self.section.warmup
        if self.section.name == "onecycle" and not warmup:
            warmup = 0.3
        return round(warmup * self.num_steps) if isinstance(warmup, float) else warmup

    def __call__(self, step: int) -> float:
        """The learning rate of a step (from 0)."""
        if step < self.num_warmup:
            return self._rise(step)
        return self._after(step)

    def _rise(self, step: int) -> float:
        if self.section.name != "onecycle":
            return self.peak * (step + 1) / self.num_warmup
        start = self.section.start if self.section.start is not None else self.peak / 25
        part = step / max(1, self.num_warmup - 1)
        return start + (self.peak - start) * 0.5 * (1 - math.cos(math.pi * part))

    def _after(self, step: int) -> float:
        first = self.num_warmup - (self.section.name == "onecycle")  # its rise ends with the peak
        since = step - first
        part = min(1.0, since / max(1, self.num_steps - first - 1))
        return {
            "constant": lambda: self.peak,
            "cosine": lambda: self._between(0.5 * (1 + math.cos(math.pi * part))),
            "linear": lambda: self._between(1 - part),
            "onecycle": lambda: self._between(0.5 * (1 + math.cos(math.pi * part)), self.peak / 1e4),
            "exponential": lambda: self._exponential(since, part),
            "step": lambda: self._drops(step, since),
            "plateau": lambda: max(self.peak * self.factor, self.section.end or 0.0),
        }[self.section.name]()

    def _between(self, share: float, default_end: float = 0.0) -> float:
        end = self.section.end if self.section.end is not None else default_end
        return end + (self.peak - end) * share

    def _exponential(self, since: int, part: float) -> float:
        gamma, every, end = self.section.gamma, self.section.every, self.section.end or 0.0
        if every is None:
            return float(self.peak * (end / self.peak) ** part)
        if gamma is None:
            gamma = (end / self.peak) ** (every / (self.num_steps - self.num_warmup))
        return float(max(self.peak * gamma ** (since // every), end))

    def _drops(self, step: int, since: int) -> float:
        gamma = 0.1 if self.section.gamma is None else self.section.gamma
        milestones, every = self.section.milestones, self.section.every
        drops = sum(step >= milestone for milestone in milestones) if milestones else since // (every or 1)
        return float(max(self.peak * gamma**drops, self.section.end or 0.0))

    def watch(self, values: dict[str, float]) -> bool:
        """Plateau: take an evaluation's metrics; True if the learning rate dropped."""
        if self.section.name != "plateau" or self.section.monitor not in values:
            return False
        value = values[self.section.monitor] * (1 if self.section.mode == "min" else -1)
        margin = self.section.threshold * abs(self._best) if math.isfinite(self._best) else 0.0
        if value < self._best - margin:
            self._best, self._stalled = value, 0
            return False
        self._stalled += 1
        if self._stalled <= self.section.patience:
            return False
        self.factor *= 0.1 if self.section.gamma is None else self.section.gamma
        self._stalled = 0
        return True

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What plateau has seen."""
        best = self._best if math.isfinite(self._best) else None
        return {}, {"factor": self.factor, "best": best, "stalled": self._stalled}

    def load(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """Take over a state."""
        self.factor, self._stalled = values["factor"], values["stalled"]
        self._best = math.inf if values["best"] is None else values["best"]


def loss_weight(weight: float | LossWeight, step: int, rate: LearningRate) -> float:
    """The weight of a named loss term at a step."""
    if not isinstance(weight, LossWeight):
        return float(weight)
    if weight.follows == "rate":
        return weight.end + (weight.start - weight.end) * rate(step) / rate.peak
    return weight.start + (weight.end - weight.start) * min(1.0, step / max(1, rate.num_steps - 1))
