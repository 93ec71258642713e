"""The recipe sections that the engine reads."""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from isoscale.config import Config, OpenConfig

Unit = Literal["epoch", "step", "minute", "never"]
_PATTERN = re.compile(r"(\d+)\s*(epoch|step|minute)s?( of each epoch)?")
_FRACTION = re.compile(r"(0?\.\d+)\s*epochs?")


@dataclass(frozen=True)
class Cadence:
    """A count of a unit; `Cadence(2, "epoch")` is every second epoch, `Cadence(0.25, "epoch")` four times in each."""

    count: int | float
    unit: Unit
    of_epoch: bool = False
    """Whether steps are counted from the beginning of each epoch."""

    @classmethod
    def parse(cls, text: str) -> "Cadence":
        """Read "500 steps"; raises ValueError with the accepted forms."""
        if text.strip() == "never":
            return cls(1, "never")
        fraction = _FRACTION.fullmatch(text.strip())
        if fraction and float(fraction[1]):
            return cls(float(fraction[1]), "epoch")
        match = _PATTERN.fullmatch(text.strip())
        if not match or int(match[1]) < 1 or (match[3] and match[2] != "step"):
            raise ValueError(f'{text!r} is not a cadence: write "1 epoch", "500 steps", "10 minutes" or "never"')
        return cls(int(match[1]), match[2], bool(match[3]))  # type: ignore[arg-type]

    def in_steps(self, steps_per_epoch: int) -> "Cadence":
        """A part of an epoch as so many of its steps; everything else as it is."""
        if not isinstance(self.count, float):
            return self
        return Cadence(max(1, int(self.count * steps_per_epoch)), "step", of_epoch=True)


def _in_steps(value: object) -> object:
    return f"{value} steps" if isinstance(value, int) and not isinstance(value, bool) else value


def _check(text: str) -> str:
    Cadence.parse(text)
    return text


CadenceText = Annotated[str, BeforeValidator(_in_steps), AfterValidator(_check)]


Positive = Annotated[int, Field(ge=1)]
MOST_THREADS = 1024
"""More than any processor has; the library that starts them ends the process where the system gives it too few."""
Fraction = Annotated[float, Field(gt=0, le=1)]
Limit = Positive | Fraction | None
"""A number of batches (an integer) or a fraction of them (0 < x <= 1, written with a point)."""


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, int) else value


def _as_word(value: object) -> object:
    """YAML reads true and false as such; here they stand beside other words."""
    return str(value).lower() if isinstance(value, bool) else value


def _seconds(value: object) -> object:
    """ "02:30:00" as seconds; YAML reads such a thing as a number already."""
    parts = value.split(":") if isinstance(value, str) else []
    if len(parts) in (2, 3) and all(part.isdigit() for part in parts):
        return sum(int(part) * 60**place for place, part in enumerate(reversed(parts)))
    if isinstance(value, str):
        raise ValueError(f'{value!r} is not a time: write "02:30:00" (hours, minutes, seconds) or a number of seconds')
    return value


Duration = Annotated[float, Field(gt=0), BeforeValidator(_seconds)]


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", re.IGNORECASE)


def parse_bytes(text: str) -> int | None:
    """ "20 GB" or "4 GiB" as a number of bytes; None where it is no such text."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        return None
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _check_recompute(value: str | list[str]) -> str | list[str]:
    if value == []:
        return "none"
    if isinstance(value, str) and value not in ("none", "all") and not parse_bytes(value):
        raise ValueError(
            f'{value!r} is neither none, all nor an amount of memory such as "20 GB"; names of modules are a list: '
            f"[{value}]"
        )
    return value


class Group(OpenConfig):
    """Parameters that the optimizer treats in their own way. Further keys are arguments of the optimizer."""

    match: list[str]
    """Patterns of parameter names, such as `*.bias` or `model.stem.*`; the first group that matches counts."""
    lr_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the learning rate, all along the schedule."""


class Optimizer(OpenConfig):
    """Which optimizer updates the weights. Further keys are its own arguments (`betas`, `momentum`, …)."""

    name: str = "adam"
    """Any optimizer of torch, in lower case: adam, adamw, sgd, rmsprop, muon, adagrad, nadam, radam, …"""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """The learning rate that the schedule starts from, before `schedule.scale`."""
    groups: list[Group] = []
    """Parameters with settings of their own: [{match: ["*.bias"], weight_decay: 0}] keeps biases from decaying."""


