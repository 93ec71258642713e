"""Changes to a recipe from the command line or a Python call: `optimizer.lr=3e-4`, `~schedule`."""

from collections.abc import Callable, Mapping, Sequence

from isoscale.errors import KeyPath, Problem, dotted, nearest
from isoscale.recipe.formats.tree import (
    CLASS_SYNONYMS,
    COMMAND_LINE,
    PYTHON_CALL,
    Node,
    Origin,
    from_plain,
    with_class_keys,
)
from isoscale.recipe.formats.yaml_reader import read_value

Overrides = str | Sequence[str] | Mapping[str, object]
_Edit = Callable[[dict[str, Node] | list[Node], str | int], None]


def apply_overrides(node: Node, overrides: Overrides, problems: list[Problem]) -> Node:
    """The recipe with the overrides applied in the order given; those that cannot be become problems."""
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            node = _assign(node, str(key), from_plain(value, PYTHON_CALL, problems, _split(str(key))), problems)
        return node
    for text in [overrides] if isinstance(overrides, str) else overrides:
        node = _apply_text(node, text, problems)
    return node


def _apply_text(node: Node, text: str, problems: list[Problem]) -> Node:
    key, equals, value = text.partition("=")
    if key.startswith("~") and not equals:
        return _delete(node, key[1:], problems)
    if equals and not key.startswith("~"):
        return _assign(node, key, read_value(value, COMMAND_LINE, _split(key), problems), problems)
    message = f'cannot read "{text}": write key=value to set, or ~key to delete'
    problems.append(Problem((), message, str(COMMAND_LINE)))
    return node


def _split(key: str) -> KeyPath:
    return tuple(key.strip().split("."))


def _assign(node: Node, key: str, value: Node, problems: list[Problem]) -> Node:
    path = _split(key)
    if path[-1] in CLASS_SYNONYMS:
        path = (*path[:-1], "class")
    if path == ("extends",):
        problems.append(Problem(path, "belongs in a file; name the other recipe instead", str(value.origin)))
        return node
    value = with_class_keys(value, problems, path)
    return _edit(node, path, value.origin, problems, lambda container, last: _put(container, last, value))


def _put(container: dict[str, Node] | list[Node], key: str | int, value: Node) -> None:
    container[key] = value  # type: ignore[index]


def _delete(node: Node, key: str, problems: list[Problem]) -> Node:
    def remove(container: dict[str, Node] | list[Node], last: str | int) -> None:
        if isinstance(container, dict) and last not in container:
            raise _CannotEdit("not set in this recipe, so there is nothing to delete", nearest(str(last), container))
        del container[last]  # type: ignore[arg-type]

    return _edit(node, _split(key), COMMAND_LINE, problems, remove)


class _CannotEdit(Exception):
    """Why an override has no place in the recipe, and the key that was probably meant."""

    def __init__(self, message: str, suggestion: str | None = None) -> None:
        super().__init__(message)
        self.suggestion = suggestion


def _edit(node: Node, path: KeyPath, origin: Origin, problems: list[Problem], edit: _Edit) -> Node:
    try:
        if "" in path:
            raise _CannotEdit("a key is words with single points between them, such as train.epochs")
        return _edited(node, path, (), origin, edit)
    except _CannotEdit as error:
        problems.append(Problem(path, str(error), str(origin), error.suggestion))
        return node


def _edited(node: Node, path: KeyPath, walked: KeyPath, origin: Origin, edit: _Edit) -> Node:
    """A copy of the node in which `edit` was applied to the container of the last key."""
    container = _container(node, walked)
    key = _index(container, path[0], walked) if isinstance(container, list) else path[0]
    if len(path) == 1:
        edit(container, key)
    else:
        has_child = isinstance(container, list) or key in container
        child = container[key] if has_child else Node({}, origin)  # type: ignore[index]
        _put(container, key, _edited(child, path[1:], (*walked, key), origin, edit))
    return Node(container, node.origin)


def _container(node: Node, walked: KeyPath) -> dict[str, Node] | list[Node]:
    if node.value is None:
        return {}
    if isinstance(node.value, dict | list):
        return node.value.copy()
    raise _CannotEdit(f"{dotted(walked)} is the single value {node.value!r} and has no keys of its own")


def _index(container: list[Node], part: str | int, walked: KeyPath) -> int:
    text = str(part)
    if text.isascii() and text.isdigit() and int(text) < len(container):
        return int(text)
    expected = f"0 to {len(container) - 1}" if container else "none, it is empty"
    raise _CannotEdit(f"{dotted(walked)} is a list; its entries are numbered {expected}")
