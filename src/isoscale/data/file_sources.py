"""Samples in files, as a recipe names them: columns by name, cut into train, val and test."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from isoscale.data.batches import tensors_of
from isoscale.data.columns import Column, Rows, row_bytes
from isoscale.data.files import find_files
from isoscale.data.formats.lmdb import LmdbSource
from isoscale.data.formats.opening import SUFFIXES, dataset_names, format_of, open_column
from isoscale.data.formats.views import Without, files_of, place
from isoscale.data.sources import ColumnSource, Source, Sources, Subset, split_source
from isoscale.errors import UserError
from isoscale.system.printing import echo

Spec = str | list[str] | dict[str, Any]
"""A column: a path or pattern, a list of them, or a mapping of options."""
Columns = str | dict[str, Spec]
"""Columns by name, or a file that holds several arrays, or whole samples, by name."""
OnNan = Literal["error", "drop", "keep"]

DEFAULT_SPLIT = {"train": 0.8, "val": 0.1, "test": 0.1}
SCAN_BYTES = 16 << 20
NUM_SCANNERS = 4
REMEDY = "Repair the files, leave those rows out with data.on_nan=drop, or use them with data.on_nan=keep"
PATIENCE = 5.0
"""Seconds after which a person wants to know what took them."""


class Files(Sources):
    """Rows of files (.npy, .npz, HDF5, Zarr, text, raw, idx) or samples of LMDB, read as they are asked for."""

    def __init__(
        self,
        columns: Columns | None = None,
        split: dict[str, float | int] | None = None,
        split_seed: int = 0,
        train: Columns | None = None,
        val: Columns | None = None,
        test: Columns | None = None,
        on_nan: OnNan = "error",
    ) -> None:
        """`columns` are cut at random by `split`; or `train`, `val` and `test` have columns of their own.

        `on_nan` says what to do with rows in which something is not a number: refuse the data (error), leave those rows
        out (drop), or not look (keep). Looking reads all files once.
        """
        splits = {
            split: given for split, given in (("train", train), ("val", val), ("test", test)) if given is not None
        }
        if (columns is None) == (not splits):
            raise UserError("data: give columns, which are split, or give train, val and test columns of their own")
        if splits:
            if split is not None:
                raise UserError("data.split cuts data.columns; train, val and test are apart already, so leave it out")
            sources = {split: _source(given, f"data.{split}", on_nan) for split, given in splits.items()}
            super().__init__(**sources, predict=sources.get("test"))
        else:
            whole = _source(columns, "data.columns", on_nan)
            parts = split_source(whole, split or DEFAULT_SPLIT, split_seed)
            super().__init__(parts.train, parts.val, parts.test, whole)


def _source(columns: Columns | None, where: str, on_nan: OnNan) -> Source:
    """Columns by name; of a path alone, all arrays of the file by their names, or its samples."""
    if isinstance(columns, str):
        files = find_files(columns, tuple(SUFFIXES))
        if len(files) == 1 and format_of(files[0]) == "lmdb":
            return _checked_records(LmdbSource(files[0]), files[0], on_nan)
        names = dataset_names(files[0])
        if names is None:
            raise UserError(f"{where}: {files[0]} holds one array without a name; write {where}: {{input: {columns}}}")
        return _checked({name: open_column({"path": columns, "dataset": name}, where) for name in names}, on_nan)
    if not columns:
        raise UserError(f"{where} names no column; write {where}: {{input: PATH, target: PATH}}")
    opened = {name: open_column(spec, f"{where}.{name}") for name, spec in columns.items()}
    return _checked(opened, on_nan)


def _checked_records(source: LmdbSource, path: Path, on_nan: OnNan) -> Source:
    if on_nan == "keep":
        return source
    with _patiently():
        fetched = (tensors_of(source.fetch(torch.tensor([index]))) for index in range(len(source)))
        is_bad = [any(bool(tensor.isnan().any()) for tensor in tensors) for tensors in fetched]
    if not any(is_bad):
        return source
    count, first = f"{sum(is_bad):,} of {len(source):,} samples", is_bad.index(True)
    if on_nan == "error" or all(is_bad):
        raise UserError(f"something is not a number in {count} of {path}, first in {first}. {REMEDY}")
    _say(f"left out {count}, in which something is not a number")
    return Subset(source, torch.tensor(is_bad).logical_not().nonzero().flatten())


def _checked(columns: dict[str, Column], on_nan: OnNan) -> ColumnSource:
    for name, column in columns.items():
        if column.dtype.kind in "fc" and column.dtype.itemsize > 8 * (1 + (column.dtype.kind == "c")):
            raise UserError(
                f"{name} is stored as {column.dtype}, which no tensor can be; set its dtype, such as float64"
            )
    _check_pairs(columns)
    source = ColumnSource(columns)
    if on_nan == "keep":
        return source
    with _patiently():
        bad = {name: nan_rows(column) for name, column in columns.items()}
    if not any(map(len, bad.values())):
        return source
    if on_nan == "error":
        raise UserError(_where_nan(columns, bad))
    dropped = np.unique(np.concatenate(list(bad.values())))
    if len(dropped) == len(source):
        raise UserError(f"no row would be left: {_where_nan(columns, bad)}")
    _say(f"left out {len(dropped):,} of {len(source):,} rows, in which something is not a number")
    return ColumnSource({name: Without(column, dropped) for name, column in columns.items()})


def _check_pairs(columns: Mapping[str, Column]) -> None:
    """Columns of many files go together file by file: name the pair that does not."""
    many = {name: files for name, column in columns.items() if len(files := files_of(column)) > 1}
    if not many:
        return
    first_name, first = next(iter(many.items()))
    for name, files in many.items():
        if len(files) != len(first):
            longer = max(first, files, key=len)
            raise UserError(
                f"{first_name} has {len(first)} files and {name} has {len(files)}; the first without a partner is "
                f"{longer[min(len(first), len(files))].name}"
            )
        for one, other in zip(first, files, strict=True):
            if one.num_rows != other.num_rows:
                raise UserError(
                    f"{one.name} has {one.num_rows:,} rows ({first_name}), but {other.name} has {other.num_rows:,} "
                    f"({name}); they are read side by side"
                )


@contextmanager
def _patiently() -> Iterator[None]:
    """Look for values that are not numbers, and say so where it took long."""
    start = time.monotonic()
    yield
    taken = time.monotonic() - start
    if taken > PATIENCE:
        _say(f"looked for values that are not numbers in {taken:.0f} s; data.on_nan=keep does not look")


def nan_rows(column: Column) -> Rows:
    """The rows in which something is not a number, in order; reads all of it once, in several threads."""
    if column.dtype.kind not in "fc":
        return np.empty(0, np.int64)
    size = max(1, SCAN_BYTES // max(1, row_bytes(column)))

    def scan(start: int) -> Rows:
        block = column.take(np.arange(start, min(column.num_rows, start + size)))
        if block.size == 0 or not np.isnan(np.min(block)):  # the minimum is not a number if any value is not
            return np.empty(0, np.int64)
        return start + np.flatnonzero(np.isnan(block.reshape(len(block), -1)).any(1))

    with ThreadPoolExecutor(NUM_SCANNERS, thread_name_prefix="isoscale-scan") as pool:
        parts = list(pool.map(scan, range(0, column.num_rows, size)))
    return np.concatenate([np.empty(0, np.int64), *parts])


def _where_nan(columns: Mapping[str, Column], bad: Mapping[str, Rows]) -> str:
    counts = []
    for name, rows in bad.items():
        if len(rows):
            file, row = place(columns[name], int(rows[0]))
            counts.append(f"{name} in {len(rows):,} of {columns[name].num_rows:,} rows, first in {file}, row {row}")
    return f"something is not a number: {'; '.join(counts)}. {REMEDY}"


def _say(text: str) -> None:
    echo(f"note: {text}", err=True)
