"""`trainer.callback_metrics`, `logged_metrics` and `progress_bar_metrics`: what was logged last, by name.

Values of a step stay on the device until somebody asks for them: only then does the host wait.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Shown:
    """Values for callbacks, for loggers and for the progress bar."""

    callback: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)


class TrainerMetrics:
    """What a LightningModule and callbacks find of what was logged; the newest value of a name stays."""

    def __init__(self) -> None:
        """Nothing is logged yet."""
        self._callback: dict[str, Tensor] = {}
        self._logged: dict[str, Tensor] = {}
        self._progress_bar: dict[str, float] = {}
        self._has_stepped = False
        self.of_step: Callable[[], Shown] | None = None
        """Reads the values of the last step."""
        self.validated: set[str] = set()
        """Names of validations, which are not those of training."""

    def finish_step(self) -> None:
        """A step is finished: its values are read when somebody asks for them."""
        self._has_stepped = True

    def settle(self) -> None:
        """Read the values of the last step, before those of an evaluation or an epoch come."""
        if self._has_stepped and self.of_step is not None:
            self._has_stepped = False
            self._take(self.of_step())

    def update(self, shown: Shown) -> None:
        """An evaluation or an epoch has these values."""
        self.settle()
        self._take(shown)

    def _take(self, shown: Shown) -> None:
        self._callback.update({name: torch.tensor(value) for name, value in shown.callback.items()})
        self._logged.update({name: torch.tensor(value) for name, value in shown.logged.items()})
        self._progress_bar.update(shown.progress_bar)

    def forget(self) -> None:
        """Those of a rehearsal mean nothing."""
        for each in (self._callback, self._logged, self._progress_bar):
            each.clear()

    @property
    def callback(self) -> dict[str, Tensor]:
        """For callbacks, also by the bare names of values that are shown as `_step` and `_epoch`."""
        self.settle()
        return self._callback

    @property
    def logged(self) -> dict[str, Tensor]:
        """As loggers get them."""
        self.settle()
        return self._logged

    @property
    def progress_bar(self) -> dict[str, float]:
        """What was logged with `prog_bar=True`."""
        self.settle()
        return self._progress_bar

    def state(self) -> dict[str, Any]:
        """All of it, in plain values."""
        return {
            "callback": _numbers(self._callback),
            "logged": _numbers(self._logged),
            "progress_bar": _numbers(self._progress_bar),
            "validated": sorted(self.validated),
            "has_stepped": self._has_stepped,
        }

    def load(self, values: Mapping[str, Any]) -> None:
        """Take over a state."""
        self.forget()
        self._take(Shown(values["callback"], values["logged"], values["progress_bar"]))
        self.validated.clear()
        self.validated.update(values["validated"])
        self._has_stepped = values["has_stepped"]


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Those that are one number: callbacks may have put in others."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }
