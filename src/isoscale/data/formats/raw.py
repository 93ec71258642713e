"""Raw binary files: nothing but numbers, so that the reader has to say what they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isoscale.data.formats.checks import num_values
from isoscale.data.formats.mapped import MappedColumn
from isoscale.errors import UserError


def open_raw(path: Path, dtype: np.dtype[Any] | None, shape: Sequence[int] | None) -> MappedColumn:
    """The rows of a raw file: samples of `shape` and `dtype`, one after the other."""
    if dtype is None or shape is None:
        raise UserError(f"{path} does not say what it holds: give dtype and the shape of a sample, such as "
                        "{path: …, dtype: float32, shape: [64, 64]}")  # fmt: skip
    row = num_values(str(path), shape, dtype.itemsize)
    found = path.stat().st_size
    if row == 0 or found % row:
        raise UserError(
            f"{path} has {found:,} bytes, which is not a whole number of samples: one of shape {tuple(shape)} and type "
            f"{dtype} has {row:,}"
        )
    return MappedColumn(path, str(path), dtype, (found // row, *shape), 0, None)
