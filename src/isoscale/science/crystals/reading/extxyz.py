"""Extended XYZ, read without ase: several times as fast, with the line in every complaint.

The dialect is that of ASE: what it writes is read alike, which a test holds us to.
"""

import gzip
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoscale.data.files import is_gzip
from isoscale.errors import UserError
from isoscale.science.crystals.reading.elements import NUMBERS
from isoscale.science.crystals.reading.found import NAMES_OF_SYSTEMS, Found, said_units
from isoscale.science.crystals.reading.structure import Structure

_PAIR = re.compile(r"""([^\s=]+)\s*=\s*("(?:[^"\\]|\\.)*"|'[^']*'|\{[^}]*\}|\[[^=]*\](?=\s|$)|\S+)""")
_WORD = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eEdD][-+]?\d+)?$|[-+]?(nan|inf|infinity)$", re.IGNORECASE)
_PLAIN = "species:S:1:pos:R:3"
_COLUMNS = {"pos": "positions", "species": "species", "Z": "numbers", "z": "numbers", "numbers": "numbers"}
_KINDS = "SRIL"


def read_extxyz(path: Path) -> Found:
    """All frames of a file."""
    units: dict[str, set[str]] = {}
    structures = [_structure(path, *frame, units) for frame in _frames(path)]
    return Found(str(path), structures, {target: sorted(said) for target, said in units.items()})


def _frames(path: Path) -> Iterator[tuple[int, int, str, list[str]]]:
    """The number, the first line, the comment and the lines of atoms of each frame."""
    opened = gzip.open if is_gzip(path) else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        lines = iter(file)
        number, at = 0, 0
        for line in lines:
            at += 1
            if not line.strip():  # empty lines at the end, or between frames
                continue
            try:
                count = int(line)
            except ValueError:
                raise UserError(
                    f"{path}, line {at}: expected the number of atoms of frame {number}, found {line.strip()[:40]!r}; "
                    "does the frame before it have more atoms than it says?"
                ) from None
            if count < 1:
                raise UserError(f"{path}, line {at}: frame {number} has {count} atoms; leave it out")
            comment = next(lines, None)
            atoms = [atom for _, atom in zip(range(count), lines, strict=False)] if comment is not None else []
            if len(atoms) < count or comment is None:
                raise UserError(
                    f"{path} is truncated: frame {number}, from line {at}, should have {count:,} atoms and has "
                    f"{len(atoms):,}; copy it again, or cut the file off before line {at}"
                )
            yield number, at, comment, atoms
            number, at = number + 1, at + 1 + count


def _structure(
    path: Path, number: int, line: int, comment: str, atoms: list[str], units: dict[str, set[str]]
) -> Structure:
    place = f"{path}, frame {number}"
    values = key_values(comment)
    lattice = values.pop("Lattice", None)
    if lattice is not None and np.size(lattice) != 9:
        raise UserError(f'{path}, line {line + 1}: Lattice="…" has {np.size(lattice)} numbers, expected 9')
    cell = np.zeros((3, 3)) if lattice is None else np.asarray(lattice, np.float64).reshape(3, 3)
    pbc = _pbc(values.pop("pbc", None), lattice is not None, f"{path}, line {line + 1}")
    columns = _columns(str(values.pop("Properties", _PLAIN)), atoms, path, line)
    if "positions" not in columns:
        raise UserError(f"{path}, line {line + 1}: Properties names no positions (pos:R:3)")
    numbers = columns.pop("numbers", None)
    species = columns.pop("species", None)
    if numbers is None and species is None:
        raise UserError(f"{path}, line {line + 1}: Properties names no elements (species:S:1 or Z:I:1)")
    elements = _elements(species, path, line) if numbers is None else numbers.astype(np.int64)
    positions = columns.pop("positions")
    for target, unit in said_units(values).items():
        units.setdefault(target, set()).add(unit)
    name = next((str(values[key]) for key in NAMES_OF_SYSTEMS if isinstance(values.get(key), str)), "")
    per_frame = {key: value for key, value in values.items() if isinstance(value, np.ndarray) and value.size}
    targets = {**{key: _as_ase(value) for key, value in per_frame.items()}, **columns}
    per_atom = frozenset(columns)
    return Structure(elements, positions.astype(np.float64), cell, pbc, targets, place, name, per_atom)


