"""Readers of well-known image files: idx, as MNIST has it, and both versions of CIFAR-10's batches."""

import gzip
import pickle
import struct
import zlib
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isoscale.data.files import GZIP_MAGIC
from isoscale.errors import UserError

Bytes = NDArray[np.uint8]

IDX_UNSIGNED_BYTE = 0x08
CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + 3 * 32 * 32
CIFAR_BATCH = 10_000
"""Images in each file of CIFAR-10."""


class Labelled(NamedTuple):
    """Images with their labels."""

    images: Bytes  # (samples, channels, height, width)
    labels: NDArray[np.int64]


def read_idx_pair(images: Path, labels: Path, size: tuple[int, int], num_classes: int) -> Labelled:
    """Read grey images of one size and their labels from two idx files."""
    pixels, classes = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(classes):
        raise UserError(f"{images} holds {len(pixels)} images, but {labels} holds {len(classes)} labels")
    if pixels.shape[1:] != size:
        found, expected = _by(pixels.shape[1:]), _by(size)
        raise UserError(f"{images}: the images are {found} pixels large, expected {expected}")
    _check_labels(classes, num_classes, labels)
    return Labelled(pixels[:, None], classes.astype(np.int64))


def read_idx(path: Path, num_dimensions: int) -> Bytes:
    """Read an idx file of unsigned bytes, compressed by gzip or not."""
    content = _content(path)
    magic = bytes((0, 0, IDX_UNSIGNED_BYTE, num_dimensions))
    if content[:4].tobytes() != magic:
        raise UserError(
            f"{path} is no idx file of bytes in {num_dimensions} dimensions: "
            f"it begins with {content[:4].tobytes()!r}, expected {magic!r}"
        )
    start = 4 + 4 * num_dimensions
    header = content[4:start].tobytes()
    if len(header) < 4 * num_dimensions:
        raise UserError(f"{path} is truncated: it ends after {len(content)} bytes, inside its header")
    shape = struct.unpack(f">{num_dimensions}I", header)
    _check_length(path, len(content), start + _product(shape))
    return content[start:].reshape(shape)


def read_cifar(paths: Sequence[Path], num_classes: int) -> Labelled:
    """Read batches of CIFAR-10 one after the other: the binary version (`.bin`) or the Python version."""
    images = np.empty((len(paths) * CIFAR_BATCH, *CIFAR_SHAPE), np.uint8)
    labels = np.empty(len(images), np.int64)
    for number, path in enumerate(paths):
        rows = slice(number * CIFAR_BATCH, (number + 1) * CIFAR_BATCH)
        pixels, labels[rows] = _read_binary(path) if path.suffix == ".bin" else _read_pickled(path)
        images[rows] = pixels.reshape(-1, *CIFAR_SHAPE)
        _check_labels(labels[rows], num_classes, path)
    return Labelled(images, labels)


def _read_binary(path: Path) -> tuple[Bytes, Bytes]:
    content = _content(path)
    _check_length(path, len(content), CIFAR_BATCH * CIFAR_RECORD)
    records = content.reshape(CIFAR_BATCH, CIFAR_RECORD)
    return records[:, 1:], records[:, 0]


def _read_pickled(path: Path) -> tuple[Bytes, NDArray[Any]]:
    try:
        batch = _ArraysOnly(BytesIO(_content(path).data), encoding="latin1").load()
        pixels, labels = batch["data"], np.asarray(batch["labels"])
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"cannot read {path} as a batch of CIFAR-10's Python version: {_reason(error)}") from None
    expected = (CIFAR_BATCH, CIFAR_RECORD - 1)
    if getattr(pixels, "dtype", None) != np.uint8 or pixels.shape != expected:
        raise UserError(f'{path}: "data" is {_kind(pixels)}, expected an array of uint8 {expected}')
    if labels.dtype.kind not in "iu" or labels.shape != (CIFAR_BATCH,):
        raise UserError(f'{path}: "labels" are {_kind(labels)}, expected {CIFAR_BATCH} whole numbers')
    return pixels, labels


class _ArraysOnly(pickle.Unpickler):
    """Rebuilds numpy arrays and plain containers; a file that asks for anything else is refused, nothing is run."""

    allowed: dict[str, Callable[..., Any]] = {
        "numpy.core.multiarray._reconstruct": np.empty(0).__reduce__()[0],  # type: ignore[dict-item]
        "numpy._core.multiarray._reconstruct": np.empty(0).__reduce__()[0],  # type: ignore[dict-item]
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}"
        if name not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {name}, which no array needs, so that nothing of it was run")
        return self.allowed[name]


def _content(path: Path) -> Bytes:
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


def _check_length(path: Path, found: int, expected: int) -> None:
    if found != expected:
        problem = "is truncated" if found < expected else "is too long"
        raise UserError(f"{path} {problem}: {found:,} bytes found, {expected:,} expected")


def _check_labels(labels: NDArray[Any], num_classes: int, path: Path) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise UserError(
            f"{path}: label {labels[wrong[0]]} of sample {wrong[0]} is out of range: "
            f"{num_classes} classes have labels 0 to {num_classes - 1}"
        )


def _product(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


def _by(size: Sequence[int]) -> str:
    return "×".join(map(str, size))


def _kind(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def _reason(error: Exception) -> str:
    return f'"{error.args[0]}" is missing' if isinstance(error, KeyError) else str(error) or type(error).__name__
