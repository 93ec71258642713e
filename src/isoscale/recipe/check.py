"""Check the components that a recipe names, before anything is allocated."""

import inspect
from collections.abc import Sequence
from typing import Any

from isoscale.config import OpenConfig
from isoscale.data.config import Data
from isoscale.engine.config import AnyOptimizer, LossWeightClass, Optimizer, OptimizerClass, ScheduleClass
from isoscale.errors import KeyPath, Problem, nearest
from isoscale.recipe.arguments import check_arguments
from isoscale.recipe.components import (
    FUNCTIONS,
    LAMBDA,
    Look,
    UnknownComponent,
    check,
    check_call,
    check_handed,
    check_nested,
    hands_over,
    resolve,
)
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.loggers import logger_problems
from isoscale.recipe.problems import RecipeError, with_origin
from isoscale.recipe.schema import Task
from isoscale.recipe.trust import read
from isoscale.recipe.validation import section_keys


def check_recipe(loaded: LoadedRecipe) -> None:
    """Raise RecipeError with every component that cannot be built as the recipe says."""
    problems = component_problems(loaded.values)
    if problems:
        raise RecipeError([with_origin(problem, loaded.origins) for problem in problems])


def component_problems(
    values: dict[str, Any], schema_problems: Sequence[Problem] = (), imported: bool = True
) -> list[Problem]:
    """The problems of components of all sections, from values that need not have passed the schema.

    Classes of others are looked up in their source where they must not be imported.
    A section that is written under a misspelt name is left alone: its default would be checked in its place.
    """
    misspelt = {problem.suggestion for problem in schema_problems if len(problem.path) == 1}
    checks = {"task": _check_task, "data": _check_data, "optimizer": _check_optimizer, "schedule": _check_schedule,
              "observe": _check_observe, "train": _check_train}  # fmt: skip
    problems: list[Problem] = []
    look = resolve if imported else read
    for name, check_section in checks.items():
        section = values.get(name, {})
        if isinstance(section, dict) and not (name in misspelt and name not in values):
            problems += check_section(section, look)
    return problems


def _check_task(section: dict[str, Any], look: Look) -> list[Problem]:
    model = section.get("model")
    arguments = _arguments("task", section) | ({} if model is None else {"model": {"class": model}})
    problems = _check_class("task", section, Task().class_, arguments, look)
    return problems + ([] if model is None else check(model, ("task", "model"), look=look))


def _check_data(section: dict[str, Any], look: Look) -> list[Problem]:
    own = section.get("init_args")
    arguments = _arguments("data", section) | (own if isinstance(own, dict) else {})
    problems = _check_class("data", section, Data().class_, arguments, look)
    transforms = section.get("transforms")
    for position, transform in enumerate(transforms if isinstance(transforms, list) else []):
        problems += check(transform, ("data", "transforms", position), look=look)
    return problems


def _check_optimizer(section: dict[str, Any], look: Look) -> list[Problem]:
    if "class" in section:
        return _check_schedule(section, look, "optimizer", OptimizerClass)
    name = section.get("name", Optimizer().name)
    return optimizer_problems(name, _arguments("optimizer", section)) if isinstance(name, str) else []


def _check_schedule(
    section: dict[str, Any], look: Look, name: str = "schedule", model: type[OpenConfig] = ScheduleClass
) -> list[Problem]:
    """A schedule, or an optimizer, by class path; names of schedules are the schema's."""
    if not isinstance(section.get("class"), str):
        return []
    fields = {field.alias or key for key, field in model.model_fields.items()}
    arguments = {key: value for key, value in section.items() if key not in fields}
    return class_problems(name, section["class"], arguments, look)


def _check_observe(section: dict[str, Any], look: Look) -> list[Problem]:
    loggers = section.get("loggers")
    return logger_problems(loggers, look) if isinstance(loggers, list) else []


def _check_train(section: dict[str, Any], look: Look) -> list[Problem]:
    callbacks = section.get("callbacks")
    listed = enumerate(callbacks if isinstance(callbacks, list) else [])
    problems = [problem for place, spec in listed for problem in check(spec, ("train", "callbacks", place), look=look)]
    weights = section.get("loss_weights")
    for name, weight in (weights if isinstance(weights, dict) else {}).items():
        if isinstance(weight, dict) and isinstance(weight.get("class"), str):
            problems += _check_weight(weight, ("train", "loss_weights", name), look)
    return problems


def _check_weight(weight: dict[str, Any], path: KeyPath, look: Look) -> list[Problem]:
    """The weight of a loss term by class path."""
    from isoscale.engine.optim.schedules import is_scheduler

    neighbours = [field.alias or key for key, field in LossWeightClass.model_fields.items()]
    arguments = {key: value for key, value in weight.items() if key not in neighbours}
    try:
        target = look(weight["class"])
    except UnknownComponent as error:
        return [Problem((*path, "class"), error.message, None, error.suggestion)]
    if is_scheduler(target):
        return [Problem((*path, "class"), "moves learning rates; a weight needs a function of (step, num_steps)")]
    is_known = target is not None and (look is resolve or inspect.isclass(target))
    if target is None or not is_known:
        return check_nested(arguments, path, look)
    names = [] if inspect.isclass(target) else list(inspect.signature(target).parameters)[:2]
    return check_arguments(target, arguments, path, frozenset(names), neighbours) + check_nested(arguments, path, look)


def _arguments(name: str, section: dict[str, Any]) -> dict[str, Any]:
    fields = section_keys((name,))
    return {key: value for key, value in section.items() if key not in fields}


def _check_class(
    name: str, section: dict[str, Any], default: str, arguments: dict[str, Any], look: Look
) -> list[Problem]:
    class_name = section.get("class", default)
    if not isinstance(class_name, str):
        return []  # the schema has said so
    problems = check_call(class_name, (name, "class"), arguments, (name,), frozenset(), section_keys((name,)), look)
    misspelt = [problem for problem in problems if problem.suggestion == "class"]
    handed = [key for key in FUNCTIONS if key in arguments] if name == "task" and _hands_over(class_name, look) else []
    nested = {key: value for key, value in arguments.items() if key not in ("model", *handed)}
    problems += check_nested(nested, (name,), look)
    return misspelt or problems + [each for key in handed for each in check_handed(arguments[key], (name, key), look)]


def _hands_over(class_name: str, look: Look) -> bool:
    try:
        return hands_over(look(class_name))
    except UnknownComponent:
        return False  # which has been said


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
