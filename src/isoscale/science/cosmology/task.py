"""The task of learning fields in a box from others, with the physics that people look at."""

import torch
from torch import nn

from isoscale.data.sources import Source, whole
from isoscale.data.volumes import Crops
from isoscale.engine.dataset_metrics import EvaluatedDataset, Store
from isoscale.engine.task import Supervised
from isoscale.errors import UserError
from isoscale.science.cosmology.loss import FieldLoss
from isoscale.science.cosmology.whole_box import Tiles, write_boxes


class FieldRegression(Supervised):
    """A network from fields in a box to other fields there, of the same size."""

    def __init__(self, model: nn.Module, density_weight: float = 0.0) -> None:
        """`density_weight` is that of the error of the density itself, beside that of its logarithm (see the loss)."""
        super().__init__(model, FieldLoss(density_weight))

    def write_predictions(self, dataset: EvaluatedDataset, store: Store) -> None:
        """Whole boxes, where the data has some, and else a row for each sample."""
        if isinstance(dataset.source, Tiles):
            write_boxes(dataset, store)
        else:
            store.put("prediction", torch.cat([seen.output.float().cpu() for seen in dataset.look()]).numpy())

    def check_data(self, split: str, source: Source) -> None:
        """Refuse boxes that have not the fields that the network takes and gives."""
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
