"""Snapshots: descriptors and the local density of states on the points of a grid, one row per point.

Their files are found by name, pattern or path, in several formats, with what is known of them.
"""

import glob
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from isoscale.data.columns import Array, Column, Joined, Rows
from isoscale.data.file_sources import PATIENCE, OnNan, nan_rows
from isoscale.data.files import data_folder, natural
from isoscale.data.formats.opening import open_column
from isoscale.data.formats.views import View, Without, place
from isoscale.data.sources import Sources
from isoscale.errors import UserError
from isoscale.science.electronic.calculation import read_calculation
from isoscale.science.electronic.openpmd import Components, components
from isoscale.science.electronic.snapshot_source import Snapshot, SnapshotSource
from isoscale.system.printing import echo

SUFFIXES = {
    "input": (".in.npy", ".in.h5", ".in.hdf5"),
    "target": (".out.npy", ".out.h5", ".out.hdf5"),
    "info": (".info.json", ".out"),
}
"""What the files of a snapshot are called after its name; where several are there, the first of these is read."""
SHUFFLES = "*.shuffle.json"
"""Where `isoscale data shuffle` writes down which files it made."""
Spec = str | dict[str, str]
"""A name, a pattern, or a mapping of files."""


class Snapshots(Sources):
    """Snapshots for training, validation and test, by name: `Be_snapshot0` is Be_snapshot0.in.npy and .out.npy."""

    def __init__(
        self,
        train: list[Spec] | None = None,
        val: list[Spec] | None = None,
        test: list[Spec] | None = None,
        predict: list[Spec] | None = None,
        path: str | None = None,
        info: str | None = None,
        columns: str | list[int] | None = "3:",
        on_nan: OnNan = "error",
        numbered: bool = False,
    ) -> None:
        """Names, patterns (`Be_snapshot*`, `1000K/Be_*`), or mappings with `input`, `target` and perhaps `info`.

        `path` is the folder that they are in, and `info` a calculation for all that have none of their own. Of an HDF5
        file with several arrays, one is `file.h5:/name`; the numbered arrays of openPMD are read as one. What `predict`
        names (by default the test snapshots) needs no target. `columns` picks descriptors; the first three are often
        grid indices.

        `on_nan` says what to do with points at which something is not a number or infinite: refuse the data (error),
        leave those points out (drop; then no energies can be known), or not look (keep). Looking reads all files once.

        With `numbered`, training points know which snapshot they belong to, which `task.physics.loss` needs.
        """
        reader = SnapshotReader(_folder(path), info, columns, on_nan)
        given = {"train": train, "val": val, "test": test}
        sources = {split: reader.source(specs, split) for split, specs in given.items() if specs}
        width = next((source.columns["target"].row_shape for source in sources.values()), None)
        if predict:
            sources["predict"] = reader.source(predict, "predict", width)
        if numbered and "train" in sources:
            sources["train"].number()
        super().__init__(**{"predict": sources.get("test"), **sources})


def _folder(path: str | None) -> Path:
    if path is None:
        return Path()
    places = [Path(path).expanduser(), data_folder() / path]
    found = next((folder for folder in places if folder.is_dir()), None)
    if found is None:
        there = " or ".join(dict.fromkeys(map(str, places)))
        raise UserError(f"there is no folder {there}: set data.path to the folder that the snapshots are in")
    return found


class _Opened(NamedTuple):
    """A snapshot with its columns."""

    snapshot: Snapshot
    input: Column
    target: Column | None


