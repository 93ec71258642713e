"""Weights of named loss terms: pure functions of the step, as learning rates are."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from isoscale.engine.config import LossWeight, LossWeightClass, Moment, MovingWeight
from isoscale.engine.optim.schedules import LearningRate, is_scheduler
from isoscale.errors import UserError

Weights = Mapping[str, float | MovingWeight]
"""As a recipe has them."""


@dataclass(frozen=True)
class WeightCurve:
    """The weight of a loss term at every step of a run."""

    at: Callable[[int], float]
    constant: float | None = None
    """The weight, where it never changes."""

    def __call__(self, step: int) -> float:
        """The weight at a step (from 0)."""
        return self.at(step)


@dataclass(frozen=True)
class Length:
    """How long a run is."""

    num_steps: int
    steps_per_epoch: int

    def per(self, every: str) -> int:
        """Steps after which a weight changes."""
        return self.steps_per_epoch if every == "epoch" else 1

    def num_units(self, every: str) -> int:
        """Steps of the run, or epochs with a broken one at the end."""
        return max(1, -(-self.num_steps // self.per(every)))

    def place(self, moment: Moment, every: str) -> int:
        """The step that a moment comes before, or the epoch."""
        if moment.unit == "training":
            return round(moment.count * self.num_units(every))
        steps = moment.count * (self.steps_per_epoch if moment.unit == "epoch" else 1)
        return math.ceil(steps / self.per(every) - 1e-9) if every == "epoch" else round(steps)


def make_weights(
    weights: Weights,
    own: Mapping[str, "partial[Any]"],
    rate: LearningRate,
    length: Length,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, WeightCurve]:
    """The weights of a recipe for a run of some length.

    `own` holds what is named by a class path, with arguments; `say` is told which weights do not get where they should.
    """
    return {name: _make(name, weight, own, rate, length, say) for name, weight in weights.items()}


def _make(
    name: str, weight: float | MovingWeight, own: Mapping[str, "partial[Any]"], rate: LearningRate | None,
    length: Length, say: Callable[[str], None],
) -> WeightCurve:  # fmt: skip
    if isinstance(weight, LossWeightClass):
        return _own(f"train.loss_weights.{name}", weight, own[name], length)
    if not isinstance(weight, LossWeight):
        return _constant(float(weight))
    if weight.name == "constant":
        assert weight.start is not None
        return _constant(weight.start)
    if weight.follows == "rate":
        start, end = weight.start or 0.0, weight.end or 0.0
        if rate is None:
            return WeightCurve(lambda step: end)
        return WeightCurve(lambda step: end + (start - end) * rate(step) / rate.peak)
    points = _points(weight, length)
    curve = WeightCurve(_Curve(points, _ease(weight), length.per(weight.every)))
    _tell_unreached(f"train.loss_weights.{name}", weight, points, length, curve, say)
    return curve


def _constant(value: float) -> WeightCurve:
    return WeightCurve(lambda step: value, value)


def _points(weight: LossWeight, length: Length) -> list[tuple[int, float]]:
    """(step or epoch, weight), in the order of the recipe."""
    last = length.num_units(weight.every) - 1

    def begin(moment: Moment) -> int:
        place = length.place(moment, weight.every)
        return min(place, last) if moment.unit == "training" else place

    points = [] if weight.start is None else [(begin(Moment.parse(weight.from_)), weight.start)]
    points += [(begin(Moment.parse(each.at)), each.value) for each in weight.values]
    if weight.end is not None:
        # what lasts for a single step has its first value there, and its last one after it
        points.append((max(length.place(Moment.parse(weight.until), weight.every) - 1, points[-1][0] + 1), weight.end))
    return points


@dataclass(frozen=True)
class _Curve:
    """From point to point along a shape."""

    points: list[tuple[int, float]]
    ease: Callable[[float], float]
    """From the part of the time that is over to the part of the way."""
    per: int

    def __call__(self, step: int) -> float:
        now = step // self.per
        passed = [place for place, (moment, _) in enumerate(self.points) if moment <= now]
        last = min(passed[-1], len(self.points) - 2) if passed else 0
        if last < 0:
            return self.points[0][1]
        (begin, one), (end, other) = self.points[last : last + 2]
        share = self.ease(min(1.0, max(0.0, (now - begin) / max(1, end - begin))))
        return other if share == 1 else one + share * (other - one)


def _ease(weight: LossWeight) -> Callable[[float], float]:
    if weight.name == "sigmoid":
        return _sigmoid(weight.center, weight.curvature, weight.exact)
    return _SHAPES[weight.name]


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda part: part,
    "cosine": lambda part: 1.0 if part == 1 else 0.5 * (1 - math.cos(math.pi * part)),
    "step": lambda part: float(part == 1),
}


def _sigmoid(center: float, curvature: float, exact: bool) -> Callable[[float], float]:
    """(v1 k^c + v0 k^t) / (k^c + k^t) is v0 + (v1 - v0) / (1 + k^(t - c))."""

    def ease(part: float) -> float:
        return 1 / (1 + curvature ** (part - center))

    low, high = ease(0.0), ease(1.0)
    return (lambda part: (ease(part) - low) / (high - low)) if exact else ease


def _tell_unreached(
    key: str, weight: LossWeight, points: list[tuple[int, float]], length: Length, curve: WeightCurve,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """A word where the training ends too early, or moments of several kinds come in another order than written."""
    units, last = f"{weight.every}s", length.num_units(weight.every)
    beyond = [moment for moment, _ in points if moment >= max(2, last)]
    if beyond:
        say(
            f"{key}: the training ends after {last:,} {units}, before the weight has got to the end of its schedule "
            f"({weight.every} {max(beyond) + 1:,}): its last value is {curve(length.num_steps - 1):g}; to give it the "
            "length of any training, write moments as fractions"
        )
    elif any(other < one for (one, _), (other, _) in pairwise(points)):
        order = ", ".join(str(moment) for moment, _ in points)
        say(f"{key}: its moments are not in the order of time ({units} {order}), and some of its values are passed by")


def _own(key: str, weight: LossWeightClass, own: "partial[Any]", length: Length) -> WeightCurve:
    """The weight by a function of one's own, tried at the first step and at the last one."""
    name = weight.class_
    if is_scheduler(own.func):
        raise UserError(f"{key}: {name} moves learning rates; a weight needs a function of (step, num_steps)")
    function = own() if inspect.isclass(own.func) else own
    per, last = length.per(weight.every), length.num_units(weight.every) - 1
    begin = min(length.place(Moment.parse(weight.from_), weight.every), last)
    count = max(1, length.place(Moment.parse(weight.until), weight.every) - begin)
    try:
        inspect.signature(function).bind(0, count)
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}: {name} is called with (step, num_steps), and it takes others: {error}") from None

    def at(step: int) -> float:
        now = min(max(step // per - begin, 0), count - 1)
        return _number(function(now, count), now, f"{key}: {name}")

    for step in {0, max(0, length.num_steps - 1)}:
        first, again = at(step), at(step)
        if first != again:
            raise UserError(
                f"{key}: {name} gives {first:g} and then {again:g} for the same step {step}: it must be a function of "
                "the step alone, or a restart would not continue on the same curve"
            )
    return WeightCurve(at)


def _number(value: Any, step: int, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(f"{what} gives {value!r} at step {step}; expected a weight, which is a number") from None
    if not math.isfinite(number):
        raise UserError(f"{what} gives {number} at step {step}; expected a weight, which is a finite number")
    return number


def last_weights(weights: Weights, own: Mapping[str, "partial[Any]"], length: Length) -> dict[str, float]:
    """The weights at the end of a training; those that follow the learning rate as at a rate of 0."""
    last = max(0, length.num_steps - 1)
    return {name: _make(name, weight, own, None, length, lambda text: None)(last) for name, weight in weights.items()}
