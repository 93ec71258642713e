"""Columns seen another way: some of the values of a row, another type, some of the rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from isoscale.data.columns import Array, Column, Joined, Rows, fill, rows_at_once
from isoscale.data.formats.checks import num_values, split_shape
from isoscale.errors import UserError

Cut = slice | list[int]


class Flattened:
    """Rows that are parts of larger ones: of a grid (18, 18, 27, 94), say, every point."""

    def __init__(self, column: Column, sample_dims: int) -> None:
        """The last `sample_dims` dimensions of the stored array are a row."""
        self.name, self.dtype = column.name, column.dtype
        self.num_rows, self.row_shape = split_shape(column.name, (column.num_rows, *column.row_shape), sample_dims)
        self._column = column
        self._inside = self.num_rows // max(1, column.num_rows)
        """Rows in one stored row; none where all that is stored is one row."""

    def take(self, rows: Rows) -> Array:
        """The rows asked for; each stored row that holds some of them is read whole, once."""
        if not self._inside:
            return self._column.take(np.arange(self._column.num_rows)).reshape(1, *self.row_shape)[rows]
        stored, which = np.unique(rows // self._inside, return_inverse=True)
        parts = self._column.take(stored).reshape(len(stored), self._inside, *self.row_shape)
        return parts[which, rows % self._inside]


class View:
    """The same rows with fewer values in each, or of another type."""

    def __init__(self, column: Column, cut: Cut, dtype: np.dtype[Any] | None) -> None:
        """`cut` picks from the last dimension of a row."""
        self.name, self.num_rows = column.name, column.num_rows
        self.dtype = dtype or column.dtype
        self._column, self._cut = column, cut
        self.row_shape = np.empty((0, *column.row_shape))[..., cut].shape[1:] if column.row_shape else ()
        self.reads_in_parallel = bool(getattr(column, "reads_in_parallel", False))

    def take(self, rows: Rows) -> Array:
        """The rows asked for; picking and converting happen where each piece is read."""
        size = rows_at_once(self._column) if self.reads_in_parallel else len(rows)
        return fill(np.empty((len(rows), *self.row_shape), self.dtype), rows, size, self._read)

    def _read(self, rows: Rows) -> Array:
        found = self._column.take(rows)
        return found[..., self._cut] if self.row_shape else found


class SomeRows:
    """Some rows of a column, by a range of them."""

    def __init__(self, column: Column, rows: range) -> None:
        """The rows in that range."""
        self.name, self.row_shape, self.dtype = column.name, column.row_shape, column.dtype
        self.num_rows = len(rows)
        self._column, self._rows = column, rows

    def stored(self, rows: Rows) -> Rows:
        """The places of rows in the whole column."""
        return self._rows.start + self._rows.step * rows

    def take(self, rows: Rows) -> Array:
        """The rows asked for."""
        return self._column.take(self.stored(rows))


class Without:
    """All rows but a few; only those few are kept in memory."""

    def __init__(self, column: Column, left_out: Rows) -> None:
        """All rows but those in `left_out`, which are in order."""
        self.name, self.row_shape, self.dtype = column.name, column.row_shape, column.dtype
        self.num_rows = column.num_rows - len(left_out)
        self._column = column
        self._kept_before = left_out - np.arange(len(left_out))
        """For each row that is left out, how many stay before it."""

    def stored(self, rows: Rows) -> Rows:
        """The places of rows in the whole column."""
        return rows + np.searchsorted(self._kept_before, rows, "right")

    def take(self, rows: Rows) -> Array:
        """The rows asked for."""
        return self._column.take(self.stored(rows))


def files_of(column: Column) -> list[Column]:
    """The columns of single files that a column is made of."""
    inner = column._column if isinstance(column, SomeRows | Without) else column
    return list(inner.parts) if isinstance(inner, Joined) else [inner]


def place(column: Column, row: int) -> tuple[str, int]:
    """The file that a row is in, and its number there."""
    if isinstance(column, SomeRows | Without):
        return place(column._column, int(column.stored(np.array([row]))[0]))
    if isinstance(column, Joined):
        for part in column.parts:
            if row < part.num_rows:
                return place(part, row)
            row -= part.num_rows
    return column.name, row


def read_cut(text: str | Sequence[int], length: int, what: str) -> Cut:
    """`"3:94"` or `[0, 5]` as an index into `length` values; one that asks for more than there are is refused."""
    if not isinstance(text, str):
        wrong = [index for index in text if not -length <= index < length]
        if wrong:
            raise UserError(f"{what} asks for number {wrong[0]}, but there are 0 to {length - 1}")
        return list(text)
    found = read_range(text, length, what)
    return slice(found.start, found.stop, found.step)


def read_range(text: str, length: int, what: str) -> range:
    """`"3:94"` as a range below `length`, as Python would cut, but nothing is cut short silently."""
    try:
        parts = [int(part) if part.strip() else None for part in text.split(":")]
        cut = slice(*parts) if 2 <= len(parts) <= 3 else None
    except ValueError:
        cut = None
    if cut is None or (cut.step or 1) < 1:
        raise UserError(f'{what} is "{text}"; expected a range such as "3:", ":10" or "3:94"')
    beyond = next((edge for edge in (cut.start, cut.stop) if edge is not None and abs(edge) > length), None)
    found = range(*cut.indices(length))
    if beyond is not None or not found:
        raise UserError(f'{what} is "{text}", but there are {length:,}: 0 to {length - 1:,}')
    return found


def check_fits(column: Column) -> None:
    """Refuse a column whose bytes 64 bits cannot count."""
    num_values(column.name, (column.num_rows, *column.row_shape), column.dtype.itemsize)
