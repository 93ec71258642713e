"""`.npy`, the file of `numpy.save`: one array behind a short header."""

import os
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np

from isoscale.data.formats.checks import check_length, check_numbers, num_values
from isoscale.data.formats.mapped import MappedColumn
from isoscale.errors import UserError


def open_npy(path: Path, sample_dims: int | None = None) -> MappedColumn:
    """The rows of a `.npy` file."""
    with path.open("rb") as file:
        shape, dtype = read_header(file, str(path))
        offset = file.tell()
        check_length(path, os.fstat(file.fileno()).st_size, offset + num_values(str(path), shape, dtype.itemsize))
    return MappedColumn(path, str(path), dtype, shape, offset, sample_dims)


def read_header(file: BinaryIO, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array that follows."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
    except (ValueError, SyntaxError, TokenError) as error:  # a damaged header is no Python literal
        raise UserError(f"{name} is not a complete .npy file: {str(error).splitlines()[0]}") from None
    check_numbers(name, dtype)
    if is_fortran and len(shape) > 1:
        raise UserError(
            f"{name} is stored column by column (Fortran order), so that no row lies in one place; save it again: "
            f"numpy.save({name!r}, numpy.ascontiguousarray(numpy.load({name!r})))"
        )
    return shape, dtype
