"""Edges of a range of structures, written one after the other: what one process does of a data set.

`python -m isoscale.science.crystals.edge_parts FOLDER` is such a process: it needs numpy and vesin, but no torch, so
that it starts in a moment; and it inherits nothing, which is why it may be started from any program.
"""

import json
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isoscale.errors import UserError
from isoscale.science.crystals.edges import Edges, GraphSettings, find_edges

COLUMNS = {"edge_source": np.int32, "edge_target": np.int32, "edge_shift": np.int16, "by_source": np.int32}
"""The files of edges, and the types in which parts of them are written."""
_TASK, _ANSWER = "task.json", "answer.json"


class Geometry(NamedTuple):
    """What edges depend on, of many structures."""

    counts: NDArray[np.int64]  # (N,)
    positions: NDArray[np.float64]  # (ΣN, 3)
    cells: NDArray[np.float64]  # (N, 3, 3)
    pbc: NDArray[np.bool_]  # (N, 3)


class Part(NamedTuple):
    """What is known of the edges of a range of structures."""

    start: int
    stop: int
    num_edges: int = 0
    largest_shift: int = 0
    largest_cutoff: float = 0.0
    num_grown: int = 0
    """Structures whose cutoff was adapted."""
    problem: str = ""
    """Why there are no edges of the structure at `stop`, for which `{place}` stands."""


def find_all(
    geometry: Geometry, settings: GraphSettings, start: int, stop: int, take: Callable[[Edges], object]
) -> Part:
    """Hand the edges of some structures to `take`, one after the other."""
    ends = np.cumsum(geometry.counts)
    part = Part(start, stop)
    for index in range(start, stop):
        atoms = slice(int(ends[index] - geometry.counts[index]), int(ends[index]))
        cell, pbc = geometry.cells[index], geometry.pbc[index]
        try:
            edges = find_edges(geometry.positions[atoms], cell, pbc, settings, lambda: "{place}")
        except UserError as error:
            return part._replace(stop=index, problem=str(error))
        take(edges)
        part = part._replace(
            num_edges=part.num_edges + len(edges.source),
            largest_shift=max(part.largest_shift, int(np.abs(edges.shift).max(initial=0))),
            largest_cutoff=max(part.largest_cutoff, edges.cutoff),
            num_grown=part.num_grown + (edges.cutoff > settings.cutoff),
        )
    return part


def write_part(geometry: Geometry, settings: GraphSettings, start: int, stop: int, folder: Path) -> Part:
    """Write the edges of some structures into files of their own, and beside them how many and their checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    counts, checksums = [], []
    files = {name: (folder / name).open("wb") for name in COLUMNS}

    def take(edges: Edges) -> None:
        columns = edges.columns
        for file, column in zip(files.values(), columns, strict=True):
            file.write(column.data)
        counts.append(len(edges.source))
        checksums.append(checksum(columns))

    try:
        part = find_all(geometry, settings, start, stop, take)
    finally:
        for file in files.values():
            file.close()
    np.save(folder / "counts.npy", np.array(counts, np.int64))
    np.save(folder / "checksum.npy", np.array(checksums, np.uint32))
    return part


def checksum(columns: Sequence[NDArray[Any]]) -> int:
    """Of the edges of one structure, in the types of parts."""
    found = 0
    for column, dtype in zip(columns, COLUMNS.values(), strict=True):
        found = zlib.crc32(np.ascontiguousarray(column, np.dtype(dtype).newbyteorder("<")).data, found)
    return found


def share(geometry: Geometry, folder: Path) -> None:
    """Write what processes read: the structures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in geometry._asdict().items():
        np.save(folder / f"{name}.npy", array)


def order(structures: Path, settings: GraphSettings, start: int, stop: int, folder: Path) -> list[str]:
    """The command of a process that writes a part of shared structures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    task = {"structures": str(structures), "settings": settings._asdict(), "start": start, "stop": stop}
    (folder / _TASK).write_text(json.dumps(task), encoding="utf-8")
    return [sys.executable, "-m", __name__, str(folder)]


def answer(folder: Path) -> Part:
    """What such a process found."""
    return Part(**json.loads((folder / _ANSWER).read_text(encoding="utf-8")))


def _main(folder: Path) -> None:
    sys.modules["torch"] = sys.modules["cupy"] = None  # type: ignore[assignment]  # vesin imports what it then finds
    task = json.loads((folder / _TASK).read_text(encoding="utf-8"))
    geometry = Geometry(
        *(np.load(Path(task["structures"]) / f"{name}.npy", mmap_mode="r") for name in Geometry._fields)
    )
    part = write_part(geometry, GraphSettings(**task["settings"]), task["start"], task["stop"], folder)
    (folder / _ANSWER).write_text(json.dumps(part._asdict()), encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
