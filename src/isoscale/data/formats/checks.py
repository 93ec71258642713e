"""What every format refuses: impossible sizes, what is no number, files cut short, libraries that are missing."""

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isoscale.errors import UserError

LARGEST = 2**63 - 1


def num_values(name: str, shape: Sequence[int], itemsize: int = 1) -> int:
    """How many values (or bytes, for an item size) a shape stands for; one that 64 bits cannot count is refused."""
    count = math.prod(shape) * itemsize
    if min(shape, default=0) < 0 or count > LARGEST:
        raise UserError(f"{name} claims the shape {tuple(shape)}, which no file can hold; it is damaged")
    return count


def check_numbers(name: str, dtype: np.dtype[Any]) -> None:
    """Refuse what a tensor cannot hold: objects, text, records."""
    if dtype.kind not in "biufc":
        what = "Python objects" if dtype.kind == "O" else "records" if dtype.names else "text or dates"
        raise UserError(f"{name} holds {what} ({dtype}), expected numbers; save it as numbers, such as float32")


def number_type(text: str, where: str) -> np.dtype[Any]:
    """The type that a user names."""
    try:
        dtype = np.dtype(text)
    except TypeError:
        raise UserError(f'{where}: there is no type "{text}"; write float32 or the like') from None
    check_numbers(where, dtype)
    return dtype


def check_has_rows(name: str, shape: Sequence[int]) -> None:
    """Refuse an array without dimensions."""
    if not shape:
        raise UserError(f"{name} is one value, not an array of rows")


def check_length(path: Path | str, found: int, expected: int) -> None:
    """Refuse a file that is shorter or longer than what it says of itself."""
    if found != expected:
        problem = "is truncated" if found < expected else "is too long"
        raise UserError(f"{path} {problem}: {found:,} bytes found, {expected:,} expected")


def check_not_cut(name: str, found: int, needed: int) -> None:
    """Refuse to go on with a file that became shorter after it was opened."""
    if found < needed:
        raise UserError(
            f"{name} was cut short while it was in use: {found:,} bytes found, {needed:,} expected; restore it from a "
            "copy, and start the same command again"
        )


def split_shape(name: str, shape: Sequence[int], sample_dims: int | None) -> tuple[int, tuple[int, ...]]:
    """The number of rows and the shape of one, where the last `sample_dims` dimensions are a sample."""
    check_has_rows(name, shape)
    num_values(name, shape)
    kept = len(shape) - 1 if sample_dims is None else sample_dims
    if not 0 <= kept <= len(shape):
        raise UserError(f"{name} has the shape {tuple(shape)}, of which no sample takes the last {kept} dimensions")
    first = len(shape) - kept
    return math.prod(shape[:first]), tuple(shape[first:])


def library(name: str, path: object) -> Any:
    """The library that reads `path`, or what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"reading {path} needs {name}: pip install 'isoscale[{name}]' ({error})") from None
