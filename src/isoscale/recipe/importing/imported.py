"""A recipe that is made from another program's file: its values, where each comes from, and what it does not hold."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from isoscale.recipe.formats.tree import Node, Origin, children
from isoscale.recipe.formats.yaml_writer import write_yaml
from isoscale.recipe.problems import KeyPath

WIDTH = 118


class Remark(NamedTuple):
    """What there is to know about a parameter."""

    parameter: str
    text: str

    def __str__(self) -> str:
        return f"{self.parameter}: {self.text}"


@dataclass
class Imported:
    """The recipe of a parameter file."""

    source: str
    """The file, in words."""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    needless: list[Remark] = field(default_factory=list)
    """What the file asks for and not needed in a recipe."""
    by_hand: list[Remark] = field(default_factory=list)
    """What could not be translated, each with what to do."""

    def put(self, key: str, value: Any, parameter: str) -> None:
        """Set a key, such as `train.epochs`, that comes from a parameter of the file."""
        *sections, last = key.split(".")
        self._section(sections)[last] = value
        self._remember(value, (*sections, last), parameter)

    def append(self, key: str, item: Any, parameter: str) -> None:
        """Put something at the end of a list, such as `data.transforms`."""
        *sections, last = key.split(".")
        items = self._section(sections).setdefault(last, [])
        items.append(item)
        self._remember(item, (*sections, last, len(items) - 1), parameter)

    def _section(self, names: list[str]) -> dict[str, Any]:
        inside = self.values
        for name in names:
            inside = inside.setdefault(name, {})
        return inside

    def _remember(self, value: Any, path: KeyPath, parameter: str) -> None:
        self.origins |= dict.fromkeys((path, *_below(value, path)), parameter)

    def remark_by_hand(self, parameter: str, text: str) -> None:
        """Say what to do about a parameter that could not be translated."""
        self.by_hand.append(Remark(parameter, text))

    def to_node(self) -> Node:
        """The recipe as if it had been read from a file."""
        return _node(self.values, (), self.origins, Origin(self.source))

    def to_yaml(self) -> str:
        """The recipe, with the parameter that it comes from behind each value, and what is left to do at the top."""
        lines = [f"From {self.source}. Behind each value stands the parameter that it comes from."]
        if self.by_hand:
            lines += ["", "To do by hand:", *(line for remark in self.by_hand for line in _wrapped(str(remark)))]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + write_yaml(self.values, self.origins)


def _node(value: Any, path: KeyPath, origins: Mapping[KeyPath, str], around: Origin) -> Node:
    here = Origin(origins[path]) if path in origins else around
    if isinstance(value, dict):
        return Node({key: _node(child, (*path, key), origins, here) for key, child in value.items()}, here)
    if isinstance(value, list):
        return Node([_node(child, (*path, number), origins, here) for number, child in enumerate(value)], here)
    return Node(value, here)


def _below(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    for key, child in children(value):
        yield (*path, key)
        yield from _below(child, (*path, key))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
