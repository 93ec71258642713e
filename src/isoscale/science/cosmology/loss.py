"""The loss of predicted fields."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from isoscale.errors import UserError

LOG_RANGE = 14.0
"""Densities are stored as ln(ρ / mean ρ) / 14."""


class FieldLoss(nn.Module):
    """Mean absolute error (L1) of all fields, plus `density_weight` times that of the density itself.

    The first field is the logarithm of the density, in which a void counts as much as a cluster; the second term, of
    exp(14 ρ), counts where matter is.
    """

    def __init__(self, density_weight: float = 0.0) -> None:
        """`density_weight` is the λ of the second term; 0 leaves it out."""
        super().__init__()
        if not density_weight >= 0:
            raise UserError(f"density_weight is {density_weight}; expected 0 (no such term) or more, such as 0.01")
        self.density_weight = density_weight

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The mean over all samples, fields and cells, in float32 at least: bfloat16 has not the digits for sums."""
        if prediction.shape != target.shape:
            raise UserError(
                f"the prediction has the shape {tuple(prediction.shape)} and the target {tuple(target.shape)}; set "
                "task.model.out_channels to the number of fields of the target"
            )
        dtype = torch.promote_types(torch.promote_types(prediction.dtype, target.dtype), torch.float32)
        prediction, target = prediction.to(dtype), target.to(dtype)
        loss = functional.l1_loss(prediction, target)
        if self.density_weight == 0:
            return loss
        density, true_density = (torch.exp(LOG_RANGE * fields[:, 0]) for fields in (prediction, target))
        return loss + self.density_weight * functional.l1_loss(density, true_density)
