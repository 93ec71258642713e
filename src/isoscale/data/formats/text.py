"""Columns of numbers in text files: commas, tabs or blanks in between, with or without a line of names."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from isoscale.data.columns import Array
from isoscale.data.formats.mapped import MemoryColumn
from isoscale.errors import UserError

LINES_AT_ONCE = 100_000
COMMENT = "#"
DELIMITERS = (",", ";", "\t")

Lines = Iterator[tuple[int, str]]
"""Lines with their numbers, without empty ones and comments."""


def open_text(path: Path, sample_dims: int | None = None) -> MemoryColumn:
    """The rows of a text file, read whole."""
    parts = list(text_blocks(path))
    if not parts:
        raise UserError(f"{path} has no line of numbers")
    return MemoryColumn(str(path), np.concatenate(parts), sample_dims)


def text_names(path: Path) -> list[str] | None:
    """The names of the columns, where the first line, which may be a comment, has one for each."""
    first, delimiter = _first(path)
    if not _are_numbers(first):
        return first
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        words = _words(file.readline().strip().lstrip(COMMENT), delimiter)
    return None if _are_numbers(words) or len(words) != len(first) else words


def text_blocks(path: Path) -> Iterator[Array]:
    """The numbers, many lines at a time: (lines, columns)."""
    first, delimiter = _first(path)
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        lines = _lines(file)
        if not _are_numbers(first):
            next(lines, None)
        while block := list(islice(lines, LINES_AT_ONCE)):
            try:
                values = np.loadtxt([text for _, text in block], delimiter=delimiter, comments=None, ndmin=2)
            except ValueError:
                values = np.empty((0, 0))
            if values.shape[1] != len(first):
                raise UserError(_problem(path, block, delimiter, len(first)))
            yield values


def _lines(file: Iterator[str]) -> Lines:
    for number, line in enumerate(file, 1):
        text = line.partition(COMMENT)[0].strip()
        if text:
            yield number, text


def _first(path: Path) -> tuple[list[str], str | None]:
    """The words of the first line that is no comment, and what stands between them."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        _, text = next(_lines(file), (0, ""))
    delimiter = next((sign for sign in DELIMITERS if sign in text), None)
    return _words(text, delimiter), delimiter


def _words(text: str, delimiter: str | None) -> list[str]:
    return [word.strip().strip('"') for word in text.split(delimiter)]


def _are_numbers(words: list[str]) -> bool:
    try:
        return bool([float(word) for word in words])
    except ValueError:
        return False


def _problem(path: Path, block: list[tuple[int, str]], delimiter: str | None, num_columns: int) -> str:
    """Which line is wrong, and what with it."""
    for number, text in block:
        words = _words(text, delimiter)
        if len(words) != num_columns:
            return f"{path}, line {number}: {len(words)} columns found, {num_columns} expected"
        wrong = next((word for word in words if not _are_numbers([word])), None)
        if wrong is not None:
            return f'{path}, line {number}: "{wrong}" is not a number; write nan for a value that is missing'
    return f"{path}: cannot read lines {block[0][0]} to {block[-1][0]} as numbers"
