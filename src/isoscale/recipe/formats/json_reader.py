"""Read JSON with the line of every key, which the standard parser does not tell.

JSON is nearly YAML, but not to the YAML parser: tabs between tokens, a colon on the next line and escaped surrogate
pairs are read wrongly there.
"""

import bisect
import json
import re
from typing import Any

from isoscale.errors import KeyPath, Problem
from isoscale.recipe.formats.tree import Node, Origin
from isoscale.recipe.formats.yaml_reader import to_float
from isoscale.recipe.problems import RecipeError

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+', re.DOTALL)


def read_json(text: str, source: str, problems: list[Problem]) -> Node:
    """Read a JSON document; a syntax error is raised, a key written twice becomes a problem."""
    try:
        _scalar(text)
        return _Walker(text, source, problems).value(())
    except json.JSONDecodeError as error:
        message = f"not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}"
        raise RecipeError([Problem((), message, f"{source}:{error.lineno}")]) from None
    except ValueError as error:
        raise RecipeError([Problem((), f"a number that cannot be read: {error}", source)]) from None
    except RecursionError:
        raise RecipeError([Problem((), "nested too deeply to be a recipe", source)]) from None


def _scalar(text: str) -> Any:
    return json.loads(text, strict=False, parse_float=to_float)


class _Walker:
    """Walks the tokens of a text that is known to be valid JSON."""

    def __init__(self, text: str, source: str, problems: list[Problem]) -> None:
        self._tokens = list(_TOKEN.finditer(text))
        self._line_ends = [match.start() for match in re.finditer("\n", text)]
        self._source = source
        self._problems = problems
        self._next = 0

    def value(self, path: KeyPath, origin: Origin | None = None) -> Node:
        here = origin or self._origin()
        token = self._take()
        if token == "{":
            return Node(self._entries(path), here)
        if token != "[":
            return Node(_scalar(token), here)
        items: list[Node] = []
        while not self._closes("]"):
            items.append(self.value((*path, len(items))))
        return Node(items, here)

    def _entries(self, path: KeyPath) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not self._closes("}"):
            origin, key = self._origin(), _scalar(self._take())
            self._take()  # the colon
            if key in entries:
                message = f"written twice, first at {entries[key].origin}"
                self._problems.append(Problem((*path, key), message, str(origin)))
            entries[key] = self.value((*path, key), origin)
        return entries

    def _closes(self, bracket: str) -> bool:
        if self._tokens[self._next][0] == ",":
            self._next += 1
        if self._tokens[self._next][0] != bracket:
            return False
        self._next += 1
        return True

    def _take(self) -> str:
        self._next += 1
        return self._tokens[self._next - 1][0]

    def _origin(self) -> Origin:
        start = self._tokens[self._next].start()
        return Origin(self._source, bisect.bisect_left(self._line_ends, start) + 1)
