"""What a run tells the people who look at it: one small dataclass for each thing that happens."""

from dataclasses import dataclass, field
from typing import Literal, Protocol


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


@dataclass(frozen=True)
class Logged:
    """The means since the last log, read back from the device once."""

    step: int
    epoch: int
    values: dict[str, float]
    """`train/loss`, `train/accuracy`, `lr`, and wall-clock values under `time/`."""


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
class Note:
    """One line that the user should know."""

    text: str
    level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True)
class Ended:
    """Training is over."""

    status: Literal["done", "stopped", "failed"]
    step: int
    rows: list[tuple[str, str]] = field(default_factory=list)
    """The end summary: label and text (best metric, rate, peak memory)."""
    commands: list[tuple[str, str]] = field(default_factory=list)
    """What to type next: purpose and command."""


Event = Started | Logged | EpochEnded | Note | Ended


class Observer(Protocol):
    """Anything that wants to be told; observers never touch the device."""

    def notify(self, event: Event) -> None:
        """Take note of what happened."""

    def close(self) -> None:
        """Flush and release whatever is open."""
