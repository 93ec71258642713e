"""Arrays as NumPy writes them: `.npy` (a short header, then the array), `.npz` (several by name) and raw bytes."""

import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, cast

import numpy as np

from isoscale.data.columns import Column
from isoscale.data.formats.checks import check_length, check_numbers, num_values
from isoscale.data.formats.mapped import MappedColumn, MemoryColumn
from isoscale.errors import UserError

_SUFFIX = ".npy"
_LOCAL_HEADER = 30
"""Bytes before the name of a member; the lengths of the name and of what follows it are in the last four."""


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


def npz_names(path: Path) -> list[str]:
    """The names of the arrays."""
    with _opened(path) as archive:
        return [name.removesuffix(_SUFFIX) for name in archive.namelist()]


def open_npz(path: Path, dataset: str, sample_dims: int | None = None) -> Column:
    """The rows of one array of a `.npz` file: read whole if it is compressed, else never loaded."""
    name = f"{path} ({dataset})"
    with _opened(path) as archive:
        member = archive.getinfo(dataset + _SUFFIX)
        try:
            if member.compress_type == zipfile.ZIP_STORED:
                return _stored(path, name, member, sample_dims)
            with archive.open(member) as file:
                read_header(cast(BinaryIO, file), name)
            with archive.open(member) as file:
                return MemoryColumn(name, np.lib.format.read_array(cast(BinaryIO, file)), sample_dims)
        except (EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise UserError(f"{name} is truncated or damaged: {error}") from None


def _stored(path: Path, name: str, member: zipfile.ZipInfo, sample_dims: int | None) -> MappedColumn:
    with path.open("rb") as file:
        file.seek(member.header_offset)
        lengths = file.read(_LOCAL_HEADER)[26:]
        start = member.header_offset + _LOCAL_HEADER + sum(np.frombuffer(lengths, "<u2").tolist())
        file.seek(start)
        shape, dtype = read_header(file, name)
        offset = file.tell()
    check_length(name, member.file_size, offset - start + num_values(name, shape, dtype.itemsize))
    return MappedColumn(path, name, dtype, shape, offset, sample_dims)


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise UserError(f"{path} is not a complete .npz file: {error}") from None


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
