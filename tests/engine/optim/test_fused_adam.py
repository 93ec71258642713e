"""The direct call of Adam's kernel does what torch's step does, to the bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from isoscale.engine.optim.fused_adam import FusedAdam
from isoscale.engine.optim.optimizers import plain_step

SHAPES = [(30, 7), (30,), (2, 30), ()]
KINDS = [
    (Adam, {}),
    (Adam, {"weight_decay": 0.1, "amsgrad": True}),
    (Adam, {"maximize": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    (AdamW, {}),
]


def made(cls: type[Optimizer], arguments: dict) -> tuple[list[nn.Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 3e-3}]
    return parameters, cls(groups, lr=1e-2, fused=True, **arguments)


def trained(
    cls: type[Optimizer], arguments: dict, *, direct: bool, before: Callable[[int, list, Optimizer], None]
) -> list[Tensor]:
    parameters, optimizer = made(cls, arguments)
    step = plain_step(optimizer) if direct else optimizer.step
    assert isinstance(step, FusedAdam) == direct
    generator = torch.Generator().manual_seed(1)
    for number in range(12):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        before(number, parameters, optimizer)
        step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [parameter.detach() for parameter in parameters] + states


def nothing(number: int, parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
    pass


def a_missing_gradient(number: int, parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
    if number in (0, 4, 5):
        parameters[2].grad = None


def another_rate(number: int, parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)


def a_state_of_its_own(number: int, parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
    if number == 6:
        optimizer.load_state_dict(optimizer.state_dict())
        for parameter, entries in list(optimizer.state.items()):
            optimizer.state[parameter] = {name: value.clone() for name, value in entries.items()}


def a_latch(number: int, parameters: list[nn.Parameter], optimizer: Optimizer) -> None:
    optimizer.found_inf = torch.tensor(float(number == 7))


@pytest.mark.parametrize("before", [nothing, a_missing_gradient, another_rate, a_state_of_its_own, a_latch])
@pytest.mark.parametrize(("cls", "arguments"), KINDS)
def test_the_direct_call_gives_the_bits_of_torchs_step(cls, arguments, before):
    expected = trained(cls, arguments, direct=False, before=before)
    found = trained(cls, arguments, direct=True, before=before)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_listener_is_heard():
    _, optimizer = made(Adam, {})
    optimizer.register_step_post_hook(lambda *arguments: None)
    assert not isinstance(plain_step(optimizer), FusedAdam)
