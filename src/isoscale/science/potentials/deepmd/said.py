"""What an input file of DeePMD-kit says, key by key."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from isoscale.errors import MISSING_KEY, UNKNOWN_KEY, Problem, found, nearest
from isoscale.science import importing
from isoscale.science.importing import PeerFile
from isoscale.science.potentials.deepmd.tables import (
    ALIASES,
    DEFAULTS,
    NEEDLESS,
    NESTED,
    ONLY,
    TABLES,
    WITHOUT_MEANING,
)

COMMENT = "_"
"""How keys begin that DeePMD-kit does not read."""
OF_THE_PEER = "default of DeePMD-kit"
"""The origin of what the file does not say."""


class Said(importing.Said):
    """The keys of a file with their values; what cannot be honoured here becomes a problem."""

    def __init__(self, file: PeerFile, problems: list[Problem]) -> None:
        """The whole file, in which every key is looked at once."""
        self._file, self._problems = file, problems
        self._places: dict[str, str] = {}
        """Where each key was written, under its present name."""
        given: dict[str, Any] = {}
        for path, value in self._keys(file.values, ()):
            name = ".".join(path)
            key = ALIASES.get(name, name)
            before = next((other for other in given if ALIASES.get(other, other) == key), None)
            self._places[key], given[name] = file.origins[path], value
            if before is not None:
                message = f"another name of {before}, which is said as well; keep one of them"
                problems.append(Problem((name,), message, self._places[key]))
        super().__init__(TABLES, given)
        for key in list(self._values):
            self._check(key)

    def _keys(self, section: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for key, value in section.items():
            here = (*path, key)
            name = ".".join(here)
            if key.startswith(COMMENT) or (name in NESTED and value is None):
                continue
            if name in NESTED and isinstance(value, Mapping):
                yield from self._keys(value, here)
            elif name in NESTED:
                message = f"expected a section of keys and values, found {found(value)}"
                self._problems.append(Problem((name,), message, self._file.origins[here]))
            else:
                yield here, value

    def _check(self, key: str) -> None:
        value = self._values[key]
        if key in ONLY:
            accepted, instead = ONLY[key]
            if value not in accepted:
                self.wrong(key, f"{found(value)} is not supported here; {instead.format(key=self._names[key])}")
        elif key in DEFAULTS:
            expected = self.expected(key, value)
            if expected:
                self.wrong(key, f"expected {expected}, found {found(value)}")
                del self._values[key]
        elif key not in NEEDLESS and not key.startswith(WITHOUT_MEANING):
            self._problems.append(Problem((key,), UNKNOWN_KEY, self._places[key], _meant(key)))

    def needed(self, key: str) -> Any:
        """The value of a key that must be there."""
        if self[key] is None and key not in self._names:
            self.wrong(key, MISSING_KEY)
        return self[key]

    def is_wrong(self, key: str) -> bool:
        """Whether the file says a key with a value that it cannot have."""
        return key in self._names and key not in self

    def has_section(self, section: str) -> bool:
        """Whether the file says anything in a section."""
        return any(key.startswith(f"{section}.") for key in self._values)

    def origin(self, key: str) -> str:
        """Where the value of a key comes from: `input.json: training.numb_steps`."""
        where = re.sub(r":\d+$", "", self._places[key]) if key in self else OF_THE_PEER
        return f"{where}: {self.name(key)}"

    def wrong(self, key: str, message: str) -> None:
        """Write down a problem with a key."""
        self._problems.append(Problem((self.name(key),), message, self._places.get(key)))


def _meant(key: str) -> str | None:
    """The known key that was probably meant: one of the same section, or of the same name in another."""
    section, _, name = key.rpartition(".")
    known = [*DEFAULTS, *ALIASES, *ONLY, *NEEDLESS, *NESTED]
    beside = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    elsewhere = [other for other in DEFAULTS if other.rpartition(".")[2] == name]
    close = nearest(name, beside)
    return beside[close] if close else elsewhere[0] if len(elsewhere) == 1 else None
