"""Check the optimizer and the schedule of a recipe: by name against those that there are, by class as any component."""

import inspect
from typing import Any

from isoscale.engine.config import AnyOptimizer, Optimizer, OptimizerClass, ScheduleClass
from isoscale.errors import KeyPath, Problem, nearest
from isoscale.recipe.arguments import check_arguments
from isoscale.recipe.components import LAMBDA, Look, UnknownComponent, check_handed, check_nested, resolve

DECIDED_BY_ISOSCALE = ("fused", "foreach", "capturable", "differentiable")


def check_optimizer(section: AnyOptimizer) -> list[Problem]:
    """What would keep the optimizer of a recipe from being built."""
    if isinstance(section, OptimizerClass):
        return class_problems("optimizer", section.class_, section.arguments)
    return optimizer_problems(section.name, section.arguments)


def optimizer_problems(name: str, arguments: dict[str, Any], path: KeyPath = ("optimizer",)) -> list[Problem]:
    """Check a name and the arguments beside it, as written."""
    from isoscale.engine.optim.optimizers import UNFIT, optimizer_classes

    if name.lower() in UNFIT:
        return [Problem((*path, "name"), UNFIT[name.lower()])]
    classes = optimizer_classes()
    if name.lower() not in classes:
        message = f'torch has no optimizer "{name}" that trains in steps; there are {", ".join(sorted(classes))}'
        hint = "; a class of your own is optimizer.class=package.module.Class" if "." in name else ""
        return [Problem((*path, "name"), message + hint, None, nearest(name, classes))]
    return _argument_problems(classes[name.lower()], arguments, path)


def _argument_problems(target: Any, arguments: dict[str, Any], path: KeyPath) -> list[Problem]:
    decided = [key for key in arguments if key in DECIDED_BY_ISOSCALE]
    problems = [
        Problem((*path, key), "isoscale decides this by device and step program; leave it out") for key in decided
    ]
    others = {key: value for key, value in arguments.items() if key not in decided}
    supplied, neighbours = frozenset({"params", "lr", *DECIDED_BY_ISOSCALE}), tuple(Optimizer.model_fields)
    return problems + check_arguments(target, others, path, supplied | _first(target), neighbours)


def _first(target: Any) -> frozenset[str]:
    """The first argument of an optimizer, by whatever name: the parameters."""
    try:
        return frozenset(list(inspect.signature(target).parameters)[:1])
    except (TypeError, ValueError):
        return frozenset()


def class_problems(section: str, name: str, arguments: dict[str, Any], look: Look = resolve) -> list[Problem]:
    """What would keep an optimizer or a schedule from being built that is named by its class path."""
    from isoscale.engine.optim import optimizers, schedules

    path: KeyPath = (section,)
    try:
        target = look(name)
    except UnknownComponent as error:
        return [Problem((*path, "class"), error.message, None, error.suggestion)]
    if "name" in arguments and isinstance(arguments["name"], str):
        message = f"stands beside class, and one is enough: ~{section}.name, or {section}={{class: {name}, …}}"
        return [Problem((*path, "name"), message)]
    if target is None:
        return []
    is_known = look is resolve or inspect.isclass(target)  # else it is but an outline of its source
    unfit = (optimizers if section == "optimizer" else schedules).why_unfit(target) if is_known else None
    if not is_known and section == "optimizer":
        unfit = optimizers.why_no_lr(target)
    if unfit:
        return [Problem((*path, "class"), unfit)]
    if section == "optimizer":
        return _argument_problems(target, arguments, path) + check_nested(arguments, path, look)
    nested = {key: value for key, value in arguments.items() if key != LAMBDA}
    handed = check_handed(arguments[LAMBDA], (*path, LAMBDA), look, num_later=1) if LAMBDA in arguments else []
    return _schedule_problems(target, arguments, path, is_known) + check_nested(nested, path, look) + handed


def _schedule_problems(target: Any, arguments: dict[str, Any], path: KeyPath, is_known: bool) -> list[Problem]:
    from isoscale.engine.optim.schedules import is_scheduler, supplied_to

    neighbours = [key for key in ScheduleClass.model_fields if key != "class_"]
    if is_scheduler(target):
        supplied = frozenset({"optimizer", "last_epoch", "cycle_momentum", *supplied_to(target, arguments)})
        return check_arguments(target, arguments, path, supplied, neighbours)
    if not is_known:
        return []  # a function or a class: only whoever imports it knows
    names = [] if inspect.isclass(target) else list(inspect.signature(target).parameters)[:2]
    return check_arguments(target, arguments, path, frozenset(names), neighbours)
