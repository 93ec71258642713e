"""The task of learning fields in a box from others, with the physics that people look at."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from isoscale.data.sources import Source, whole
from isoscale.data.volumes import Crops
from isoscale.engine.task import Supervised
from isoscale.errors import UserError
from isoscale.science.cosmology.loss import FieldLoss
from isoscale.science.cosmology.symmetries import CubeSymmetry


class FieldRegression(Supervised):
    """A network from fields in a box to other fields there, of the same size."""

    def __init__(self, model: nn.Module, density_weight: float = 0.0) -> None:
        """`density_weight` is that of the error of the density itself, beside that of its logarithm (see the loss)."""
        super().__init__(model, FieldLoss(density_weight))

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
