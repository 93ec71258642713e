"""Readers of well-known image files: idx, as MNIST has it, and both versions of CIFAR-10's batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isoscale.data import safe_pickle as restricted
from isoscale.data.formats.checks import check_length
from isoscale.data.formats.idx import Bytes, read_bytes, read_idx
from isoscale.errors import UserError

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
    content = read_bytes(path)
    check_length(path, len(content), CIFAR_BATCH * CIFAR_RECORD)
    records = content.reshape(CIFAR_BATCH, CIFAR_RECORD)
    return records[:, 1:], records[:, 0]


def _read_pickled(path: Path) -> tuple[Bytes, NDArray[Any]]:
    try:
        batch = restricted.loads(read_bytes(path).data, encoding="latin1")
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


def _check_labels(labels: NDArray[Any], num_classes: int, path: Path) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise UserError(
            f"{path}: label {labels[wrong[0]]} of sample {wrong[0]} is out of range: "
            f"{num_classes} classes have labels 0 to {num_classes - 1}"
        )


def _by(size: Sequence[int]) -> str:
    return "×".join(map(str, size))


def _kind(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def _reason(error: Exception) -> str:
    return f'"{error.args[0]}" is missing' if isinstance(error, KeyError) else str(error) or type(error).__name__
