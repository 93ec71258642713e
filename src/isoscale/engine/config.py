"""The recipe sections that the engine reads."""

import re
from dataclasses import dataclass
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
    has_class = "class" in value if isinstance(value, dict) else isinstance(value, OptimizerClass | ScheduleClass)
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


class LossWeight(Config):
    """The weight of one named loss term, which moves over the training."""

    start: float
    """Weight at the first step; where it follows the learning rate, at its highest rate."""
    end: float
    """Weight at the last step; where it follows the learning rate, at a rate of 0."""
    follows: Literal["steps", "rate"] = "steps"
    """What moves it: the number of steps, evenly, or the learning rate, also while that rises in a warm-up."""


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
    loss_weights: dict[str, float | LossWeight] = {}
    """Weights of the named terms when the task's loss is a dict; a number, or {start, end}. Terms left out weigh 1."""
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
