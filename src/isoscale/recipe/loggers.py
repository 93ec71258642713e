"""The loggers that a recipe names: checked, built, and what to type to send a run to one of them later."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isoscale.errors import KeyPath, Problem
from isoscale.observe.events import Observer
from isoscale.recipe.components import Look, Spec, as_mapping, check, instantiate, resolve
from isoscale.recipe.problems import RecipeError

PLACE: KeyPath = ("observe", "loggers")


def logger_problems(specs: Sequence[Any], look: Look = resolve) -> list[Problem]:
    """What would keep the loggers of a recipe from being built or from being told anything."""
    return [problem for position, spec in enumerate(specs) for problem in _problems(spec, (*PLACE, position), look)]


def build_loggers(specs: Sequence[Any]) -> list[Observer]:
    """Build the loggers of a recipe; raises a UserError where a name, an argument or a package is not right."""
    return [build_logger(spec, (*PLACE, position)) for position, spec in enumerate(specs)]


def build_logger(spec: Any, path: KeyPath) -> Observer:
    """Build a logger that was written at `path`."""
    problems = _problems(spec, path, resolve)
    if problems:
        raise RecipeError(problems)
    logger: Observer = instantiate(spec)
    return logger


def _problems(spec: Any, path: KeyPath, look: Look) -> list[Problem]:
    problems = check(spec, path, look=look)
    if problems:
        return problems
    name = as_mapping(spec)["class"]
    target = look(name)
    missing = [method for method in ("notify", "close") if isinstance(target, type) and not hasattr(target, method)]
    return [Problem(path, f"{name} is not a logger: it has no method {missing[0]}")] if missing else []


def send_command(run: Path, spec: Spec) -> str:
    """What to type to send a run to a logger: `isoscale runs send RUN mlflow tracking_uri=http://host:5000`."""
    mapping = as_mapping(spec)
    words = [f"{key}={_written(value)}" for key, value in mapping.items() if key != "class"]
    return shlex.join(["isoscale", "runs", "send", str(run), mapping["class"], *words])


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)
