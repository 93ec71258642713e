"""Learning rate schedules: pure functions of the step, and for plateau of the metric's history too."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from isoscale.engine.config import AnySchedule, Schedule
from isoscale.engine.optim.late_compiler import put_off_compiler
from isoscale.errors import UserError

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


def scaling(section: AnySchedule, batch_size: int) -> float:
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


def make_rate(
    section: AnySchedule, lr: float, batch_size: int, num_steps: int, own: "partial[Any] | None" = None
) -> LearningRate:
    """The schedule of a recipe for a run of `num_steps`; `own` is what it names by its class path, with arguments."""
    if isinstance(section, Schedule):
        return LearningRate.make(section, lr, batch_size, num_steps)
    assert own is not None
    peak = lr * scaling(section, batch_size)
    # the rise is that of every schedule; what comes after it is the class's
    rate = OwnRate(Schedule(warmup=section.warmup), peak, num_steps)
    rate.follow(own, section.class_)
    return rate


@dataclass
class OwnRate(LearningRate):
    """The learning rate by a function of one's own, or by a scheduler of torch, after the warm-up."""

    _function: Callable[[int], Any] = field(default=lambda step: 1.0, repr=False)
    _name: str = ""

    def follow(self, own: "partial[Any]", name: str) -> None:
        """Take what the class path `name` stands for; it is tried at its first step and at its last one.

        A function is called with `(step, num_steps, **arguments)`, the object of a class with `(step, num_steps)`, both
        counted from the end of the warm-up. They return the factor of the learning rate, and must be pure: the same
        step gives the same factor, whatever was asked before, or a restart would not continue on the same curve.
        """
        unfit = why_unfit(own.func)
        if unfit:
            raise UserError(f"schedule: {unfit}")
        self._name, num_left = name, max(1, self.num_steps - self.num_warmup)
        if is_scheduler(own.func):
            self._function = _Ahead(own, self.peak, num_left)
        else:
            factor = own() if inspect.isclass(own.func) else own
            try:
                inspect.signature(factor).bind(0, num_left)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"schedule {name} is called with (step, num_steps), and it takes others: {error}"
                ) from None
            self._function = lambda step: self.peak * self._number(factor(step, num_left), step, "a factor")
        last = 0 if is_scheduler(own.func) else self.num_steps - 1  # to run one ahead takes its time
        for step in {min(self.num_warmup, self.num_steps - 1), last}:
            first, again = self(step), self(step)
            if first != again:
                raise UserError(
                    f"schedule {name} gives {first:g} and then {again:g} for the same step {step}: it must be a "
                    "function of the step alone, or a restart would not continue on the same curve"
                )

    def _after(self, step: int) -> float:
        since = step - self.num_warmup
        return self._number(self._function(since), since, "a learning rate")

    def _number(self, value: Any, step: int, what: str) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise UserError(f"schedule {self._name} gives {value!r} at step {step}; expected {what}") from None
        if not math.isfinite(number) or number < 0:
            raise UserError(
                f"schedule {self._name} gives {number} at step {step}; expected {what}, finite and not below 0"
            )
        return number


class _Ahead:
    """A scheduler of torch, run on the host for an optimizer of no account.

    Most of them compute a rate from the one before: all rates up to a step are kept, and made anew after a restart.
    """

    def __init__(self, own: "partial[Any]", peak: float, num_steps: int) -> None:
        put_off_compiler()
        optimizer = SGD([torch.zeros(1)], lr=peak)
        supplied = supplied_to(own.func, own.keywords)
        values = {"T_max": num_steps, "total_steps": num_steps, "max_lr": peak, "cycle_momentum": False}
        try:
            self._scheduler = own(optimizer, **{name: values[name] for name in supplied})
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(f"schedule {own.func.__name__} refuses its arguments: {error}") from error
        optimizer.step()  # else torch warns that it has made none
        self._optimizer = optimizer
        self._rates = [float(optimizer.param_groups[0]["lr"])]

    def __call__(self, step: int) -> float:
        """The learning rate of a step."""
        while len(self._rates) <= step:
            self._scheduler.step()
            self._rates.append(float(self._optimizer.param_groups[0]["lr"]))
        return self._rates[step]


def is_scheduler(target: Any) -> bool:
    """Whether something is a class of schedulers of torch."""
    return inspect.isclass(target) and issubclass(target, LRScheduler)


def supplied_to(scheduler: Callable[..., Any], arguments: Any) -> list[str]:
    """The arguments of a scheduler of torch that follow from the run, where the recipe does not give them.

    Only the learning rate is moved, so that no momentum is: `cycle_momentum` is false.
    """
    names = ["T_max", "total_steps", "max_lr", "cycle_momentum"]
    if "epochs" in arguments or "steps_per_epoch" in arguments:
        names.remove("total_steps")
    return [name for name in names if name in inspect.signature(scheduler).parameters and name not in arguments]


def why_unfit(target: Any) -> str | None:
    """Why something that a class path leads to cannot be a schedule, if so."""
    name = getattr(target, "__name__", str(target))
    if is_scheduler(target):
        if issubclass(target, ReduceLROnPlateau):
            return (
                f"{name} waits for metrics, and is no function of the step; use schedule="
                "{name: plateau, monitor: val/loss, patience: 10, gamma: 0.1}"
            )
        if "schedulers" in inspect.signature(target).parameters:
            return f"{name} takes other schedulers, which a recipe cannot give it; write a function of the step instead"
        return None
    if inspect.isclass(target) and "__call__" not in dir(target):
        return f"{name} is no schedule: its objects cannot be called with (step, num_steps)"
    return None
