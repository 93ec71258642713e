"""Check the components that a recipe names, before anything is allocated."""

from collections.abc import Sequence
from typing import Any

from isoscale.config import OpenConfig
from isoscale.data.config import Data
from isoscale.engine.config import Optimizer, OptimizerClass, ScheduleClass
from isoscale.errors import Problem
from isoscale.recipe.components import (
    FUNCTIONS,
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
from isoscale.recipe.optimizers import class_problems, optimizer_problems
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
    """The problems of task, data, optimizer, schedule and loggers, from values that need not have passed the schema.

    Classes of others are looked up in their source where they must not be imported.
    A section that is written under a misspelt name is left alone: its default would be checked in its place.
    """
    misspelt = {problem.suggestion for problem in schema_problems if len(problem.path) == 1}
    checks = {"task": _check_task, "data": _check_data, "optimizer": _check_optimizer, "schedule": _check_schedule,
              "observe": _check_observe}  # fmt: skip
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
    problems = _check_class("data", section, Data().class_, _arguments("data", section), look)
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