@dataclass(frozen=True)
class SnapshotReader:
    """Finds and opens snapshots."""

    folder: Path
    info: str | None
    columns: str | list[int] | None
    on_nan: OnNan

    def source(self, specs: Sequence[Spec], split: str, blank: tuple[int, ...] | None = None) -> SnapshotSource:
        """All snapshots of a split; with `blank`, the shape of a target, they need none."""
        paths = [found for spec in specs for found in self._find(spec, split)]
        opened = [self._opened(name, files, split) for name, files in _named_apart(paths, split).items()]
        columns = {"input": _joined([each.input for each in opened])}
        targets = [_target(each, split, blank) for each in opened]
        columns["target"] = _joined(targets)
        snapshots = [each.snapshot for each in opened]
        return SnapshotSource(columns, snapshots) if self.on_nan == "keep" else self._sound(columns, snapshots)

    def _find(self, spec: Spec, split: str) -> list[tuple[str, dict[str, str]]]:
        """The snapshots that a name, a pattern or a mapping stands for: their files by what they hold."""
        if isinstance(spec, Mapping):
            unknown = sorted(set(spec) - set(SUFFIXES))
            if unknown or not ({"input"} if split == "predict" else {"input", "target"}) <= set(spec):
                raise UserError(
                    f"data.{split}: a snapshot has input, target and perhaps info, but {dict(spec)} was found"
                )
            return [(_stem(spec["input"]), {name: str(self.folder / file) for name, file in spec.items()})]
        names = sorted(self._names(spec), key=lambda name: natural(Path(name)))
        if not names:
            near = self._names(str(Path(spec).parent / "*"))
            there = ", ".join(sorted((Path(name).name for name in near), key=lambda name: natural(Path(name)))[:8])
            where = (self.folder / spec).parent
            raise UserError(f'data.{split}: there is no snapshot "{spec}" in {where}; there is {there or "none"}')
        return [(Path(name).name, _files(name, split)) for name in names]

    def _names(self, pattern: str) -> set[str]:
        """Paths without what follows the name of a snapshot."""
        start = str(Path(glob.escape(str(self.folder))) / pattern)
        suffixes = SUFFIXES["input"]
        return {path.removesuffix(suffix) for suffix in suffixes for path in glob.glob(start + suffix)}

    def _opened(self, name: str, files: Mapping[str, str], split: str) -> _Opened:
        grids = {what: _grid(files[what]) for what in ("input", "target") if what in files}
        if "target" in grids and not _agree(grids["input"], grids["target"]):
            raise UserError(
                f"{files['input']} has a grid of {_times(grids['input'])} points, but {files['target']} one of "
                f"{_times(grids['target'])}: they must be of the same snapshot"
            )
        info = files.get("info") or (self.info and str(self.folder / self.info))
        known = read_calculation(Path(info)) if info else None
        if known is not None and known.grid is not None and not _agree(known.grid, grids["input"]):
            raise UserError(
                f"{info} is about a grid of {_times(known.grid)} points, but {files['input']} has one of "
                f"{_times(grids['input'])}"
            )
        first = Path(files["input"])
        target = Path(files["target"]) if "target" in files else None
        shapes = [*grids.values(), *([known.grid] if known is not None and known.grid is not None else [])]
        grid = max(shapes, key=len)
        snapshot = Snapshot(name, first, target, math.prod(grid), grid, known, _shuffled(name, first))
        where = f"data.{split}"
        targets = _open(files["target"], where) if target else None
        return _Opened(snapshot, _open(files["input"], where, self.columns), targets)

    def _sound(self, columns: Mapping[str, Column], snapshots: Sequence[Snapshot]) -> SnapshotSource:
        """All points, or those that are finite."""
        began = time.monotonic()
        bad = {name: nan_rows(_Vanishing(column)) for name, column in columns.items()}
        if time.monotonic() - began > PATIENCE:
            _say(f"looked at all points in {time.monotonic() - began:.0f} s; data.on_nan=keep does not look")
        dropped = reduce(np.union1d, bad.values())
        source = SnapshotSource(columns, snapshots)
        if not len(dropped):
            return source
        if self.on_nan == "error" or len(dropped) == len(source):
            raise UserError(_where_bad(columns, bad))
        _say(f"left out {len(dropped):,} of {len(source):,} points, at which something is not a number, or infinite")
        counts = torch.bincount(source.snapshot_of(torch.from_numpy(dropped)), minlength=len(snapshots)).tolist()
        kept = {name: Without(column, dropped) for name, column in columns.items()}
        return SnapshotSource(kept, [_without(each, count) for each, count in zip(snapshots, counts, strict=True)])


def _named_apart(found: Sequence[tuple[str, dict[str, str]]], split: str) -> dict[str, dict[str, str]]:
    """Snapshots of several folders may have the same name: then the folder is a part of it."""
    folders = [Path(files["input"]).parent for _, files in found]
    ways = [
        (name, f"{folder.name}/{name}", f"{folder}/{name}") for (name, _), folder in zip(found, folders, strict=True)
    ]
    counts = Counter(way for each in ways for way in set(each))
    named: dict[str, dict[str, str]] = {}
    for each, (_, files) in zip(ways, found, strict=True):
        own = next((way for way in each if counts[way] == 1), None)
        if own is None:
            raise UserError(f"data.{split} names the snapshot {each[-1]} twice; leave one of them out")
        named[own] = files
    return named


