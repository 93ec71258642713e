"""What an input file of DeePMD-kit says, key by key."""

from collections.abc import Iterator
from typing import Any

from isoscale.recipe.formats.tree import Node, plain
from isoscale.recipe.importing.deepmd_words import (
    ALIASES,
    DEFAULTS,
    KINDS,
    NAMES,
    NEEDLESS,
    NESTED,
    NOTHING,
    NUMBER,
    NUMBERS,
    ONLY,
    SWITCH,
    TEXT,
    WHOLE,
    WIDTHS,
    WITHOUT_MEANING,
)
from isoscale.recipe.problems import Problem, nearest
from isoscale.recipe.wording import MISSING_KEY, UNKNOWN_KEY, found

COMMENT = "_"
"""How keys begin that DeePMD-kit does not read."""
OF_THE_PEER = "default of DeePMD-kit"
"""The origin of what the file does not say."""


class Said:
    """The keys of a file with their values; what cannot be honoured here becomes a problem."""

    def __init__(self, node: Node, problems: list[Problem]) -> None:
        """The whole file, in which every key is looked at once."""
        self._problems = problems
        self._nodes: dict[str, Node] = {}
        self._names: dict[str, str] = {}
        for name, child in self._keys(node, ""):
            self._take(name, child)
        for key in list(self._nodes):
            self._check(key)

    def _keys(self, node: Node, section: str) -> Iterator[tuple[str, Node]]:
        for key, child in node.value.items():
            name = f"{section}.{key}".lstrip(".")
            if key.startswith(COMMENT) or (name in NESTED and child.value is None):
                continue
            if name in NESTED and isinstance(child.value, dict):
                yield from self._keys(child, name)
            elif name in NESTED:
                message = f"expected a section of keys and values, found {found(plain(child))}"
                self._problems.append(Problem((name,), message, str(child.origin)))
            else:
                yield name, child

    def _take(self, name: str, child: Node) -> None:
        key = ALIASES.get(name, name)
        before = self._names.get(key)
        self._nodes[key], self._names[key] = child, name
        if before is not None:
            self.wrong(key, f"another name of {before}, which is said as well; keep one of them")

    def _check(self, key: str) -> None:
        value = plain(self._nodes[key])
        if key in ONLY:
            accepted, instead = ONLY[key]
            if value not in accepted:
                self.wrong(key, f"{found(value)} is not supported here; {instead.format(key=self._names[key])}")
        elif key in DEFAULTS:
            kinds = KINDS.get(key) or (_kind_of(DEFAULTS[key]),)
            if not any(_is(kind, value) for kind in kinds):
                self.wrong(key, f"expected {' or '.join(kinds)}, found {found(value)}")
                del self._nodes[key]
        elif key not in NEEDLESS and not key.startswith(WITHOUT_MEANING):
            self._problems.append(Problem((key,), UNKNOWN_KEY, str(self._nodes[key].origin), _meant(key)))

    def __getitem__(self, key: str) -> Any:
        """The value of a key, where the file does not say it that of DeePMD-kit."""
        return plain(self._nodes[key]) if key in self._nodes else DEFAULTS.get(key)

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def needed(self, key: str) -> Any:
        """The value of a key that must be there."""
        if self[key] is None and key not in self._names:
            self.wrong(key, MISSING_KEY)
        return self[key]

    def is_wrong(self, key: str) -> bool:
        """Whether the file says a key with a value that it cannot have."""
        return key in self._names and key not in self._nodes

    def has_section(self, section: str) -> bool:
        """Whether the file says anything in a section."""
        return any(key.startswith(f"{section}.") for key in self._nodes)

    def origin(self, key: str) -> str:
        """Where the value of a key comes from: `input.json: training.numb_steps`."""
        where = self._nodes[key].origin.source if key in self._nodes else OF_THE_PEER
        return f"{where}: {self._names.get(key, key)}"

    def wrong(self, key: str, message: str, node: Node | None = None) -> None:
        """Write down a problem with a key."""
        place = node or self._nodes.get(key)
        self._problems.append(Problem((self._names.get(key, key),), message, str(place.origin) if place else None))


def _kind_of(default: Any) -> str:
    return next(kind for kind in (SWITCH, WHOLE, NUMBER, TEXT, WIDTHS) if _is(kind, default))


def _is(kind: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        NOTHING: value is None,
        SWITCH: isinstance(value, bool),
        WHOLE: is_number and isinstance(value, int),
        NUMBER: is_number,
        TEXT: isinstance(value, str),
        WIDTHS: isinstance(value, list) and all(_is(WHOLE, item) for item in value),
        NUMBERS: isinstance(value, list) and all(_is(NUMBER, item) for item in value),
        NAMES: isinstance(value, list) and all(isinstance(item, str) for item in value),
    }[kind]


def _meant(key: str) -> str | None:
    """The known key that was probably meant: one of the same section, or of the same name in another."""
    section, _, name = key.rpartition(".")
    known = [*DEFAULTS, *ALIASES, *ONLY, *NEEDLESS, *NESTED]
    beside = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    elsewhere = [other for other in DEFAULTS if other.rpartition(".")[2] == name]
    close = nearest(name, beside)
    return beside[close] if close else elsewhere[0] if len(elsewhere) == 1 else None
