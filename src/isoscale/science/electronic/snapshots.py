"""Snapshots: descriptors and the local density of states on the points of a grid, one row a point."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from isoscale.data.columns import Column, ColumnSource
from isoscale.data.files import data_folder
from isoscale.data.formats.opening import open_column
from isoscale.data.sources import Sources
from isoscale.errors import UserError
from isoscale.science.electronic.calculation import Calculation, read_calculation

SUFFIXES = {"input": (".in.npy", ".in.h5"), "target": (".out.npy", ".out.h5"), "info": (".info.json", ".out")}
"""What the files of a snapshot are called after its name."""


@dataclass(frozen=True)
class Snapshot:
    """One configuration of atoms."""

    name: str
    input: Path
    target: Path
    num_rows: int
    calculation: Calculation | None = None
    """None where no file tells about it."""


class SnapshotSource(ColumnSource):
    """The points of some snapshots, one after the other."""

    def __init__(self, columns: Mapping[str, Column], snapshots: Sequence[Snapshot]) -> None:
        """Columns `input` and `target` of all snapshots together."""
        super().__init__(columns)
        self.snapshots = list(snapshots)
        self.ends = torch.cumsum(torch.tensor([snapshot.num_rows for snapshot in snapshots]), 0)

    def snapshot_of(self, samples: Tensor) -> Tensor:
        """The number of the snapshot that each sample belongs to."""
        return torch.bucketize(samples, self.ends.to(samples.device), right=True)


class Snapshots(Sources):
    """Snapshots for training, validation and test, by name: `Be_snapshot0` is Be_snapshot0.in.npy and .out.npy."""

    def __init__(
        self,
        train: list[str | dict[str, str]],
        val: list[str | dict[str, str]] | None = None,
        test: list[str | dict[str, str]] | None = None,
        path: str | None = None,
        columns: str | list[int] | None = "3:",
        on_nan: Literal["error", "drop", "keep"] = "error",
    ) -> None:
        """Names, patterns (`Be_snapshot*`), or mappings with `input`, `target` and perhaps `info`.

        `path` is the folder that they are in. `columns` picks descriptors; the first three are often grid indices.
        """
        folder = _folder(path)
        given = {"train": train, "val": val, "test": test}
        sources = {role: _source(specs, folder, columns, on_nan, role) for role, specs in given.items() if specs}
        super().__init__(**sources, predict=sources.get("test"))


def _folder(path: str | None) -> Path:
    if path is None:
        return Path()
    return Path(path) if Path(path).exists() else data_folder() / path


def _source(
    specs: Sequence[Any], folder: Path, columns: str | list[int] | None, on_nan: Any, role: str
) -> SnapshotSource:
    found = [snapshot for spec in specs for snapshot in _find(spec, folder, role)]
    inputs: dict[str, Any] = {"path": [str(each.input) for each in found], "sample_dims": 1}
    if columns is not None:
        inputs["columns"] = columns
    targets = {"path": [str(each.target) for each in found], "sample_dims": 1}
    opened = {
        "input": open_column(inputs, f"data.{role}.input"), "target": open_column(targets, f"data.{role}.target"),
    }  # fmt: skip
    return SnapshotSource(opened, found)


def _find(spec: Any, folder: Path, role: str) -> list[Snapshot]:
    """The snapshots that a name, a pattern or a mapping stands for."""
    if isinstance(spec, Mapping):
        unknown = sorted(set(spec) - set(SUFFIXES))
        if unknown or not {"input", "target"} <= set(spec):
            raise UserError(f"data.{role}: a snapshot has input, target and perhaps info, but {dict(spec)} was found")
        paths = {name: folder / path for name, path in spec.items()}
        return [_opened(Path(spec["input"]).name.split(".")[0], paths)]
    names = sorted(_names(str(spec), folder), key=_natural)
    if not names:
        there = ", ".join(sorted(_names("*", folder), key=_natural)[:8]) or "none"
        raise UserError(f'data.{role}: there is no snapshot "{spec}" in {folder or "."}; there is {there}')
    return [_opened(name, _paths(name, folder)) for name in names]


def _names(pattern: str, folder: Path) -> set[str]:
    found = (path.name for suffix in SUFFIXES["input"] for path in folder.glob(f"{pattern}{suffix}"))
    return {name.removesuffix(suffix) for name in found for suffix in SUFFIXES["input"] if name.endswith(suffix)}


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Snapshot 10 comes after snapshot 9."""
    parts = re.split(r"(\d+)", name)
    return [(int(number % 2 == 0), part if number % 2 == 0 else int(part)) for number, part in enumerate(parts)]


def _paths(name: str, folder: Path) -> dict[str, Path]:
    found = {}
    for role, suffixes in SUFFIXES.items():
        there = [folder / f"{name}{suffix}" for suffix in suffixes if (folder / f"{name}{suffix}").exists()]
        if not there and role != "info":
            raise UserError(f"snapshot {name} has no file {folder / name}{suffixes[0]}")
        found.update({role: there[0]} if there else {})
    return found


def _opened(name: str, paths: Mapping[str, Path]) -> Snapshot:
    shapes = {role: _shape(paths[role]) for role in ("input", "target")}
    grids = {role: shape[:-1] for role, shape in shapes.items()}
    if grids["input"] != grids["target"]:
        raise UserError(
            f"{paths['input']} has a grid of {_times(grids['input'])} points, but {paths['target']} one of "
            f"{_times(grids['target'])}: they must be of the same snapshot"
        )
    info = paths.get("info")
    calculation = read_calculation(info) if info is not None else None
    grid = calculation.grid if calculation is not None else None
    if grid is not None and len(grids["input"]) == 3 and grid != grids["input"]:
        raise UserError(
            f"{info} is about a grid of {_times(grid)} points, but {paths['input']} has one of {_times(grids['input'])}"
        )
    return Snapshot(name, paths["input"], paths["target"], math.prod(grids["input"]), calculation)


def _shape(path: Path) -> tuple[int, ...]:
    column = open_column({"path": str(path), "sample_dims": 1})
    if path.suffix != ".npy":
        return column.num_rows, *column.row_shape
    return tuple(np.load(path, mmap_mode="r").shape)


def _times(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