class OptimizerClass(OpenConfig):
    """An optimizer by class path: torch's, a library's or your own. Further keys are its arguments."""

    class_: Annotated[str, Field(alias="class")]
    """A subclass of torch.optim.Optimizer that takes `lr`: `torch.optim.RAdam`, `my_file.MyOptimizer`. In the place of
    `name`."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """The learning rate that the schedule starts from, before `schedule.scale`."""
    groups: list[Group] = []
    """Parameters with settings of their own, as for optimizers by name."""


class Schedule(Config):
    """How the learning rate moves: a pure function of the step (plateau: of the metric's history too)."""

    name: Literal["constant", "cosine", "exponential", "step", "linear", "onecycle", "plateau"] = "constant"
    """The shape of the curve."""
    start: Annotated[float, Field(gt=0)] | None = None
    """Learning rate after the warm-up; by default `optimizer.lr`. For onecycle, where the rise begins (peak / 25)."""
    end: Annotated[float, Field(ge=0)] | None = None
    """Learning rate at the last step (step and plateau: the floor). By default 0, for onecycle a ten-thousandth of the
    peak; exponential without `gamma` needs it."""
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = 0
    """Linear rise from zero: a number of steps, or a fraction of all steps. For onecycle, the rising part (0.3)."""
    gamma: Annotated[float, Field(gt=0)] | None = None
    """Factor of each drop: exponential and step every `every` steps, plateau when the metric stalls (0.1). exponential
    with `every` and `end` needs none: it arrives at `end`."""
    every: Positive | None = None
    """Steps between two drops of exponential (staircase) and step."""
    milestones: list[Positive] | None = None
    """Steps at which `step` drops, instead of `every`."""
    monitor: str = "val/loss"
    """The metric that plateau watches."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value of `monitor` is better."""
    patience: Annotated[int, Field(ge=0)] = 10
    """Evaluations without improvement before plateau drops the learning rate."""
    threshold: Annotated[float, Field(ge=0)] = 1e-4
    """Smallest relative improvement that plateau counts."""
    scale: Literal["none", "sqrt", "linear"] = "none"
    """Multiply the learning rate by the root, or by the ratio, of `data.batch_size` to `base_batch_size`."""
    base_batch_size: Positive | None = None
    """The global batch size for which `optimizer.lr` was chosen; needed by `scale` and `scale_steps`."""
    scale_steps: bool = False
    """Divide `every`, `milestones` and a `warmup` in steps by the ratio of `data.batch_size` to `base_batch_size`, so
    that the learning rate falls after as many samples as with that batch."""

    @model_validator(mode="after")
    def _complete(self) -> "Schedule":
        if self.scale_steps and self.base_batch_size is None:
            raise ValueError("scale_steps needs base_batch_size, the batch for which the steps were chosen")
        if self.scale != "none" and self.base_batch_size is None:
            raise ValueError(f"scale: {self.scale} needs base_batch_size, the batch for which the lr was chosen")
        if self.name == "step" and (self.every is None) == (self.milestones is None):
            raise ValueError("the step schedule needs either every (steps between drops) or milestones")
        if self.name == "exponential" and self.gamma is None and not self.end:
            raise ValueError("the exponential schedule needs end (the last learning rate, above 0) or gamma and every")
        if self.name == "exponential" and self.gamma is not None and self.every is None:
            raise ValueError("exponential with gamma needs every, the number of steps between two drops")
        return self


class ScheduleClass(OpenConfig):
    """A schedule by class path: a function of the step, or a scheduler of torch. Further keys are its arguments."""

    class_: Annotated[str, Field(alias="class")]
    """A function `f(step, num_steps, **arguments)`, or a class whose objects are called with `(step, num_steps)`, that
    gives the factor of `optimizer.lr`; or a class of torch.optim.lr_scheduler, which counts steps here. In the place of
    `name`."""
    warmup: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = 0
    """Linear rise from zero before the schedule begins: a number of steps, or a fraction of all steps."""
    scale: Literal["none", "sqrt", "linear"] = "none"
    """Multiply the learning rate by the root, or by the ratio, of `data.batch_size` to `base_batch_size`."""
    base_batch_size: Positive | None = None
    """The global batch size for which `optimizer.lr` was chosen; needed by `scale`."""

    @model_validator(mode="after")
    def _complete(self) -> "ScheduleClass":
        if self.scale != "none" and self.base_batch_size is None:
            raise ValueError(f"scale: {self.scale} needs base_batch_size, the batch for which the lr was chosen")
        return self


def _how_named(value: Any) -> str:
    classes = OptimizerClass | ScheduleClass | LossWeightClass
    has_class = "class" in value if isinstance(value, dict) else isinstance(value, classes)
    return "by class" if has_class else "by name"


AnyOptimizer = Annotated[
    Annotated[Optimizer, Tag("by name")] | Annotated[OptimizerClass, Tag("by class")], Discriminator(_how_named)
]
AnySchedule = Annotated[
    Annotated[Schedule, Tag("by name")] | Annotated[ScheduleClass, Tag("by class")], Discriminator(_how_named)
]


class EarlyStopping(Config):
    """End the training when a metric stops improving."""

    monitor: str = "val/loss"
    """The metric to watch, as it appears in metrics.jsonl."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value is better."""
    patience: Positive = 10
    """Evaluations without improvement before training ends."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """Smallest change that counts as an improvement."""


_MOMENT = re.compile(r"(\d+)\s*steps?|(\d+(?:\.\d+)?)\s*epochs?")


@dataclass(frozen=True)
class Moment:
    """A moment of a training: so many steps or epochs after its beginning, or a fraction of its length."""

    count: float
    unit: Literal["step", "epoch", "training"]

    @classmethod
    def parse(cls, value: int | float | str) -> "Moment":
        """Read 500, 0.5, "500 steps" or "2 epochs"; raises ValueError with the accepted forms."""
        if isinstance(value, int) and value >= 0:
            return cls(value, "step")
        if isinstance(value, float) and 0 <= value <= 1:
            return cls(value, "training")
        match = _MOMENT.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise ValueError(
                f"{value!r} is no moment of a training: write a number of steps (500), a fraction of the training "
                '(0.0 to 1.0, with a point), "500 steps" or "2 epochs"'
            )
        return cls(int(match[1]), "step") if match[1] else cls(float(match[2]), "epoch")


def _check_moment(value: int | float | str) -> int | float | str:
    Moment.parse(value)
    return value


MomentText = Annotated[int | float | str, AfterValidator(_check_moment)]


class WeightAt(Config):
    """A weight at a moment of the training."""

    at: MomentText
    """The first step with this weight: a number of steps (500), a fraction of the training (0.5), "500 steps" or
    "2 epochs"."""
    value: float
    """The weight."""


class WeightSpan(Config):
    """When a weight moves."""

    every: Literal["step", "epoch"] = "step"
    """Whether the weight changes with every step, or stays the same within each epoch."""
    from_: Annotated[MomentText, Field(alias="from")] = 0
    """When it begins to move, written as `at` is; before, it has its first value."""
    until: MomentText = 1.0
    """When it has arrived: the last step (or epoch) before this moment has the last value, and so has all that follows.
    1.0 is the end of the training."""

    @property
    def is_moving(self) -> bool:
        """Whether the weight changes in the course of a training."""
        return getattr(self, "name", "") != "constant"

    @model_validator(mode="after")
    def _is_a_span(self) -> "WeightSpan":
        begin, end = Moment.parse(self.from_), Moment.parse(self.until)
        if begin.unit == end.unit and begin.count >= end.count:
            raise ValueError(f"from is {self.from_} and until is {self.until}: a weight moves from one to a later one")
        return self


class LossWeight(WeightSpan):
    """The weight of one named loss term, which moves over the training: a pure function of the step."""

    name: Literal["constant", "linear", "cosine", "sigmoid", "step"] = "linear"
    """The shape of the curve from `start` to `end`. sigmoid is (v1 k^c + v0 k^t) / (k^c + k^t), with t from 0 to 1,
    c = `center` and k = `curvature`; step jumps at each entry of `values`."""
    start: float | None = None
    """Weight at the first step (or from `from` on); where it follows the learning rate, at its highest rate."""
    end: float | None = None
    """Weight at the last step (or before `until`), and 0 if you like; where it follows the learning rate, at a rate of
    0."""
    values: list[WeightAt] = []
    """Weights on the way, in the order of time, for step, linear and cosine: [{at: 0.5, value: 10}]."""
    center: Annotated[float, Field(ge=0, le=1)] = 0.5
    """sigmoid: which part of the way is over when the weight is in the middle of `start` and `end`."""
    curvature: Annotated[float, Field(ge=1e-100, lt=1)] = 5e-7
    """sigmoid: the smaller, the steeper."""
    exact: bool = False
    """sigmoid: stretch the curve so that it begins at `start` and ends at `end` exactly. As it stands, the formula
    stays away from both of them, with `curvature: 5e-7` by 0.07 % of the way."""
    follows: Literal["steps", "rate"] = "steps"
    """What moves it: the number of steps, or the learning rate, also while that rises in a warm-up."""

    @model_validator(mode="after")
    def _complete(self) -> "LossWeight":
        problem = self._of_rate() if self.follows == "rate" else self._of_curve()
        if problem is not None:
            raise ValueError(problem)
        return self

    def _of_rate(self) -> str | None:
        if self.start is None or self.end is None:
            return "a weight that follows the learning rate needs start and end"
        plain = LossWeight.model_construct(start=self.start, end=self.end, follows="rate")
        others = [field.alias or key for key, field in LossWeight.model_fields.items()
                  if getattr(self, key) != getattr(plain, key)]  # fmt: skip
        return (
            f"a weight that follows the learning rate has start and end alone: leave out {others[0]}"
            if others
            else None
        )

    def _of_curve(self) -> str | None:
        if self.name != "sigmoid" and (self.center, self.curvature, self.exact) != (0.5, 5e-7, False):
            return f"center, curvature and exact belong to name: sigmoid, and this is {self.name}"
        if self.name == "constant":
            alone = self.start is not None and self.end is None and not self.values and self.every == "step"
            alone = alone and (self.from_, self.until) == (0, 1.0)
            return None if alone else "a constant weight has start and nothing else; {start, end} is name: linear"
        if self.name == "sigmoid" and self.values:
            return "values belong to name: step, linear or cosine; a sigmoid goes from start to end"
        if self.start is None and not (self.values and Moment.parse(self.values[0].at).count == 0):
            return f"a weight that moves ({self.name}) needs start, or values whose first one is at: 0"
        if self.name == "step" and not self.values:
            return "a weight that moves in steps needs values, such as [{at: 0.5, value: 10}]"
        if self.end is None and not self.values:
            return f"a weight that moves ({self.name}) needs end; a constant one is a number, {self.start:g}"
        if self.start is not None and self.values and Moment.parse(self.values[0].at).count == 0:
            return "start is the weight at the beginning, and so is the first one of values: leave out one of them"
        if (self.start is None and self.from_ != 0) or (self.end is None and self.until != 1.0):
            return "from is when start begins to change, and until when end is reached: values say their own moments"
        return self._out_of_order()

    def _out_of_order(self) -> str | None:
        """Only moments of one kind can be compared before the length of the training is known."""
        start, end = [self.from_] * (self.start is not None), [self.until] * (self.end is not None)
        times = [*start, *(each.at for each in self.values), *end]
        for one, other in pairwise(times):
            first, second = Moment.parse(one), Moment.parse(other)
            if first.unit == second.unit and first.count >= second.count:
                return f"values come in the order of time, but {other} does not come after {one}"
        return None


class LossWeightClass(WeightSpan, OpenConfig):
    """The weight of one named loss term by class path: a function of the step. Further keys are its arguments."""

    class_: Annotated[str, Field(alias="class")]
    """A function `f(step, num_steps, **arguments)`, or a class whose objects are called with `(step, num_steps)`, that
    gives the weight; both counted from `from` to `until`, with `every: epoch` in epochs. In the place of `name`."""


MovingWeight = Annotated[
    Annotated[LossWeight, Tag("by name")] | Annotated[LossWeightClass, Tag("by class")], Discriminator(_how_named)
]


class Train(Config):
    """How long and how the model is trained."""

    epochs: Positive | None = 10
    """Passes over the training data. Training ends at `epochs` or `steps`, whichever comes first."""
    steps: Positive | None = None
    """Optimizer updates in total."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = "auto"
    """Where to train; auto takes the accelerator that is there."""
    precision: Annotated[Literal["auto", "32", "tf32", "bf16", "fp16", "64"], BeforeValidator(_as_text)] = "auto"
    """Arithmetic: 32 (IEEE float32), tf32, bf16 and fp16 (mixed, weights stay float32), 64. auto is tf32 on CUDA and
    32 elsewhere."""
    deterministic: Annotated[Literal["auto", "true", "false"], BeforeValidator(_as_word)] = "auto"
    """Which kernels a CUDA device may take. auto: deterministic ones wherever torch has them; an operation without one
    is named, and the bits of the run may then differ between starts. true: such an operation is refused. false: the
    fastest kernels, whose bits differ from start to start."""
    program: Literal["auto", "eager", "compiled", "graphed", "compiled+graphed"] = "auto"
    """How a step runs: eager, compiled by torch.compile, or captured whole into a graph and replayed. auto captures
    on CUDA whatever matches eager to the bit."""
    steps_per_launch: Positive | Literal["auto"] = "auto"
    """Steps the host hands to the device at a time. Never changes the result."""
    accumulate: Annotated[int, Field(ge=1, le=65536)] = 1
    """Cut each batch into this many micro-batches in time, to save memory."""
    recompute: Annotated[
        str | list[str], BeforeValidator(lambda value: "none" if value is None else value),
        AfterValidator(_check_recompute),
    ] = "none"  # fmt: skip
    """Activation checkpointing: compute activations again in the backward pass instead of keeping them, to save memory.
    none; all (the modules with which the least is kept); a list of modules such as [model.encoder.*, model.head]; or
    what the activations of a step may take on each device, such as "20 GB". Never changes the result."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Largest norm of the whole gradient; longer gradients are scaled down to it."""
    nan: Literal["stop", "skip", "zero", "rollback"] = "stop"
    """What to do when a loss or gradient is NaN or infinite. stop: end, and say at which step, in which samples and
    layer. skip: leave out the step. zero: set what is not finite in the gradients to zero, and go on. rollback: go
    back to the last checkpoint and leave out such steps from there on to where it was noticed."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, which is then evaluated and returned; 0.999 is usual."""
    loss_weights: dict[str, float | MovingWeight] = {}
    """Weights of the named terms when the task's loss is a dict; a number, or {start, end} and more. Terms left out
    weigh 1. A term whose weight is the number 0 is logged, and nothing is learned from it."""
    early_stopping: EarlyStopping | None = None
    """End the training when a metric stops improving."""
    min_epochs: Positive | None = None
    """Epochs before which neither early stopping nor a callback ends the training."""
    min_steps: Positive | None = None
    """Steps before which neither early stopping nor a callback ends the training."""
    callbacks: list[Any] = []
    """Callbacks: objects with Lightning's hook names, by class path, alone or as {class, arguments}. They may change
    what is trained, so that a run is continued with those that it began with."""
    evaluate: CadenceText = "1 epoch"
    """How often to evaluate on the validation data: "1 epoch", "500 steps", "never"; also "0.25 epochs", four times in
    each, and "500 steps of each epoch", counted anew in every epoch."""
    limit_train_batches: Limit = None
    """Use only this many training batches per epoch: a number, or a fraction such as 0.1."""
    limit_val_batches: Limit = None
    """Use only this many validation batches: a number, or a fraction such as 0.1."""
    limit_test_batches: Limit = None
    """Use only this many test batches: a number, or a fraction such as 0.1."""
    overfit_batches: Limit = None
    """Train and validate on the same few batches, to see whether the model can learn at all."""
    stop_after: Duration | None = None
    """Save and exit with code 75 when this start has run for this long, such as "02:30:00"; a little earlier, so that
    the checkpoint is written in time. The end of a Slurm job is such a limit by itself."""
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)] | Literal["auto"] = "auto"
    """CPU threads for tensor operations; auto takes the cores of the process, but 1 on a CPU where the operations of a
    step are too small to gain by more, and 1 with `parallel.reduce: tree`, whose bits must not depend on how many ranks
    share the cores. Decided at the first start and kept."""

    @model_validator(mode="after")
    def _ends(self) -> "Train":
        if self.epochs is None and self.steps is None:
            raise ValueError("training would never end: set epochs or steps")
        if "minute" in self.evaluate:
            raise ValueError(f"evaluate is {self.evaluate!r}: say epochs or steps, so that the clock decides nothing")
        return self


class Checkpoint(Config):
    """When the state of the run is saved, and what is kept."""

    every: Literal["auto"] | CadenceText = "auto"
    """"2 epochs", "500 steps", "10 minutes", "never", or auto: each epoch, but in at most 5 % of the time, and after
    half an hour at the latest. The end of training and a stop are always saved."""
    keep: Annotated[int, Field(ge=2)] = 2
    """How many recent checkpoints are kept; the best one is kept besides."""
    monitor: str = "val/loss"
    """The metric that decides which checkpoint is `best`; without validation data, the last one is."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger value of `monitor` is better."""
