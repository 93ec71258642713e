"""Say in plain words what pydantic found, one problem a key."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from isoscale.errors import MISSING_KEY, UNKNOWN_KEY, KeyPath, Problem, found, nearest

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping of keys to values",
    "model": "a section of keys and values",
    "none": "null",
    "finite": "a finite number",
}
_BOUNDS = {
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
}


def translate(errors: Sequence[ErrorDetails], values: Any, path: KeyPath = ()) -> list[Problem]:
    """The errors that pydantic found in `values`, as problems below `path`; members of a union become one."""
    located = [(error, *_locate(error, values)) for error in errors]
    inside = {union for _, here, union in located if union is not None and len(here) > len(union)}
    grouped: dict[KeyPath, list[ErrorDetails]] = {}
    for error, here, union in located:
        # A mapping where a number or a section may stand: only what is wrong inside the section is of interest.
        if not (union in inside and here == union):
            grouped.setdefault(here, []).append(error)
    return [_problem((*path, *here), group, _at(values, here)) for here, group in grouped.items()]


def _locate(error: ErrorDetails, values: Any) -> tuple[KeyPath, KeyPath | None]:
    """The key that an error is about, and the key whose type is a union, if one is on the way."""
    path: list[str | int] = []
    union: KeyPath | None = None
    for position, part in enumerate(error["loc"]):
        here = _at(values, tuple(path))
        is_missing_key = error["type"] == "missing" and position == len(error["loc"]) - 1
        if is_missing_key or _has(here, part):
            path.append(part)
        elif union is None:
            union = tuple(path)
    return tuple(path), union


def _has(value: Any, key: str | int) -> bool:
    if isinstance(value, dict):
        return key in value
    return isinstance(value, list) and isinstance(key, int) and key < len(value)


def _at(values: Any, path: KeyPath) -> Any:
    for part in path:
        values = values[part] if _has(values, part) else None
    return values


def _problem(path: KeyPath, errors: list[ErrorDetails], value: Any) -> Problem:
    types = [error["type"] for error in errors]
    if "extra_forbidden" in types:
        return Problem(path, UNKNOWN_KEY)
    if "missing" in types:
        return Problem(path, MISSING_KEY)
    if "value_error" in types:
        return Problem(path, str(errors[types.index("value_error")]["ctx"]["error"]))
    return Problem(path, f"expected {_expectations(errors)}, found {found(value)}", None, _choice(errors, value))


def _expectations(errors: list[ErrorDetails]) -> str:
    expected = list(dict.fromkeys(_expectation(error) for error in errors))
    if _EXPECTED["float"] in expected and _EXPECTED["int"] in expected:
        expected.remove(_EXPECTED["int"])
    return " or ".join(expected)


def _expectation(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    if kind in _BOUNDS:
        return _BOUNDS[kind].format(**{key: _short_number(value) for key, value in context.items()})
    return _EXPECTED.get(kind.partition("_")[0], f"something else ({error['msg']})")


def _short_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _choice(errors: list[ErrorDetails], value: Any) -> str | None:
    choices = [error["ctx"]["expected"] for error in errors if error["type"] == "literal_error"]
    return (
        nearest(value, re.split(", | or ", " or ".join(choices).replace("'", ""))) if isinstance(value, str) else None
    )
