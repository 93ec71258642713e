"""Arrays of files that have to be read whole: text, and what is compressed."""

import numpy as np

from isoscale.data.columns import Array, Rows
from isoscale.data.formats.checks import check_numbers, split_shape


class MemoryColumn:
    """Rows of an array that was read from a file."""

    reads_in_parallel = True

    def __init__(self, name: str, array: Array, sample_dims: int | None = None) -> None:
        """The array, and where it came from."""
        check_numbers(name, array.dtype)
        self.name = name
        self.num_rows, self.row_shape = split_shape(name, array.shape, sample_dims)
        self.dtype = array.dtype.newbyteorder("=")
        self._array = np.ascontiguousarray(array, self.dtype).reshape(self.num_rows, *self.row_shape)

    def take(self, rows: Rows) -> Array:
        """The rows asked for."""
        return np.take(self._array, rows, axis=0)
