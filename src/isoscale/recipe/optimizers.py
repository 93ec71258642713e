"""Check the optimizer of a recipe against those that torch has."""

from typing import Any

from isoscale.engine.config import Optimizer
from isoscale.recipe.arguments import check_arguments
from isoscale.recipe.problems import KeyPath, Problem, nearest

REFUSED = {
    "lbfgs": "LBFGS evaluates the loss several times in one step (a closure), which a captured step cannot do",
    "sparseadam": "SparseAdam takes sparse gradients only; adam is the one for dense gradients",
}
DECIDED_BY_ISOSCALE = ("fused", "foreach", "capturable", "differentiable")


def optimizer_classes() -> dict[str, type]:
    """The optimizers of torch that a recipe can name, by lower-case name."""
    import torch

    classes = {name.lower(): value for name, value in vars(torch.optim).items() if isinstance(value, type)}
    base = torch.optim.Optimizer
    return {
        name: value
        for name, value in classes.items()
        if issubclass(value, base) and value is not base and name not in REFUSED
    }


def check_optimizer(section: Optimizer) -> list[Problem]:
    """What would keep the optimizer of a recipe from being built."""
    return optimizer_problems(section.name, section.arguments)


def optimizer_problems(name: str, arguments: dict[str, Any], path: KeyPath = ("optimizer",)) -> list[Problem]:
    """Check a name and the arguments beside it, as written."""
    if name.lower() in REFUSED:
        return [Problem((*path, "name"), REFUSED[name.lower()])]
    classes = optimizer_classes()
    if name.lower() not in classes:
        message = f'torch has no optimizer "{name}" that trains in steps; there are {", ".join(sorted(classes))}'
        return [Problem((*path, "name"), message, None, nearest(name, classes))]
    decided = [key for key in arguments if key in DECIDED_BY_ISOSCALE]
    problems = [
        Problem((*path, key), "isoscale decides this by device and step program; leave it out") for key in decided
    ]
    others = {key: value for key, value in arguments.items() if key not in decided}
    neighbours = tuple(Optimizer.model_fields)
    return problems + check_arguments(
        classes[name.lower()], others, path, frozenset({"params", "lr", *DECIDED_BY_ISOSCALE}), neighbours
    )
