"""Fused optimizers in pieces: the same bits, and more of them at a time."""

import pytest
import torch
from torch import nn

from isoscale.engine.optim import spread
from isoscale.engine.optim.spread import GRAIN, MOST_TENSORS, Spread

SHAPES = [(400, 91), (400,), (201, 400), (201,), ()]


def trained(
    optimizer: type, arguments: dict, *, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    calls: list[int] = []
    cut = spread._cut
    monkeypatch.setattr(spread, "_cut", lambda rows: calls.append(len(found := cut(rows))) or found)
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    made = optimizer(parameters, lr=1e-2, fused=True, **arguments)
    latch = torch.zeros(())
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if in_pieces:
            with Spread():
                torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in parameters], latch, torch.ones(()))
                made.step()
        else:
            made.step()
    assert latch == 0
    assert bool(calls) == in_pieces
    assert all(len(SHAPES) < count <= MOST_TENSORS[1] for count in calls)
    monkeypatch.undo()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_pieces_give_the_bits_of_the_whole(optimizer, arguments, monkeypatch):
    whole = trained(optimizer, arguments, in_pieces=False, monkeypatch=monkeypatch)
    pieces = trained(optimizer, arguments, in_pieces=True, monkeypatch=monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_a_value_that_is_not_finite_is_found_in_any_piece():
    gradients = [torch.zeros(100 * GRAIN), torch.zeros(3)]
    gradients[0][-1] = torch.inf
    latch = torch.zeros(())
    with Spread():
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, latch, torch.ones(()))
    assert latch == 1


def test_a_tensor_that_is_not_flat_stays_whole():
    image = nn.Parameter(torch.randn(64, 32, 8, 8).to(memory_format=torch.channels_last))
    other = nn.Parameter(image.detach().clone(memory_format=torch.preserve_format))
    image.grad = torch.randn(64, 32, 8, 8)
    other.grad = image.grad.clone()
    with Spread():
        torch.optim.Adam([image], fused=True).step()
    torch.optim.Adam([other], fused=True).step()
    assert torch.equal(image, other)


def test_many_tensors_are_left_alone():
    rows = [(torch.zeros(5000),) * 4] * MOST_TENSORS[4]
    assert spread._cut(rows) is rows
