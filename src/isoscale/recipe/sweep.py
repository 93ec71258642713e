"""The `sweep` section of a recipe: which of its keys take which values."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from isoscale.errors import KeyPath, Problem, dotted, found, nearest
from isoscale.recipe.formats.tree import Node, merge
from isoscale.recipe.schema import Range, Sweep
from isoscale.recipe.wording import translate

SECTION = "sweep"
OWN_KEYS = tuple(Sweep.model_fields)
REFUSED = {"launch": "one job asks for the same for all points", SECTION: "a sweep holds no other sweep"}
Choices = list[Any] | Range


def with_nested_keys(node: Node) -> Node:
    """The recipe with `optimizer.lr: […]` below `sweep` written as `optimizer: {lr: […]}`, as overrides write it."""
    section = node.value.get(SECTION) if isinstance(node.value, dict) else None
    if section is None or not isinstance(section.value, dict):
        return node
    nested = Node({}, section.origin)
    for key, child in section.value.items():
        nested = merge(nested, _wrapped(key.split("."), child))
    return Node({**node.value, SECTION: nested}, node.origin)


def _wrapped(parts: list[str], child: Node) -> Node:
    inner = child if len(parts) == 1 else _wrapped(parts[1:], child)
    return Node({parts[0]: inner}, child.origin)


def choices(section: Sweep) -> dict[str, Choices]:
    """What each key may be: values to try, or a range to draw from."""
    return {
        dotted(path): leaf if isinstance(leaf, list) else Range.model_validate(leaf)
        for path, leaf in _leaves(section.arguments, ())
        if path
    }


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    is_mapping = isinstance(value, Mapping) and bool(value)
    if not is_mapping or any(key in value and not isinstance(value[key], list | dict) for key in ("min", "max")):
        yield path, value
        return
    for key, child in value.items():
        yield from _leaves(child, (*path, key))


def sweep_problems(section: Any) -> list[Problem]:
    """What is wrong with the section beyond its own keys, and without a look at the keys that it names."""
    if not isinstance(section, dict):
        return []
    how = section.get("how", Sweep().how)
    leaves = list(_leaves({key: value for key, value in section.items() if key not in OWN_KEYS}, ()))
    problems = [problem for path, leaf in leaves if path for problem in _leaf_problems(path, leaf, how)]
    return problems + _budget_problems(section, how) + _zip_problems(leaves, how)


def _leaf_problems(path: KeyPath, leaf: Any, how: Any) -> list[Problem]:
    here = (SECTION, *path)
    if path[0] in REFUSED:
        return [Problem(here, f"cannot differ between the points of a sweep: {REFUSED[str(path[0])]}")]
    if isinstance(leaf, dict) and leaf:
        wrong = "only a random sweep draws from a range; write a list, or sweep.how: random"
        return _range_problems(here, leaf) or ([Problem(here, wrong)] if how != "random" else [])
    if isinstance(leaf, list) and leaf:
        return []
    guess = nearest(str(path[0]), OWN_KEYS) if len(path) == 1 else None
    return [Problem(here, f"expected a list of values to try, such as [1, 2], found {found(leaf)}", None, guess)]


def _range_problems(path: KeyPath, leaf: dict[str, Any]) -> list[Problem]:
    try:
        Range.model_validate(leaf)
    except ValidationError as error:
        return translate(error.errors(include_url=False), leaf, path)
    return []


def _budget_problems(section: dict[str, Any], how: Any) -> list[Problem]:
    budget = section.get("budget")
    if how == "random" and budget is None:
        return [Problem((SECTION, "how"), "how many points? Write sweep.budget, such as 20")]
    if how != "random" and budget is not None:
        return [Problem((SECTION, "budget"), "only for sweep.how: random; the lists say how many points there are")]
    return []


def _zip_problems(leaves: list[tuple[KeyPath, Any]], how: Any) -> list[Problem]:
    lengths = {dotted(path): len(leaf) for path, leaf in leaves if isinstance(leaf, list)}
    if how != "zip" or len(set(lengths.values())) <= 1:
        return []
    told = ", ".join(f"{key} has {length}" for key, length in lengths.items())
    return [Problem((SECTION, "how"), f"zip takes lists of one length: {told}")]
