"""The loss of fields: L1, and L1 of the density itself."""

import math

import pytest
import torch

from isoscale.errors import UserError
from isoscale.science.cosmology.loss import FieldLoss


def test_it_is_the_mean_absolute_error_of_all_fields() -> None:
    prediction, target = torch.rand(2, 5, 4, 4, 4), torch.rand(2, 5, 4, 4, 4)
    expected = sum(float((prediction[:, field] - target[:, field]).abs().mean()) for field in range(5)) / 5
    assert float(FieldLoss()(prediction, target)) == pytest.approx(expected, rel=1e-6)


def test_the_density_is_that_of_the_first_field() -> None:
    prediction, target = torch.zeros(2, 5, 2, 2, 2), torch.zeros(2, 5, 2, 2, 2)
    prediction[0, 0], target[1, 0] = 0.5, 1.0
    prediction[:, 1:] = 0.25
    plain = (0.5 + 1.0 + 2 * 4 * 0.25) / 10
    density = ((math.exp(7) - 1) + (math.exp(14) - 1)) / 2
    assert float(FieldLoss(0.01)(prediction, target)) == pytest.approx(plain + 0.01 * density, rel=1e-6)
    assert float(FieldLoss()(prediction, target)) == pytest.approx(plain, rel=1e-6)


def test_predictions_in_bfloat16_are_compared_in_float32() -> None:
    torch.manual_seed(0)
    prediction, target = (torch.rand(2, 5, 16, 16, 16) * 2 - 1 for _ in range(2))
    coarse = prediction.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = FieldLoss(1e-4)(coarse, target)
    assert loss.dtype == torch.float32
    exact = FieldLoss(1e-4)(coarse.detach().double(), target.double())
    assert exact.dtype == torch.float64
    torch.testing.assert_close(loss.detach(), exact.float(), rtol=1e-5, atol=0)
    loss.backward()
    assert coarse.grad is not None and coarse.grad.isfinite().all() and (coarse.grad != 0).all()


def test_it_can_be_differentiated() -> None:
    prediction, target = (torch.rand(1, 2, 2, 2, 2, dtype=torch.float64) for _ in range(2))
    assert torch.autograd.gradcheck(FieldLoss(1e-3), (prediction.requires_grad_(), target))


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match=r"expected 0 .* or more"):
        FieldLoss(-1)
    with pytest.raises(UserError, match=r"task\.model\.out_channels"):
        FieldLoss()(torch.zeros(2, 5, 2, 2, 2), torch.zeros(2, 1, 2, 2, 2))
