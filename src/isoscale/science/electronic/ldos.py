"""The task of learning a local density of states, with the physics that follows from it."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from torch import Tensor, nn

from isoscale.config import Config
from isoscale.data.batches import Batch
from isoscale.data.sources import Source
from isoscale.engine.dataset_metrics import EvaluatedDataset, Store
from isoscale.engine.task import Supervised
from isoscale.errors import UserError
from isoscale.science.electronic.integrals import EnergyGrid
from isoscale.science.electronic.loss_terms import TERMS, LossTerms, check_training, make_terms
from isoscale.science.electronic.physics import METRICS, Measurement, check_calculations
from isoscale.science.electronic.results import Results, show
from isoscale.science.electronic.snapshot_source import SnapshotSource
from isoscale.science.models import MLP


class Physics(Config):
    """Which physical errors are measured, and when, and which are a part of the loss."""

    metrics: list[str] = ["band_energy"]
    every: Annotated[int, Field(ge=1)] = 5
    """Epochs between two measurements."""
    before: bool = True
    after: bool = True
    loss: list[str] = []
    """Terms of the loss besides that of every point: band_energy, dos. `train.loss_weights` weighs them."""
    group: Annotated[int, Field(ge=1)] = 100
    """Points of a batch over which a term takes its means."""

    @field_validator("loss")
    @classmethod
    def _known_terms(cls, terms: list[str]) -> list[str]:
        for term in terms:
            if term not in TERMS:
                raise ValueError(f"there is no term {term!r}; there is {', '.join(TERMS)}")
        return terms

    @field_validator("metrics")
    @classmethod
    def _known(cls, metrics: list[str]) -> list[str]:
        unknown = [metric for metric in metrics if metric not in METRICS]
        if unknown:
            raise ValueError(f"there is no metric {unknown[0]!r}; there is {', '.join(METRICS)}")
        return metrics

    def is_due(self, dataset: EvaluatedDataset) -> bool:
        """Whether to measure now."""
        return dataset.occasion.is_due(self.every, self.before, self.after)


class Ldos(Supervised):
    """A network from descriptors to the local density of states at one point."""

    units = METRICS

    def __init__(
        self,
        model: nn.Module,
        energies: dict[str, float],
        loss: str | Callable[..., Any] = "mse",
        metrics: Sequence[str] = (),
        physics: dict[str, Any] | None = None,
        clamp: bool = True,
    ) -> None:
        """`energies` is the grid, in eV: size, spacing, offset.

        `physics` says which errors to measure, and when: metrics, every (epochs), before, after; and which are a part
        of the loss: loss (band_energy, dos), group (points). With `clamp`, a predicted density below zero counts as
        zero in the physics.
        """
        super().__init__(model, loss, metrics)
        self.grid = _grid(energies)
        self.physics = _physics(physics)
        self.clamp = clamp
        self._terms: LossTerms | None = None

    def check_data(self, split: str, source: Source) -> None:
        """Refuse targets of another energy grid, and snapshots about which too little is known."""
        found = getattr(source, "columns", {}).get("target")
        if found is not None and found.row_shape != (self.grid.size,):
            raise UserError(
                f"{found.name} has {' × '.join(map(str, found.row_shape))} values at each point, but "
                f"task.energies.size is {self.grid.size}"
            )
        self._check_network(source)
        if split in ("val", "test") and self.physics is not None and isinstance(source, SnapshotSource):
            check_calculations(source, self.physics.metrics)
        if split == "train" and self.physics is not None and self.physics.loss:
            check_training(source, self.physics.loss)

    def _check_network(self, source: Source) -> None:
        """Refuse a network of other widths than those of the data."""
        descriptors = getattr(source, "columns", {}).get("input")
        if not isinstance(self.model, MLP) or descriptors is None or len(descriptors.row_shape) != 1:
            return
        first, *hidden, last = self.model.widths
        wanted = [descriptors.row_shape[0], *hidden, self.grid.size]
        if wanted != [first, *hidden, last]:
            raise UserError(
                f"{descriptors.name} has {wanted[0]} descriptors and task.energies {wanted[-1]} energies, but "
                f"task.model.widths are {self.model.widths}: set task.model.widths={wanted}"
            )

    def prepare_training(self, source: Source, transforms: Sequence[Any]) -> None:
        """Compute how the energies of the training snapshots depend on errors at their points."""
        if self.physics is not None and self.physics.loss:
            self._terms = make_terms(self.physics.loss, self.physics.group, source, self.grid, self, transforms)

    def _judge(self, prediction: Tensor, target: Tensor, batch: Batch, stage: str) -> Any:
        """The loss of every point, and in training the terms of snapshots beside it."""
        ldos = super()._judge(prediction, target, batch, stage)
        if stage != "train" or self.physics is None or not self.physics.loss:
            return ldos
        if self._terms is None:
            raise UserError("task.physics.loss is known in a training only: leave it out to run a step by itself")
        error = prediction - target  # in float32 also where the prediction is in half precision, as the target is not
        # a plain mean over the points shares its backward pass with the other terms; a pair would need one of its own
        mean = ldos.mean if type(ldos.weight) is int and ldos.weight == len(target) else ldos
        return {"ldos": mean, **self._terms(error, batch["snapshot"])}

    def evaluate_dataset(self, dataset: EvaluatedDataset) -> dict[str, float]:
        """The physical errors of every snapshot, and the mean of their absolute values."""
        if not isinstance(dataset.source, SnapshotSource) or not self._wanted(dataset):
            return {}
        measurement = Measurement(dataset, self.grid, self.clamp, self._wanted(dataset))
        if not dataset.occasion.is_rehearsal:
            show(measurement, dataset)
            for words in measurement.notes():
                dataset.note(words)
        named = [measurement.named(metric) for metric in self._wanted(dataset)]
        found = [values[0] for values in named] + [pair for values in named for pair in values[1:]]
        return {name: value for name, value in found if dataset.occasion.is_rehearsal or not math.isnan(value)}

    def _wanted(self, dataset: EvaluatedDataset) -> Sequence[str]:
        """The metrics to measure now."""
        if dataset.occasion.is_full:
            return list(METRICS)
        return self.physics.metrics if self.physics is not None and self.physics.is_due(dataset) else ()

    def write_predictions(self, dataset: EvaluatedDataset, store: Store) -> None:
        """The local density of states of every snapshot on its grid, and what follows from it."""
        if not isinstance(dataset.source, SnapshotSource):
            raise UserError("predictions of a local density of states need data of the class snapshots")
        Results(dataset, self.grid, self.clamp).write(store)


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
