"""What would let a training end well though nothing was trained, and how it is noticed; no look at the device."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from isoscale.errors import UserError

MOST_NAMED = 4


def optimised(optimizers: Sequence[Optimizer]) -> list[Any]:
    """The tensors that optimizers update."""
    return [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]


def check_replaced(task: nn.Module, optimizers: Sequence[Optimizer], before: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that hooks have put in the place of those which the optimizers were made for."""
    own = {id(parameter) for parameter in task.parameters()}
    trained = {id(each) for each in optimised(optimizers)}
    lost = [name for name, parameter in before.items() if id(parameter) in trained - own]
    known = {id(parameter) for parameter in before.values()}
    new = [name for name in not_optimised(task, optimizers) if id(task.get_parameter(name)) not in known]
    if lost and new:
        raise UserError(
            f"the optimizer has parameters that are no longer in the task ({named(lost)}), and not those that took "
            f"their place ({named(new)}), which would stay untrained: a hook such as on_fit_start or on_train_start "
            "has replaced layers after the optimizer was made. Replace them in __init__, setup or configure_model, or "
            "change values in place: with torch.no_grad(): parameter.copy_(…)"
        )


def not_optimised(task: nn.Module, optimizers: Sequence[Optimizer]) -> list[str]:
    """The names of parameters that require gradients and that no optimizer has."""
    trained = {id(each) for each in optimised(optimizers)}
    return [name for name, each in task.named_parameters() if each.requires_grad and id(each) not in trained]


def refuse_unreached(task: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse a loss that has gradients for other parameters only than those which the optimizers have."""
    trained = {id(each) for each in optimised(optimizers)}
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    reached = [name for name, each in task.named_parameters() if each.grad is not None and id(each) not in trained]
    has = [names[each] for each in trained if each in names]
    raise UserError(
        f"nothing is trained: the loss depends on none of the parameters that the optimizer has ({named(sorted(has))})"
        f"{f', but on {named(reached)}' * bool(reached)}. Compute the loss with the network whose parameters "
        "configure_optimizers gives to the optimizer; a copy of it is another network"
    )


def named(names: Sequence[str]) -> str:
    """A few names, and a sign that there are more."""
    return f"{', '.join(names[:MOST_NAMED])}{' …' * (len(names) > MOST_NAMED)}"
