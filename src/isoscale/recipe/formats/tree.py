"""Recipe values that remember where they were written, and how two of them merge.

By hand, because every message about a recipe names the file and line of its value: libraries for configurations
(OmegaConf, jsonargparse) forget them as soon as files are merged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, NamedTuple

from isoscale.errors import KeyPath, Problem
from isoscale.recipe.names import class_path

NAMED_SECTIONS = (("optimizer",), ("schedule",))
"""Which say what they are by a name or by a class."""
CLASS_SYNONYMS = ("_target_", "class_path", "class_")
DATA_KEYS = (
    "batch_size", "loader_batches", "eval_batch_size", "residency", "samples_per_epoch", "shuffle", "workers",
    "drop_last", "transforms", "subset",
)  # fmt: skip
"""Keys of the section `data` that are the engine's: in `init_args`, they are arguments of the class all the same."""


class Origin(NamedTuple):
    """Where a value was written: a file and a line, or the command line."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


COMMAND_LINE = Origin("command line")
PYTHON_CALL = Origin("Python call")


@dataclass(frozen=True)
class Node:
    """A scalar, a mapping of nodes or a list of nodes, with its origin."""

    value: Any
    origin: Origin


def plain(node: Node) -> Any:
    """The values of a node without their origins."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def origins(node: Node, path: KeyPath = ()) -> dict[KeyPath, str]:
    """The origin of every key path below a node, sections and lists included."""
    found: dict[KeyPath, str] = {}
    for key, child in children(node.value):
        found[(*path, key)] = str(child.origin)
        found |= origins(child, (*path, key))
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Plain values by key as people write it: `optimizer.lr`; a list is one value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return found


def children(value: Any) -> list[tuple[str | int, Any]]:
    """The entries of a mapping or a list with their keys; nothing for a scalar."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def from_plain(value: object, origin: Origin, problems: list[Problem], path: KeyPath = ()) -> Node:
    """Turn values of a Python call into nodes; what a file could not hold becomes a problem."""
    if isinstance(value, Mapping):
        return Node(_from_mapping(value, origin, problems, path), origin)
    if isinstance(value, list | tuple):
        return Node([from_plain(item, origin, problems, (*path, i)) for i, item in enumerate(value)], origin)
    if isinstance(value, PurePath):
        return Node(str(value), origin)
    if value is not None and type(value) not in (bool, int, float, str):
        message = f"a {type(value).__name__} cannot be written in a recipe; give plain numbers, text, lists or mappings"
        problems.append(Problem(path, message, str(origin)))
        return Node(None, origin)
    return Node(value, origin)


def _from_mapping(value: Mapping[Any, Any], origin: Origin, problems: list[Problem], path: KeyPath) -> dict[str, Node]:
    entries = {}
    for key, item in value.items():
        if isinstance(key, str):
            entries[key] = from_plain(item, origin, problems, (*path, key))
        else:
            problems.append(Problem(path, f"the key {key!r} is not text", str(origin)))
    return entries


def merge(base: Node, top: Node, path: KeyPath = ()) -> Node:
    """Lay `top` over `base`: mappings merge, everything else replaces; another class brings its own arguments."""
    if not isinstance(base.value, dict) or not isinstance(top.value, dict) or _changes_class(base, top, path):
        return top
    merged = dict(base.value)
    for key, child in top.value.items():
        merged[key] = merge(merged[key], child, (*path, key)) if key in merged else child
    return Node(merged, top.origin)


def _changes_class(base: Node, top: Node, path: KeyPath) -> bool:
    old, new = base.value.get("class"), top.value.get("class")
    if old is None or new is None:
        # in the place of one by its name, one by its class, or the other way round
        has_name = "name" in (top if new is None else base).value
        return path in NAMED_SECTIONS and (old is not None or new is not None) and has_name
    return class_path(str(old.value)) != class_path(str(new.value))


def with_class_keys(node: Node, problems: list[Problem], path: KeyPath = ()) -> Node:
    """Write the synonyms `_target_` and `class_path` + `init_args` as `class` with the arguments beside it."""
    if isinstance(node.value, list):
        return replace(node, value=[with_class_keys(child, problems, (*path, i)) for i, child in enumerate(node.value)])
    if not isinstance(node.value, dict):
        return node
    entries = _one_class_key(node.value, problems, path)
    return replace(node, value={key: with_class_keys(child, problems, (*path, key)) for key, child in entries.items()})


def _one_class_key(entries: dict[str, Node], problems: list[Problem], path: KeyPath) -> dict[str, Node]:
    names = [key for key in entries if key == "class" or key in CLASS_SYNONYMS]
    if not names:
        return entries
    for name in names[1:]:
        message = f'says the class a second time, after "{names[0]}"; keep one of them'
        problems.append(Problem((*path, name), message, str(entries[name].origin)))
    arguments = {key: child for key, child in entries.items() if key not in names}
    nested = arguments.get("init_args")
    if nested is not None and (nested.value is None or isinstance(nested.value, dict)):
        del arguments["init_args"]
        apart = {key: child for key, child in (nested.value or {}).items() if path == ("data",) and key in DATA_KEYS}
        if apart:
            arguments["init_args"] = replace(nested, value=apart)
        for key, child in ((key, child) for key, child in (nested.value or {}).items() if key not in apart):
            if key in arguments or key == "class":
                message = "stands both beside the class and in init_args; keep one of them"
                problems.append(Problem((*path, key), message, str(child.origin)))
            arguments[key] = child
    return {"class": entries[names[0]], **arguments}
