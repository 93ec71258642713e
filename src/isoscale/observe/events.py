"""What a run tells the people who look at it: one small dataclass for each thing that happens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from isoscale.observe.figures import Figure

Level = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True)
class Layer:
    """One row of the table of a model's layers."""

    name: str
    kind: str
    """Its class."""
    depth: int
    """0 for the model itself, 1 for its children, and so on."""
    num_parameters: int
    """With all layers below it."""
    num_trainable: int
    num_bytes: int
    shape: tuple[int, ...] | None = None
    """Of its output for one batch, where that is a tensor and a batch was seen."""


@dataclass(frozen=True)
class Started:
    """Training begins, or goes on, at `step`."""

    name: str
    directory: str
    """Empty where nothing is saved."""
    rows: list[tuple[str, str]]
    """The start-up summary: label and text."""
    step: int
    num_steps: int
    """Steps in total."""
    steps_per_epoch: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The resolved recipe by key: `optimizer.lr` and so on."""
    layers: tuple[Layer, ...] = ()
    """The model and what it is made of, from the outside in."""
    systems: tuple[str, ...] = ()
    """The table of the systems that batches come from, in lines."""


@dataclass(frozen=True)
class Logged:
    """The means since the last log, read back from the device once."""

    step: int
    epoch: int
    values: dict[str, float]
    """`train/loss`, `train/accuracy`, `lr`, and wall-clock values under `time/`."""


@dataclass(frozen=True)
class LoggedByTask:
    """Values that the code of a task hands to its logger itself, at whatever step it says."""

    step: int
    epoch: int
    values: dict[str, float]


@dataclass(frozen=True)
class EpochEnded:
    """An epoch, or an evaluation inside one, is over."""

    step: int
    epoch: int
    values: dict[str, float]
    """Means over the epoch (`train/loss_epoch`) and of the evaluation (`val/loss`, `val/accuracy`)."""
    seconds: float
    best: bool = False
    """Whether the monitored metric is the best so far."""


@dataclass(frozen=True)
class FiguresMade:
    """There is something to look at: pictures, curves, distributions."""

    step: int
    epoch: int
    figures: Mapping[str, Figure]
    """By name, with the stage before it where there is one: `val/confusion`, `parameters/layers.0.weight`."""


@dataclass(frozen=True)
class Note:
    """One line that the user should know."""

    text: str
    level: Level = "info"


@dataclass(frozen=True)
class Said(Note):
    """What one rank says, where more than rank 0 is heard."""

    rank: int = 0
    source: Literal["note", "print", "log"] = "note"
    """A note; what code has printed, which no level holds back; or what is for the log alone."""


@dataclass(frozen=True)
class Ended:
    """Training is over."""

    status: Literal["done", "stopped", "failed"]
    step: int
    rows: list[tuple[str, str]] = field(default_factory=list)
    """The end summary: label and text (best metric, rate, peak memory)."""
    commands: list[tuple[str, str]] = field(default_factory=list)
    """What to type next: purpose and command."""
    values: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the last evaluation, and the best value of the monitored one as `best/NAME`."""


Event = Started | Logged | LoggedByTask | EpochEnded | FiguresMade | Note | Ended


class Observer(Protocol):
    """Anything that wants to be told; observers never touch the device."""

    def notify(self, event: Event) -> None:
        """Take note of what happened."""

    def close(self) -> None:
        """Flush and release whatever is open."""
