"""The task of learning a local density of states, with the physics that follows from it."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from torch import Tensor, nn

from isoscale.config import Config
from isoscale.data.sources import Source
from isoscale.engine.survey import Survey
from isoscale.engine.task import Supervised
from isoscale.errors import UserError
from isoscale.science.electronic.integrals import EnergyGrid
from isoscale.science.electronic.physics import METRICS, Measurement, check_calculations
from isoscale.science.electronic.snapshots import Snapshot, SnapshotSource


class Physics(Config):
    """Which physical errors are measured, and when."""

    metrics: list[str] = ["band_energy"]
    every: Annotated[int, Field(ge=1)] = 5
    """Epochs between two measurements."""
    before: bool = True
    after: bool = True

    @field_validator("metrics")
    @classmethod
    def _known(cls, metrics: list[str]) -> list[str]:
        unknown = [metric for metric in metrics if metric not in METRICS]
        if unknown:
            raise ValueError(f"there is no metric {unknown[0]!r}; there is {', '.join(METRICS)}")
        return metrics

    def is_due(self, survey: Survey) -> bool:
        """Whether to measure now."""
        if survey.is_rehearsal:
            return True
        if survey.is_first:
            return self.before
        return survey.epoch % self.every == 0 or (survey.is_last and self.after)


class Ldos(Supervised):
    """A network from descriptors to the local density of states at one point."""

    def __init__(
        self,
        model: nn.Module,
        energies: dict[str, float],
        loss: str | Callable[..., Any] = "mse",
        metrics: Sequence[str] = (),
        physics: dict[str, Any] | None = None,
        clamp: bool = True,
    ) -> None:
        """`energies` is the grid, in eV: size, spacing, offset. `physics` says which errors to measure, and when:
        metrics, every (epochs), before, after.

        With `clamp`, a predicted density below zero counts as zero in the physics.
        """
        super().__init__(model, loss, metrics)
        self.grid = _grid(energies)
        self.physics = _physics(physics)
        self.clamp = clamp

    def check_data(self, role: str, source: Source) -> None:
        """Refuse targets of another energy grid, and snapshots about which too little is known."""
        found = getattr(source, "columns", {}).get("target")
        if found is not None and found.row_shape != (self.grid.size,):
            raise UserError(
                f"{found.name} has {' × '.join(map(str, found.row_shape))} values at each point, but "
                f"task.energies.size is {self.grid.size}"
            )
        if role != "train" and self.physics is not None and isinstance(source, SnapshotSource):
            check_calculations(source, self.physics.metrics)

    def survey(self, survey: Survey) -> dict[str, float]:
        """The physical errors of every snapshot, and the mean of their absolute values."""
        if self.physics is None or not isinstance(survey.source, SnapshotSource) or not self.physics.is_due(survey):
            return {}
        errors = Measurement(survey, self.grid, self.clamp).errors(self.physics.metrics)
        found = [pair for metric, values in errors.items()
                 for pair in _named(metric, values, survey.source.snapshots)]  # fmt: skip
        return {name: value for name, value in found if survey.is_rehearsal or not math.isnan(value)}


def _named(metric: str, values: Tensor, snapshots: Sequence[Snapshot]) -> list[tuple[str, float]]:
    each = [(f"{metric}/{snapshot.name}", value) for snapshot, value in zip(snapshots, values.tolist(), strict=True)]
    return [(metric, float(values.abs().mean())), *each]


def _grid(energies: dict[str, float]) -> EnergyGrid:
    try:
        return EnergyGrid(**energies)  # type: ignore[arg-type]
    except TypeError:
        raise UserError(f"task.energies needs size, spacing and offset, but {energies} was found") from None


def _physics(given: dict[str, Any] | None) -> Physics | None:
    if given is None:
        return None
    try:
        return Physics(**given)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"task.physics.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
