"""The task of learning fields in a box from others, with the physics that people look at."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from isoscale.data.batches import Batch
from isoscale.data.sources import Source, whole
from isoscale.data.volumes import Crops
from isoscale.engine.dataset_metrics import EvaluatedDataset, Store
from isoscale.engine.task import Supervised
from isoscale.errors import UserError
from isoscale.observe.figures import Figure
from isoscale.science.cosmology.loss import FieldLoss
from isoscale.science.cosmology.physics import UNITS, Fields, Measurement, Physics, show, show_inputs
from isoscale.science.cosmology.symmetries import CubeSymmetry
from isoscale.science.cosmology.whole_box import Tiles, write_boxes


class FieldRegression(Supervised):
    """A network from fields in a box to other fields there, of the same size."""

    units = UNITS
    of_all = "mean of fields"

    def __init__(self, model: nn.Module, density_weight: float = 0.0, physics: dict[str, Any] | None = None) -> None:
        """`density_weight` is that of the error of the density itself, beside that of its logarithm (see the loss).

        `physics` says when power spectra and correlations are measured: every (epochs), before, after.
        """
        super().__init__(model, FieldLoss(density_weight))
        try:
            self.physics = Physics(**(physics or {}))
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"task.physics.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        self._fields: Fields | None = None

    def prepare_training(self, source: Source, transforms: Sequence[Any]) -> None:
        """Refuse a symmetry that takes the fields of the boxes for others."""
        crops = whole(source)
        if not isinstance(crops, Crops):
            return
        known = crops.volumes[0].fields
        for transform in transforms:
            for key, names in transform.fields.items() if isinstance(transform, CubeSymmetry) else ():
                if key in known and list(known[key]) != names:
                    raise UserError(
                        f"cube_symmetry turns the fields {', '.join(names)} of {key}, but the boxes have "
                        f"{', '.join(known[key])}: give these to its `fields`, or name those of the boxes (data.fields)"
                    )

    def write_predictions(self, dataset: EvaluatedDataset, store: Store) -> None:
        """Whole boxes, where the data has some, and else a row for each sample."""
        if isinstance(dataset.source, Tiles):
            write_boxes(dataset, store)
        else:
            store.put("prediction", torch.cat([seen.output.float().cpu() for seen in dataset.look()]).numpy())

    def check_data(self, split: str, source: Source) -> None:
        """Refuse boxes that have not the fields that the network takes and gives."""
        self._fields = Fields.of(source)
        crops = whole(source)
        if not isinstance(crops, Crops):
            return
        for key, name in (("input", "in_channels"), ("target", "out_channels")):
            taken = getattr(self.model, name, None)
            found = crops.num_fields.get(key)
            if None not in (taken, found) and taken != found:
                raise UserError(
                    f"{crops.volumes[0].name} has {found} fields for {key}, but the network {taken}: set "
                    f"task.model.{name}={found}"
                )

    def _judge(self, prediction: Tensor, target: Tensor, batch: Batch, stage: str) -> Any:
        """The loss, and in evaluations the mean absolute error of each field beside it."""
        if stage != "train" and self._fields is not None:
            found, true = (self.in_stored_units(each).float() for each in (prediction, target))
            errors = (found - true).abs().mean((0, 2, 3, 4))
            for name, error in zip(self._fields.names, errors, strict=True):
                self.log(f"{stage}/l1/{name}", error)
        return super()._judge(prediction, target, batch, stage)

    def evaluate_dataset(self, dataset: EvaluatedDataset) -> dict[str, float]:
        """Correlations and power spectra of every field, and figures of them where somebody looks."""
        fields, occasion, when = Fields.of(dataset.source), dataset.occasion, self.physics
        if fields is None or not (occasion.is_full or occasion.is_due(when.every, when.before, when.after)):
            return {}
        measurement = Measurement(dataset, fields)
        if occasion.shows:
            show(measurement, dataset)
        found = measurement.metrics(occasion.is_full)
        return {name: value for name, value in found.items() if occasion.is_rehearsal or not math.isnan(value)}

    def show_inputs(self, source: Source, batch: Batch) -> dict[str, Figure]:
        """Slices of the training crops, as the network sees them."""
        fields = Fields.of(source, self.input_key)
        return {} if fields is None else {"inputs": show_inputs(fields, self.input_of(batch))}
