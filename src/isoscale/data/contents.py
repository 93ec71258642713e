"""What a source is made of: arrays, columns of files and whole files, each with a size, time stamps and its bytes."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isoscale.data.columns import Column, Joined, blocks, row_bytes
from isoscale.data.sources import DatasetSource, Source, TensorSource, whole

BLOCK_BYTES = 16 << 20
"""How much is read at a time."""
MOST_FILES = 4096
"""Of more files than that, so many are looked at for their sizes and times."""
MOST_ITEMS = 100_000
"""Of longer lists in a dataset, so many entries."""

Stamps = dict[str, list[int]]
"""Size and time of modification, in nanoseconds, by path."""


class Piece:
    """One array or file of the data of a run."""

    is_certain = True
    """Whether another content means other samples; of what a dataset happens to hold nobody knows."""

    def __init__(self, name: str, paths: Iterable[str] = ()) -> None:
        """`name` is for people; `paths` are the files that it is read from."""
        self.name, self.paths = name, list(paths)

    @property
    def nbytes(self) -> int:
        """How much `content` is."""
        raise NotImplementedError

    def content(self) -> Iterator[Any]:
        """A line about type and shape, then all bytes, a block at a time."""
        raise NotImplementedError

    def stamps(self) -> Stamps:
        """Size and time of its files; of very many, some."""
        every = max(1, len(self.paths) // MOST_FILES)
        files = (file for path in self.paths[::every] for file in _files_in(path))
        return {file: [stat.st_size, stat.st_mtime_ns] for file in islice(files, MOST_FILES) if (stat := _stat(file))}


class TensorPiece(Piece):
    """Tensors in memory."""

    def __init__(self, name: str, tensors: Sequence[Tensor], paths: Iterable[str] = (), certain: bool = True) -> None:
        """All of them are one piece."""
        super().__init__(name, paths)
        self.is_certain = certain
        self._tensors = list(tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def content(self) -> Iterator[Any]:
        """Types, shapes and values."""
        for tensor in self._tensors:
            yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
            rows = tensor.reshape(-1)
            size = max(1, BLOCK_BYTES // max(1, tensor.element_size()))
            for start in range(0, len(rows), size):
                yield rows[start : start + size].resolve_conj().cpu().contiguous().view(torch.uint8).numpy()


class ColumnPiece(Piece):
    """A column of a file, or of several of which some rows are taken."""

    def __init__(self, name: str, column: Column) -> None:
        """The values as they are read, whatever the format."""
        super().__init__(name, _paths(column))
        self._column = column

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._column.num_rows * row_bytes(self._column)

    def content(self) -> Iterator[Any]:
        """Type, shape and values."""
        yield f"{self._column.dtype} {self._column.row_shape} {self._column.num_rows}".encode()
        for block in blocks(self._column, BLOCK_BYTES):
            yield np.ascontiguousarray(block).reshape(-1).view(np.uint8)


class FilePiece(Piece):
    """Files of a kind that only others can read."""

    def __init__(self, name: str, paths: Iterable[str], certain: bool = True) -> None:
        """All of them are one piece; of a folder, all files in it."""
        super().__init__(name, paths)
        self.is_certain = certain

    @property
    def nbytes(self) -> int:
        """Bytes of the files that are looked at."""
        return sum(size for size, _ in self.stamps().values()) * max(1, len(self.paths) // MOST_FILES)

    def content(self) -> Iterator[Any]:
        """Every file, in order."""
        for file in (file for path in self.paths for file in _files_in(path)):
            yield os.path.basename(file).encode()
            with open(file, "rb") as opened:
                while block := opened.read(BLOCK_BYTES):
                    yield block


def contents(sources: Mapping[str, Source]) -> dict[str, Piece]:
    """The pieces of some sources by split, each once, by names that do not depend on where the files lie."""
    found: dict[int, tuple[str, Source]] = {}
    for split, source in sources.items():
        for one in _apart(whole(source)):
            found.setdefault(id(one), (split, one))
    pieces = [piece for split, source in found.values() for piece in _pieces(split, source)]
    folder = _common_folder(pieces)
    named: dict[str, Piece] = {}
    for piece in pieces:
        name = piece.name.replace(folder, "", 1) if folder else piece.name
        named[name if name not in named else f"{name} ({len(named)})"] = piece
    return named


def relative(stamps: Stamps, pieces: Iterable[Piece]) -> Stamps:
    """Stamps by the names of files below the folder that all pieces have in common."""
    folder = _common_folder(pieces)
    return {path.removeprefix(folder): stamp for path, stamp in stamps.items()}


def _apart(source: Any) -> Iterator[Source]:
    """The systems of a mixture, the parts of frames that are read together; else the source."""
    parts = getattr(source, "systems", None) or getattr(source, "sources", None)
    if parts is None:
        yield source
        return
    for part in parts:
        yield from _apart(whole(part))


def _pieces(split: str, source: Any) -> Iterator[Piece]:
    if isinstance(source, TensorSource):
        paths = [source.name] if source.name and os.path.exists(source.name) else []
        for name, tensor in _named_tensors(source.tensors):
            yield TensorPiece(f"{split} {name}".rstrip(), [tensor], paths)
    elif isinstance(source, DatasetSource):
        yield from _of_dataset(source.dataset, f"{split} dataset", set())
    else:
        source = getattr(source, "system", source)
        for name, column in getattr(source, "columns", {}).items():
            yield from _of_column(name, column)
        if files := getattr(source, "files", None):
            yield FilePiece(f"{split} {files[0]}", files)


def _of_column(name: str, column: Column) -> Iterator[Piece]:
    parts = column.parts if isinstance(column, Joined) else [column]
    for part in parts:
        if isinstance(part, Joined):
            yield from _of_column(name, part)
        else:
            yield ColumnPiece(f"{name} in {part.name}", part)


def _paths(column: Any) -> list[str]:
    """The files of a column, whose names are a path, or a path and a dataset."""
    if isinstance(column, Joined):
        return list(dict.fromkeys(path for part in column.parts for path in _paths(part)))
    if hasattr(column, "_column"):
        return _paths(column._column)
    names = (column.name, column.name.rpartition(" (")[0])
    return [name for name in names if name and os.path.exists(name)][:1]


def _named_tensors(tensors: Any) -> list[tuple[str, Tensor]]:
    if isinstance(tensors, Tensor):
        return [("", tensors)]
    items = tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors)
    return [(f"{key} {rest}".rstrip(), one) for key, value in items for rest, one in _named_tensors(value)]


def _of_dataset(dataset: Any, name: str, seen: set[int]) -> Iterator[Piece]:
    """Arrays and files that a dataset holds in its attributes; no sample is asked for."""
    if id(dataset) in seen:
        return
    seen.add(id(dataset))
    if isinstance(dataset, list | tuple):
        yield from _of_list(dataset, name, seen)
        return
    for key, value in sorted(getattr(dataset, "__dict__", {}).items()):
        own = f"{name}.{key}"
        if isinstance(value, list | tuple):
            yield from _of_list(value, own, seen)
        elif isinstance(value, dict):
            yield from _of_list(list(value.values()), own, seen)
        elif isinstance(value, str | Path) and os.path.isfile(value):
            yield FilePiece(own, [str(value)], certain=False)
        elif (tensor := _as_tensor(value)) is not None:
            paths = [str(value.filename)] if isinstance(value, np.memmap) and value.filename else []
            yield TensorPiece(own, [tensor], paths, certain=False)
        elif _is_dataset(value):
            yield from _of_dataset(value, own, seen)


def _of_list(values: Sequence[Any], name: str, seen: set[int]) -> Iterator[Piece]:
    """A list of tensors, of numbers, of files, of datasets, or of such with their labels; of a very long one, some."""
    some = values[:: len(values) // MOST_ITEMS + 1]
    flat = [item for value in some for item in (value if isinstance(value, tuple | list) else [value])]
    tensors = [tensor for item in flat if (tensor := _as_tensor(item)) is not None]
    numbers = [float(item) for item in flat if isinstance(item, bool | int | float)]
    texts = [str(item) for item in flat if isinstance(item, str | Path)]
    if tensors or numbers:
        yield TensorPiece(name, [*tensors, torch.tensor(numbers, dtype=torch.float64)], certain=False)
    if texts and all(map(os.path.isfile, texts[:8])):
        yield FilePiece(f"{name} (files)", texts, certain=False)
    for number, item in enumerate(some[:MOST_FILES]):
        if _is_dataset(item):
            yield from _of_dataset(item, f"{name}[{number}]", seen)


def _is_dataset(value: Any) -> bool:
    has_samples = hasattr(value, "__getitem__") and hasattr(value, "__len__") and hasattr(value, "__dict__")
    return has_samples and not isinstance(value, Tensor | np.ndarray | nn.Module)


def _as_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta and not value.is_quantized:
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.size:
        return torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
    return None


def _files_in(path: str) -> Iterator[str]:
    """The file, or all files of a folder, in an order that does not depend on the file system."""
    if not os.path.isdir(path):
        yield path
        return
    for folder, inside, files in os.walk(path):
        inside.sort()
        yield from (os.path.join(folder, file) for file in sorted(files) if file != "lock.mdb")


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _common_folder(pieces: Iterable[Piece]) -> str:
    """The folder that all files are in, with a slash at its end."""
    folders = {os.path.dirname(path) for piece in pieces for path in piece.paths}
    if not folders or len({os.path.isabs(folder) for folder in folders}) > 1:
        return ""
    folder = os.path.commonpath(folders)
    return f"{folder.rstrip('/')}/" if folder else ""
