"""idx, the files of MNIST: arrays of unsigned bytes, compressed by gzip or not."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isoscale.data.files import GZIP_MAGIC
from isoscale.data.formats.checks import check_length
from isoscale.data.formats.mapped import MemoryColumn
from isoscale.errors import UserError

Bytes = NDArray[np.uint8]

UNSIGNED_BYTE = 0x08


def open_idx(path: Path, sample_dims: int | None = None) -> MemoryColumn:
    """The rows of an idx file, read whole."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        num_dimensions = file.read(4)[-1:]
    return MemoryColumn(str(path), read_idx(path, num_dimensions[0] if num_dimensions else 1), sample_dims)


def read_idx(path: Path, num_dimensions: int) -> Bytes:
    """Read an idx file of unsigned bytes in so many dimensions."""
    content = read_bytes(path)
    magic = bytes((0, 0, UNSIGNED_BYTE, num_dimensions))
    if content[:4].tobytes() != magic:
        raise UserError(
            f"{path} is not an idx file of bytes in {num_dimensions} dimensions: "
            f"it begins with {content[:4].tobytes()!r}, expected {magic!r}"
        )
    start = 4 + 4 * num_dimensions
    header = content[4:start].tobytes()
    if len(header) < 4 * num_dimensions:
        raise UserError(f"{path} is truncated: it ends after {len(content)} bytes, inside its header")
    shape = struct.unpack(f">{num_dimensions}I", header)
    check_length(path, len(content), start + math.prod(shape))
    return content[start:].reshape(shape)


def read_bytes(path: Path) -> Bytes:
    """All bytes of a file, uncompressed, in memory that may be written to, as torch wants it."""
    try:
        content = np.fromfile(path, np.uint8)
        if content[:2].tobytes() != GZIP_MAGIC:
            return content
        return np.frombuffer(bytearray(gzip.decompress(content.data)), np.uint8)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is truncated or damaged: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
