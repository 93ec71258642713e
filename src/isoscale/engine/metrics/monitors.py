"""Early stopping and the best checkpoint: metrics that are watched over a run, which must be there from its start."""

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from isoscale.engine import config
from isoscale.engine.settings import Settings
from isoscale.errors import UserError


def spelled(monitor: str, names: Container[str]) -> str | None:
    """A metric that somebody names, as it is called among `names`: LightningModules name theirs without a stage.

    `val/acc` is found as `acc` where a module has logged that, and `acc` as `val/acc`.
    """
    stage, _, metric = monitor.partition("/")
    bare = [metric, f"{metric}_epoch"] if stage == "val" else []
    if stage == "train":
        bare = [metric, metric.removesuffix("_epoch")]
    by_epoch = [] if stage == "train" else [f"{monitor}_epoch"]
    candidates = [monitor, *bare, *by_epoch, f"val/{monitor}"]
    return next((name for name in candidates if name in names), None)


def with_monitors(values: Mapping[str, float], settings: Settings) -> dict[str, float]:
    """Values, also by the names by which the recipe asks for some of them."""
    asked = {settings.checkpoint.monitor, *_steering(settings).values()}
    found = {name: spelled(name, values) for name in asked}
    return {**values, **{name: values[known] for name, known in found.items() if known is not None}}


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
        """Watch what the recipe says; None never stops."""
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


def check_without_evaluation(settings: Settings) -> None:
    """Refuse metrics that only an evaluation gives, where there is none."""
    for key, name in _steering(settings).items():
        if not _is_of_training(name):
            raise UserError(f"{key} is {name!r}, but nothing is evaluated; train/loss_epoch is always there")


def check_monitors(settings: Settings, names: list[str], say: Callable[[str], None]) -> None:
    """Refuse metrics that the validation, which gives these names, does not log."""
    for key, name in {"checkpoint.monitor": settings.checkpoint.monitor, **_steering(settings)}.items():
        if name == "val/loss" and name in names:
            _tell_unlike(key, settings, names, say)
        if spelled(name, names) is not None or (name.startswith("train") and _is_of_training(name)):
            continue  # what the training logs is not known yet
        if key == "checkpoint.monitor" and name == "val/loss":  # nobody chose it
            say(f"the validation logs no val/loss but {', '.join(names)}; the last checkpoint is the best")
            continue
        close = get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there is: {', '.join(names)}"
        raise UserError(f"{key} is {name!r}, which the validation does not log; {hint}")


def _tell_unlike(key: str, settings: Settings, names: list[str], say: Callable[[str], None]) -> None:
    """Losses that were weighed differently cannot be compared."""
    weights = settings.train.loss_weights.items()
    moving = [name for name, weight in weights if isinstance(weight, config.WeightSpan) and weight.is_moving]
    others = [name for name in names if name.startswith("val/") and name != "val/loss"]
    if moving and others:
        say(
            f"{key} is val/loss, whose weights move (train.loss_weights.{moving[0]}), so that early and late ones "
            f"cannot be compared: choose what means the same all along, such as {', '.join(others[:6])}"
        )


def _is_of_training(name: str) -> bool:
    """Whether training may log it: by epoch, or under a name that a module gives."""
    return name.endswith("_epoch") or (name.startswith("train") and not name.startswith("train/"))


def _steering(settings: Settings) -> dict[str, str]:
    """The metrics that steer the training, by the key that names them."""
    watched = {}
    if settings.train.early_stopping:
        watched["train.early_stopping.monitor"] = settings.train.early_stopping.monitor
    if isinstance(settings.schedule, config.Schedule) and settings.schedule.name == "plateau":
        watched["schedule.monitor"] = settings.schedule.monitor
    return watched
