"""Check arguments against the signature of what will be called, before anything is built."""

import inspect
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from isoscale.errors import KeyPath, Problem, nearest
from isoscale.recipe.wording import translate

_PLAIN_TYPES = (int, float, str, bool, type(None), list, tuple, dict, Any)
_GENERIC_TYPES = (Annotated, Union, types.UnionType, list, tuple, dict, Sequence, Mapping, Iterable)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_arguments(
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    path: KeyPath,
    provided: frozenset[str] = frozenset(),
    neighbours: Iterable[str] = (),
) -> list[Problem]:
    """Unknown, missing and mistyped arguments of a call; `neighbours` are other keys that may have been meant."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return []  # some classes written in C do not tell theirs
    unknown = _unknown(target, signature, arguments, path, provided, neighbours)
    # A misspelt argument is one mistake, not one unknown and one missing argument.
    covered = {*arguments, *provided, *(problem.suggestion for problem in unknown)}
    missing = [
        Problem(path, f'{_label(target)} needs the argument "{name}"')
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in _VARIADIC and name not in covered
    ]
    mistyped = _mistyped(target, signature, arguments, path)
    return unknown + missing + mistyped + _not_finite(target, arguments, path)


def _not_finite(target: Callable[..., Any], value: Any, path: KeyPath) -> list[Problem]:
    """Numbers that are none, and infinite ones where no component of ours has a use for them."""
    if isinstance(value, float):
        is_ours = getattr(target, "__module__", "").partition(".")[0] in ("isoscale", "torch")
        is_wrong = math.isnan(value) or (is_ours and math.isinf(value))
        return [Problem(path, f"expected a finite number, found {value}")] if is_wrong else []
    if isinstance(value, Mapping) and "class" in value and len(path) > 1:
        return []  # a component, which is checked by itself
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [problem for key, child in inside for problem in _not_finite(target, child, (*path, key))]


def _label(target: Callable[..., Any]) -> str:
    return getattr(target, "__name__", str(target))


def _unknown(
    target: Callable[..., Any],
    signature: inspect.Signature,
    arguments: Mapping[str, Any],
    path: KeyPath,
    provided: frozenset[str],
    neighbours: Iterable[str],
) -> list[Problem]:
    parameters = signature.parameters
    accepted = [name for name, parameter in parameters.items() if parameter.kind not in _VARIADIC]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    problems = []
    for name in arguments:
        if name in provided:
            problems.append(Problem((*path, name), "isoscale supplies this argument itself; leave it out"))
        elif name not in accepted and not takes_any:
            candidates = [*(set(accepted) - provided), *neighbours]
            problems.append(
                Problem((*path, name), f"{_label(target)} takes no such argument", None, nearest(name, candidates))
            )
    return problems


def _mistyped(
    target: Callable[..., Any], signature: inspect.Signature, arguments: Mapping[str, Any], path: KeyPath
) -> list[Problem]:
    try:
        function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        annotations = get_type_hints(function, include_extras=True)
    except Exception:
        return []  # annotations that name what is not there at run time cannot be checked
    problems = []
    for name, value in arguments.items():
        parameter = signature.parameters.get(name)
        if parameter is not None and parameter.kind not in _VARIADIC and name in annotations:
            is_default = value is None and parameter.default is None
            problems += [] if is_default else _check_type(annotations[name], value, (*path, name))
    return problems


def _check_type(annotation: Any, value: Any, path: KeyPath) -> list[Problem]:
    if _holds_component(value) or not _checkable(annotation):
        return []
    try:
        # Through JSON, where a list is also good for a tuple; strict, because arguments are passed on as written.
        TypeAdapter(annotation).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        return translate(error.errors(include_url=False), value, path)
    except PydanticUserError:
        pass
    return []


def _holds_component(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "class" in value or any(_holds_component(child) for child in value.values())
    return isinstance(value, list) and any(_holds_component(child) for child in value)


def _checkable(annotation: Any) -> bool:
    """Whether a type is made of plain values only, so that what a file holds can be compared with it."""
    if any(annotation is plain for plain in _PLAIN_TYPES) or annotation is Ellipsis:
        return True
    origin = get_origin(annotation)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _checkable(get_args(annotation)[0])
    return any(origin is generic for generic in _GENERIC_TYPES) and all(map(_checkable, get_args(annotation)))
