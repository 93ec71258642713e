"""What is in files: every array of them, in numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isoscale.data.formats.finding import find_files
from isoscale.data.formats.lmdb import LmdbSource
from isoscale.data.formats.opening import SUFFIXES, dataset_names, format_of, open_column
from isoscale.data.tools.describe import describe_column, describe_records
from isoscale.errors import UserError

ONLY = "values"
"""What an array without a name is called."""


def describe_files(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Number of files, bytes on disk, and rows, shape, type, values and fingerprint of each array.

    A pattern is one array in several files; `options` are those of a column (`dataset`, `columns`, `sample_dims`, …).
    """
    files = find_files(path, tuple(SUFFIXES))
    facts = {"files": len(files), "bytes": sum(map(_bytes, files))}
    if format_of(files[0]) == "lmdb":
        return {**facts, "columns": _records(files, options)}
    names = dataset_names(files[0]) if "dataset" not in options else None
    chosen = [{}] if names is None else [{"dataset": name} for name in names]
    columns = {
        str({**options, **one}.get("dataset", ONLY)): open_column({"path": path, **options, **one}) for one in chosen
    }
    return {**facts, "columns": {name: describe_column(column) for name, column in columns.items()}}


def _records(files: list[Path], options: Mapping[str, Any]) -> dict[str, Any]:
    if len(files) > 1 or options:
        raise UserError(f"{files[0]} holds whole samples: give one such file alone, without options")
    return describe_records(LmdbSource(files[0]))


def _bytes(path: Path) -> int:
    """On the disk, all files of a store together."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size
