"""Check the optimizer of a recipe against those that torch has."""

from typing import Any

from isoscale.engine.config import Optimizer
from isoscale.recipe.arguments import check_arguments
from isoscale.recipe.problems import KeyPath, Problem, nearest

DECIDED_BY_ISOSCALE = ("fused", "foreach", "capturable", "differentiable")


def check_optimizer(section: Optimizer) -> list[Problem]:
    """What would keep the optimizer of a recipe from being built."""
    return optimizer_problems(section.name, section.arguments)


def optimizer_problems(name: str, arguments: dict[str, Any], path: KeyPath = ("optimizer",)) -> list[Problem]:
    """Check a name and the arguments beside it, as written."""
    from isoscale.engine.optim.optimizers import UNFIT, optimizer_classes

    if name.lower() in UNFIT:
        return [Problem((*path, "name"), UNFIT[name.lower()])]
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
