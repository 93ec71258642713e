"""Files of other programs as recipes: what such a file says, by tables of its keys, and the recipe made of it."""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from isoscale.errors import KeyPath

WIDTH = 118

SWITCH, WHOLE, NUMBER, TEXT, NAME = "true or false", "a whole number", "a number", "text", "a name"
LIST, WIDTHS, NUMBERS, NAMES = "a list", "a list of whole numbers", "a list of numbers", "a list of names"
MAPPING, NOTHING = "a mapping", "nothing"


def _is_list_of(kind: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(KINDS[kind](item) for item in value)


KINDS: dict[str, Callable[[Any], bool]] = {
    SWITCH: lambda value: isinstance(value, bool),
    WHOLE: lambda value: isinstance(value, int) and not isinstance(value, bool),
    NUMBER: lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    TEXT: lambda value: isinstance(value, str),
    NAME: lambda value: isinstance(value, str),
    LIST: lambda value: isinstance(value, list),
    WIDTHS: _is_list_of(WHOLE),
    NUMBERS: _is_list_of(NUMBER),
    NAMES: _is_list_of(TEXT),
    MAPPING: lambda value: isinstance(value, dict),
    NOTHING: lambda value: value is None,
}
"""What a value may be, in words, and how it is recognised."""


class PeerFile(NamedTuple):
    """A file of another program, as it was read."""

    source: str
    """The file as messages call it, and inside what it was found."""
    values: dict[str, Any]
    origins: Mapping[KeyPath, str] = {}
    """Where each value was written, where that is known: `input.json:12`."""
    folder: Path = Path()
    """What paths in the file may be relative to, besides the current folder."""
    world: int | None = None
    """The number of ranks of the first start; None for a recipe that is kept for later."""
    moved: Path | None = None
    """Where the data that it names is now, if not where it says."""
    weights: Path | None = None
    """The network that was saved with it, where there is one."""


class Tables(NamedTuple):
    """What is known of the keys of a program's files."""

    defaults: Mapping[str, Any]
    kinds: Mapping[str, tuple[str, ...]]
    """What a value may be, where its default does not say it."""
    kinds_of_defaults: tuple[str, ...]
    """What a default can be, the narrowest first."""
    aliases: Mapping[str, str]
    """Other names of keys, and earlier ones."""
    choices: Mapping[str, tuple[str, Mapping[str, Any]]] = {}
    """Keys of a recipe with the parameter that each follows from, and what each value of that is here."""
    same: Mapping[str, str] = {}
    """Keys of a recipe with the parameter that is the same thing."""
    if_any: Mapping[str, str] = {}
    """The same, for parameters that count only where they are not zero, empty or nothing."""


class Said:
    """What a file says, key by key: under present names, with defaults for what is not there."""

    def __init__(self, tables: Tables, given: Mapping[str, Any]) -> None:
        """The values of a file by the names that it has for its keys, such as `training.stop_batch`."""
        self._tables = tables
        self._names = {tables.aliases.get(name, name): name for name in given}
        self._values = {key: given[name] for key, name in self._names.items()}

    def __getitem__(self, key: str) -> Any:
        """The value of a key; where the file has none, the program's default."""
        return self._values[key] if key in self._values else self._tables.defaults.get(key)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def name(self, key: str) -> str:
        """What the file calls a key."""
        return self._names.get(key, key)

    def origin(self, key: str) -> str:
        """What a recipe says about where a value comes from."""
        return self.name(key)

    def expected(self, key: str, value: Any) -> str:
        """What a value should have been, in words; empty where it is right."""
        default, known = self._tables.defaults.get(key), self._tables.kinds_of_defaults
        kinds = self._tables.kinds.get(key) or next((kind,) for kind in known if KINDS[kind](default))
        return "" if any(KINDS[kind](value) for kind in kinds) else " or ".join(kinds)


class Remark(NamedTuple):
    """What there is to know about a parameter."""

    parameter: str
    text: str

    def __str__(self) -> str:
        return f"{self.parameter}: {self.text}"


@dataclass
class Imported:
    """The recipe of a file: its values, where each comes from, and what it does not hold."""

    source: str
    """The file, in words."""
    weights: Path | None = None
    """The network that was saved with it, where there is one."""
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

    def heading(self) -> str:
        """What stands above the recipe, as comments: where it is from, and what is left to do."""
        lines = [f"From {self.source}. Behind each value stands the parameter that it comes from."]
        if self.by_hand:
            wrapped = (textwrap.wrap(str(remark), WIDTH, initial_indent="- ", subsequent_indent="  ",
                                     break_on_hyphens=False) for remark in self.by_hand)  # fmt: skip
            lines += ["", "To do by hand:", *(line for each in wrapped for line in each)]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _below(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in entries:
        yield (*path, key)
        yield from _below(child, (*path, key))


class Translation:
    """Takes keys out of a file, section by section of the recipe."""

    def __init__(self, said: Said, imported: Imported) -> None:
        """What the file says, and the recipe to be filled."""
        self._said, self._imported = said, imported

    def put_by_tables(self, tables: Tables) -> None:
        """Set all keys that a table says something about."""
        for key, (parameter, values) in tables.choices.items():
            self._put(key, parameter, values[self._only(parameter, *values)])
        for key, parameter in {**tables.same, **tables.if_any}.items():
            if key in tables.same or self._said[parameter]:
                self._put(key, parameter)

    def _only(self, parameter: str, *known: Any) -> Any:
        """The value of a parameter, which must be one of those that are known here."""
        raise NotImplementedError

    def _put(self, key: str, parameter: str, *value: Any, words: str = "") -> None:
        """Set a key to what a parameter says, or to another value that comes from it, with `words` on how."""
        given = self._said[parameter]
        self._imported.put(key, value[0] if value else given, self._said.origin(parameter) + words)

    def _note(self, parameter: str, text: str) -> None:
        self._imported.needless.append(Remark(parameter, text))

    def _by_hand(self, parameter: str, text: str) -> None:
        self._imported.remark_by_hand(self._said.name(parameter), text)