def _as_ase(value: NDArray[Any]) -> NDArray[Any]:
    """Nine numbers in a row are a matrix, column by column."""
    return value.reshape(3, 3).T if value.shape == (9,) else value


def key_values(comment: str) -> dict[str, Any]:
    """The pairs of a comment: arrays where they are numbers or truth values, else text; keys alone are true."""
    return {key: _value(text) for key, text in _PAIR.findall(comment)}


def _value(text: str) -> Any:
    if text[0] == "[":
        try:
            found = np.array(json.loads(text))
        except ValueError:  # numbers without quotes or commas, or uneven lists
            found = None
        if found is not None and found.dtype.kind in "biuf":
            return found
    inner = text[1:-1] if text[0] in "\"'{[" and len(text) > 1 else text
    words = inner.replace(",", " ").split()
    if words and all(word in ("T", "F", "True", "False", "true", "false") for word in words):
        found = np.array([word[0] in "Tt" for word in words])
    elif words and all(map(_WORD.match, words)):
        found = np.array([_number(word) for word in words])
    else:
        return inner
    return found if len(words) > 1 else found.reshape(())


def _number(word: str) -> int | float:
    if word.lstrip("+-").isdecimal() and len(word) < 19:
        return int(word)
    return float(word.lower().replace("d", "e"))


def _pbc(given: Any, has_cell: bool, where: str) -> NDArray[np.bool_]:
    if given is None:
        return np.full(3, has_cell)
    values = np.asarray(given)
    if values.dtype.kind not in "biu" or values.size not in (1, 3):
        raise UserError(f'{where}: pbc is {given!r}, expected pbc="T T T" or the like')
    return np.broadcast_to(values.astype(np.bool_).reshape(-1), (3,)).copy()


def _columns(properties: str, atoms: list[str], path: Path, line: int) -> dict[str, NDArray[Any]]:
    """Arrays of the atoms, by name."""
    words = properties.split(":")
    if len(words) % 3 or not words[0]:
        raise UserError(f"{path}, line {line + 1}: Properties={properties} is not made of name:kind:number")
    kinds = list(zip(words[0::3], words[1::3], words[2::3], strict=True))
    wrong = next((kind for _, kind, count in kinds if kind not in _KINDS or not count.isdecimal()), None)
    if wrong is not None:
        raise UserError(f"{path}, line {line + 1}: Properties={properties} has the kind {wrong!r}, expected S, R, I, L")
    width = sum(int(count) for *_, count in kinds)
    rows = [atom.split() for atom in atoms]
    short = next((at for at, row in enumerate(rows) if len(row) < width), None)
    if short is not None:
        raise UserError(
            f"{path}, line {line + 2 + short}: {len(rows[short])} values, expected {width} ({properties}); "
            "the file may be truncated or damaged"
        )
    found: dict[str, NDArray[Any]] = {}
    start = 0
    for name, kind, count in kinds:
        end = start + int(count)
        part = [row[start] for row in rows] if end - start == 1 else [row[start:end] for row in rows]
        start = end
        key = _COLUMNS.get(name, name)
        if kind == "S" and key != "species":
            continue
        found[key] = _array(part, kind, f"{path}, line {line + 2}, column {name}")
    return found


def _array(part: list[Any], kind: str, where: str) -> NDArray[Any]:
    if kind == "S":
        return np.array(part)
    if kind == "L":
        return np.char.startswith(np.char.upper(np.array(part)), "T").astype(np.int64)
    try:
        if kind == "R" and part and isinstance(part[0], list):  # by way of float, twice as fast as numpy reads text
            return np.fromiter(map(float, chain.from_iterable(part)), np.float64).reshape(len(part), -1)
        return np.array(part, dtype=np.float64 if kind == "R" else np.int64)
    except ValueError as error:
        raise UserError(f"{where} or one of the next: {error}") from None


def _elements(species: Any, path: Path, line: int) -> NDArray[np.int64]:
    try:
        return np.array([NUMBERS[symbol] for symbol in species], np.int64)
    except KeyError:
        return np.array([_element(symbol, f"{path}, line {line + 2 + at}") for at, symbol in enumerate(species)])


def _element(symbol: str, where: str) -> int:
    plain = symbol.capitalize()
    if plain not in NUMBERS and not symbol.isdecimal():
        raise UserError(f'{where}: there is no element "{symbol}"')
    return int(symbol) if symbol.isdecimal() else NUMBERS[plain]
