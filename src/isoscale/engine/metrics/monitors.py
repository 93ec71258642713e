"""What is watched over the course of a run: the best value of a metric, and when to stop early."""

import math
from dataclasses import dataclass
from typing import Any

from isoscale.engine import config


@dataclass
class BestTracker:
    """The best value of a metric so far."""

    monitor: str
    mode: str
    value: float | None = None
    step: int | None = None

    def watch(self, values: dict[str, float], step: int) -> bool:
        """Take an evaluation's metrics; True if the monitored one is the best so far."""
        value = values.get(self.monitor)
        if value is None or math.isnan(value) or not self._better(value):
            return False
        self.value, self.step = value, step
        return True

    def _better(self, value: float) -> bool:
        if self.value is None:
            return True
        return value < self.value if self.mode == "min" else value > self.value

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The best value and its step, and of what."""
        return {}, dict(vars(self))

    def load(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """Take over a state; that of another metric says nothing about this one."""
        if (values["monitor"], values["mode"]) == (self.monitor, self.mode):
            self.value, self.step = values["value"], values["step"]


class EarlyStopping:
    """Early stopping: counts evaluations without improvement."""

    def __init__(self, section: config.EarlyStopping | None) -> None:
        """HealthClient what the recipe says; None never stops."""
        self._section = section
        self._best: float | None = None
        self._stalled = 0

    def watch(self, values: dict[str, float]) -> bool:
        """Take an evaluation's metrics; True if training should end."""
        if self._section is None or self._section.monitor not in values:
            return False
        value = values[self._section.monitor] * (1 if self._section.mode == "min" else -1)
        if not math.isnan(value) and (self._best is None or value < self._best - self._section.min_delta):
            self._best, self._stalled = value, 0
        else:
            self._stalled += 1
        return self._stalled >= self._section.patience

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What was seen."""
        return {}, {"best": self._best, "stalled": self._stalled}

    def load(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """Take over a state."""
        self._best, self._stalled = values["best"], values["stalled"]
