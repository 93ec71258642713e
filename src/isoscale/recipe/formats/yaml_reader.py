"""Read YAML by the rules of YAML 1.2: `1e-3` is a number, `no` and `01:00:00` are text, keys occur once.

PyYAML parses the text. What its values are is decided here, because it follows YAML 1.1, takes the last of two equal
keys and does not keep the lines.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from isoscale.errors import KeyPath, Problem
from isoscale.recipe.formats.tree import Node, Origin
from isoscale.recipe.problems import RecipeError

MAX_VALUES = 100_000
"""A recipe with more values than this is a mistake, such as aliases that multiply."""

_TAG = "tag:yaml.org,2002:"
_RULES = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


class _CoreLoader(yaml.SafeLoader):
    """A loader that knows the scalars of the YAML 1.2 core schema and no others."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


for _name, (_pattern, _first) in _RULES.items():
    _starts = [*_first, ""] if _name == "null" else list(_first)
    _CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _starts)


def read_yaml(text: str, source: str, problems: list[Problem], merge_keys: bool = False) -> Node:
    """Read a YAML document; a syntax error is raised, what can be read around becomes a problem.

    With `merge_keys`, `<<: *base` puts in what another mapping holds; recipes have `extends` for that.
    """
    try:
        root = yaml.compose(text, _CoreLoader)
        builder = _Builder(lambda node: Origin(source, node.start_mark.line + 1), problems, merge_keys)
        return Node(None, Origin(source, 1)) if root is None else builder.build(root, (), Origin(source, 1))
    except yaml.YAMLError as error:
        line, message = _describe(error, text)
        raise RecipeError([Problem((), message, f"{source}:{line}")]) from None
    except RecursionError:
        raise RecipeError([Problem((), "nested too deeply to be a recipe", source)]) from None


def read_value(text: str, origin: Origin, path: KeyPath, problems: list[Problem]) -> Node:
    """Read one value, as on the right of `key=value`; what cannot be read becomes a problem."""
    try:
        root = yaml.compose(text, _CoreLoader)
        return Node(None, origin) if root is None else _Builder(lambda _: origin, problems).build(root, path, origin)
    except yaml.YAMLError as error:
        message = f"cannot read the value {text!r}: {_describe(error, text)[1]}; put text in quotes: '\"…\"'"
    except RecursionError:
        message = "nested too deeply"
    problems.append(Problem(path, message, str(origin)))
    return Node(None, origin)


def resolves_to_text(text: str) -> bool:
    """Whether a plain, unquoted scalar of this text would be read as text."""
    return not any(re.fullmatch(pattern, text) for pattern, _ in _RULES.values())


def _describe(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        words = ", ".join(part for part in (error.context, error.problem) if part)
        hint = " (indent with spaces, not tabs)" if "'\\t'" in words else ""
        return (mark.line + 1 if mark else 1), f"not valid YAML: {words}{hint}"
    position = getattr(error, "position", 0)
    return text.count("\n", 0, position) + 1, f"not valid YAML: {getattr(error, 'reason', error)}"


class _Builder:
    """Turns the nodes of the YAML library into ours, and collects what is wrong with them."""

    def __init__(
        self, locate: Callable[[yaml.Node], Origin], problems: list[Problem], merge_keys: bool = False
    ) -> None:
        self._locate = locate
        self._problems = problems
        self._merge_keys = merge_keys
        self._open: set[int] = set()
        self._num_values = 0

    def build(self, node: yaml.Node, path: KeyPath, origin: Origin) -> Node:
        self._num_values += 1
        if id(node) in self._open:
            raise RecipeError([Problem(path, "an alias that contains itself", str(origin))])
        if self._num_values > MAX_VALUES:
            raise RecipeError([Problem(path, f"more than {MAX_VALUES:,} values are not a recipe", str(origin))])
        if isinstance(node, yaml.ScalarNode):
            return Node(self._scalar(node, path, origin), origin)
        self._open.add(id(node))
        value = self._entries(node, path) if isinstance(node, yaml.MappingNode) else self._items(node, path)
        self._open.remove(id(node))
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self._problem(path, f"the YAML tag {_short(node.tag)} is not for recipes", origin)
        return Node(value, origin)

    def _items(self, node: yaml.Node, path: KeyPath) -> list[Node]:
        return [self.build(item, (*path, i), self._locate(item)) for i, item in enumerate(node.value)]

    def _entries(self, node: yaml.Node, path: KeyPath) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            origin = self._locate(key_node)
            if self._merge_keys and _is_merge_key(key_node):
                merged = self._merged(value_node, path, origin) | merged
                continue
            if not self._is_text_key(key_node, path, origin):
                continue
            key = key_node.value
            if key in entries:
                self._problem((*path, key), f"written twice, first at {entries[key].origin}", origin)
            entries[key] = self.build(value_node, (*path, key), origin)
        return merged | entries

    def _merged(self, node: yaml.Node, path: KeyPath, origin: Origin) -> dict[str, Node]:
        """The entries of a mapping, or of several, of which the first to have a key counts."""
        found: dict[str, Node] = {}
        for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            built = self.build(each, path, origin).value
            if not isinstance(built, dict):
                self._problem(path, "<< takes a mapping, or a list of them", origin)
                continue
            found = built | found
        return found

    def _is_text_key(self, node: yaml.Node, path: KeyPath, origin: Origin) -> bool:
        if node.tag != _TAG + "str":
            shown = f'"{node.value}"' if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            self._problem(path, f"the key {shown} is not text; put it in quotes", origin)
            return False
        if _is_merge_key(node):
            self._problem(path, "merge keys (<<) are not read; use extends", origin)
            return False
        return True

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath, origin: Origin) -> Any:
        kind = _short(node.tag)
        if kind == "str":
            return node.value
        if kind not in _RULES:
            self._problem(path, f"the YAML tag {kind} is not for recipes", origin)
            return node.value
        try:
            return _CONVERT[kind](node.value)
        except ValueError as error:
            self._problem(path, f"{node.value[:40]!r} cannot be read as {kind}: {error}", origin)
            return None

    def _problem(self, path: KeyPath, message: str, origin: Origin) -> None:
        self._problems.append(Problem(path, message, str(origin)))


def _is_merge_key(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value == "<<" and node.style is None


def _short(tag: str) -> str:
    return tag.removeprefix(_TAG)


def _to_null(text: str) -> None:
    if text.lower() not in ("", "~", "null"):
        raise ValueError("write null")


def _to_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("write true or false")
    return text.lower() == "true"


def _to_int(text: str) -> int:
    bases = {"0x": 16, "0o": 8}
    return int(text, bases.get(text[:2], 10))


def to_float(text: str) -> float:
    """Read a number with a point or an exponent; one too large for a float is refused."""
    words = text.lower().lstrip("+-")
    value = float(text.replace(".", "", 1) if words in (".inf", ".nan") else text)
    if math.isinf(value) and words != ".inf":
        raise ValueError("too large")
    return value


_CONVERT: dict[str, Callable[[str], Any]] = {"null": _to_null, "bool": _to_bool, "int": _to_int, "float": to_float}
