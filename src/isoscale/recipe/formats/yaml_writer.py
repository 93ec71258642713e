"""Write a resolved recipe as YAML, each value followed by its origin, so that it reads back as the same values."""

import math
import re
from collections.abc import Mapping
from typing import Any

from isoscale.errors import KeyPath
from isoscale.recipe.formats.tree import children
from isoscale.recipe.formats.yaml_reader import resolves_to_text
from isoscale.recipe.problems import DEFAULT

# Words joined by single spaces, with the signs that mean nothing to YAML in the middle of a plain scalar.
_PLAIN_TEXT = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*(?: [A-Za-z0-9_./+-]+)*")
_UNPRINTABLE = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")

_LINE = re.compile(r":(\d+)$")
_BEHIND = "  # "
"""What stands between a value and its origin."""


def write_yaml(values: Mapping[str, Any], origins: Mapping[KeyPath, str]) -> str:
    """The values as YAML in block style, each line of a value ending in its origin."""
    return "\n".join(_block(dict(values), (), origins)) + "\n"


def read_origins(text: str, origins: Mapping[KeyPath, str]) -> dict[KeyPath, str]:
    """The origins that a resolved recipe names behind its values; `origins` says at which line each value stands."""
    lines = text.splitlines()
    return {path: _behind(where, lines) for path, where in origins.items()}


def _behind(where: str, lines: list[str]) -> str:
    line = _LINE.search(where)
    return lines[int(line[1]) - 1].rpartition(_BEHIND)[2].strip() if line else where


def _block(value: Any, path: KeyPath, origins: Mapping[KeyPath, str]) -> list[str]:
    """The lines of a mapping or list that has entries."""
    lines: list[str] = []
    for key, child in children(value):
        here = (*path, key)
        inline = _inline(child, here, origins)
        if isinstance(value, list):
            first, *rest = [inline] if inline else _block(child, here, origins)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        elif inline:
            lines.append(f"{_text(str(key))}: {inline}")
        else:
            lines += [f"{_text(str(key))}:", *(f"  {line}" for line in _block(child, here, origins))]
    return lines or ["{}"]


def _inline(value: Any, path: KeyPath, origins: Mapping[KeyPath, str]) -> str | None:
    """The value and its origin on one line: scalars, empty containers and lists of scalars from one place."""
    entries = children(value)
    sources = {origins.get((*path, key), DEFAULT) for key, _ in entries} or {origins.get(path, DEFAULT)}
    is_nested = isinstance(value, dict) or any(isinstance(child, dict | list) for _, child in entries)
    if entries and (is_nested or len(sources) > 1):
        return None
    text = f"[{', '.join(_scalar(item) for item in value)}]" if isinstance(value, list) else _scalar(value)
    return f"{text}{_BEHIND}{_UNPRINTABLE.sub('?', sources.pop())}"


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else repr(value).replace("inf", ".inf").replace("nan", ".nan")
    return _text(value) if isinstance(value, str) else str(value) if not isinstance(value, dict) else "{}"


def _text(text: str) -> str:
    if _PLAIN_TEXT.fullmatch(text) and resolves_to_text(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _UNPRINTABLE.sub(lambda match: _escape(match[0]), escaped) + '"'


def _escape(character: str) -> str:
    code = ord(character)
    if code > 0xFFFF:
        return f"\\U{code:08X}"
    return f"\\u{code:04X}"
