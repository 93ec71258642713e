"""`.npz`, the file of `numpy.savez`: arrays by name, of which those that are not compressed are never loaded."""

import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from isoscale.data.columns import Column
from isoscale.data.formats.checks import check_length, num_values
from isoscale.data.formats.mapped import MappedColumn
from isoscale.data.formats.memory import MemoryColumn
from isoscale.data.formats.npy import read_header
from isoscale.errors import UserError

_SUFFIX = ".npy"
_LOCAL_HEADER = 30
"""Bytes before the name of a member; the lengths of the name and of what follows it are in the last four."""


def npz_names(path: Path) -> list[str]:
    """The names of the arrays."""
    with _opened(path) as archive:
        return [name.removesuffix(_SUFFIX) for name in archive.namelist()]


def open_npz(path: Path, dataset: str, sample_dims: int | None = None) -> Column:
    """The rows of one array, read whole if it is compressed."""
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