def _files(name: str, split: str) -> dict[str, str]:
    found = {}
    for what, suffixes in SUFFIXES.items():
        there = [name + suffix for suffix in suffixes if Path(name + suffix).exists()]
        if not there and what == "target" and split != "predict":
            raise UserError(f"snapshot {Path(name).name} has no file {name}{suffixes[0]}")
        found.update({what: there[0]} if there else {})
    return found


def _stem(path: str) -> str:
    name = Path(path.partition(":/")[0]).name
    suffix = next((suffix for suffix in SUFFIXES["input"] if name.endswith(suffix)), "")
    return name.removesuffix(suffix) if suffix else Path(name).stem


def _open(path: str, where: str, columns: str | list[int] | None = None) -> Column:
    """The points of a file, or of the array in it that the path names."""
    file, _, dataset = path.partition(":/")
    numbered = components(file, dataset)
    if numbered:
        return Components(file, numbered, columns)
    given = {"dataset": dataset or None, "columns": columns, "sample_dims": 1}
    return open_column({"path": file, **given}, where)


def _grid(path: str) -> tuple[int, ...]:
    """The shape of all points."""
    file, _, dataset = path.partition(":/")
    numbered = components(file, dataset)
    if numbered:
        first = open_column({"path": file, "dataset": numbered[0]})
        return first.num_rows, *first.row_shape
    column = open_column({"path": file, "dataset": dataset or None})
    if not column.row_shape:
        raise UserError(f"{column.name} has one value a point; expected (x, y, z, values) or (points, values)")
    return column.num_rows, *column.row_shape[:-1]


def _agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """Points that are stored one after the other may be of any grid."""
    if min(len(one), len(other)) == 1:
        return math.prod(one) == math.prod(other)
    return tuple(one) == tuple(other)


def _joined(parts: Sequence[Column]) -> Column:
    """The points of all files; of single and double precision together, all are read as double."""
    common = np.result_type(*(part.dtype for part in parts))
    return Joined([part if part.dtype == common else View(part, slice(None), common) for part in parts])


def _target(opened: _Opened, split: str, blank: tuple[int, ...] | None) -> Column:
    if opened.target is not None:
        return opened.target
    if blank is None:
        raise UserError(f"data.{split} has snapshots without a target, so that data.train must say what one looks like")
    return _Blank(opened.snapshot.name, opened.snapshot.num_rows, blank)


class _Blank:
    """Zeros in place of targets that nobody knows."""

    dtype = np.dtype(np.float32)

    def __init__(self, name: str, num_rows: int, row_shape: tuple[int, ...]) -> None:
        self.name, self.num_rows, self.row_shape = name, num_rows, row_shape

    def take(self, rows: Rows) -> Array:
        return np.zeros((len(rows), *self.row_shape), self.dtype)


class _Vanishing:
    """A column times zero, in which what was infinite is not a number either."""

    def __init__(self, column: Column) -> None:
        self.name, self.num_rows, self.row_shape = column.name, column.num_rows, column.row_shape
        self.dtype, self._column = column.dtype, column

    def take(self, rows: Rows) -> Array:
        with np.errstate(invalid="ignore"):
            return self._column.take(rows) * self.dtype.type(0)


def _where_bad(columns: Mapping[str, Column], bad: Mapping[str, Rows]) -> str:
    counts = []
    for name, rows in bad.items():
        if len(rows):
            file, row = place(columns[name], int(rows[0]))
            counts.append(f"{name} at {len(rows):,} of {columns[name].num_rows:,} points, first in {file}, point {row}")
    return (
        f"something is not a number, or infinite: {'; '.join(counts)}. Repair the files, leave those points out with "
        "data.on_nan=drop, or use them with data.on_nan=keep"
    )


def _without(snapshot: Snapshot, count: int) -> Snapshot:
    if not count:
        return snapshot
    obstacle = (
        f"{count:,} of {snapshot.num_rows:,} points of snapshot {snapshot.name} are left out (data.on_nan: drop), so "
        "that no energy of it can be known: repair its files, or leave task.physics out"
    )
    left = snapshot.num_rows - count
    return replace(snapshot, num_rows=left, grid=(left,), obstacle=obstacle)


def _shuffled(name: str, path: Path) -> str:
    """Why the points of a shuffled file have no energy."""
    for manifest in path.parent.glob(SHUFFLES):
        if path.name in json.loads(manifest.read_text()).get("files", {}):
            return (
                f"the points of {name} are shuffled ({manifest}) and no longer those of one snapshot, so that no "
                "energy of it can be known: take whole snapshots for data.val and data.test, or leave task.physics out"
            )
    return ""


def _say(text: str) -> None:
    echo(f"note: {text}", err=True)


def _times(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
