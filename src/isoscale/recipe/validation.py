"""Hold the values of a recipe against its schema."""

from dataclasses import replace
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from isoscale.errors import MISSING_KEY, UNKNOWN_KEY, KeyPath, Problem, nearest
from isoscale.recipe.schema import Recipe
from isoscale.recipe.wording import translate


def validate(values: dict[str, Any]) -> tuple[Recipe | None, list[Problem]]:
    """The typed recipe, or everything that keeps the values from being one."""
    try:
        return Recipe.model_validate(values), []
    except ValidationError as error:
        problems = [_with_suggestion(problem) for problem in translate(error.errors(include_url=False), values)]
        # A misspelt key is one mistake, not one unknown and one missing key.
        meant = {(*problem.path[:-1], problem.suggestion) for problem in problems if problem.suggestion}
        return None, [problem for problem in problems if problem.message != MISSING_KEY or problem.path not in meant]


def section_keys(path: KeyPath) -> list[str]:
    """The keys that the schema knows in the section at `path`."""
    section: type[BaseModel] = Recipe
    for part in path:
        fields = {field.alias or name: field for name, field in section.model_fields.items()}
        if part in fields:
            section = _section_in(fields[str(part)].annotation) or section
    return [field.alias or name for name, field in section.model_fields.items()]


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also as an option (`EarlyStopping | None`) or in a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((section for part in get_args(annotation) if (section := _section_in(part))), None)


def _with_suggestion(problem: Problem) -> Problem:
    if problem.message != UNKNOWN_KEY:
        return problem
    key = str(problem.path[-1])
    return replace(problem, suggestion=_in_other_section(key) or nearest(key, section_keys(problem.path[:-1])))


def _in_other_section(key: str) -> str | None:
    """`optimizer.lr` for `lr`, when exactly one section has such a key."""
    sections = [name for name, field in Recipe.model_fields.items() if _section_in(field.annotation)]
    homes = [f"{name}.{key}" for name in sections if key in section_keys((name,))]
    return homes[0] if len(homes) == 1 else None
