"""Edges of whole data sets: found once, by all cores of all ranks, and kept in files for the next start.

The edges of a table are a folder that is named by a hash of all that they depend on: positions, cells, periodicity and
settings. Its arrays are memory-mapped, so that ranks of one machine share them.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from isoscale.engine.task import TaskRanks
from isoscale.errors import UserError
from isoscale.science.atoms.cache import (
    CACHE_VARIABLE,
    CHECKED_BYTES,
    Say,
    Single,
    attempt,
    begin,
    cache_folder,
    publish,
    say_first,
    shares,
)
from isoscale.science.atoms.neighbours import load_vesin, shift_type
from isoscale.science.crystals.edge_parts import (
    COLUMNS,
    Geometry,
    Part,
    answer,
    checksum,
    find_all,
    order,
    share,
    write_part,
)
from isoscale.science.crystals.edges import Edges, GraphSettings
from isoscale.science.crystals.reading.table import StructureTable

FORMAT = 1
"""Of the folders: one of another format is not looked at."""
ATOMS_PER_PROCESS = 20_000
"""Fewer are not worth another process, which starts in the time that it takes to find their neighbours."""
_FACTS = "facts.json"
_BLOCK = 1 << 22
"""Values that are copied at a time."""


class Graphs(NamedTuple):
    """The edges of all structures of a table, one structure after the other."""

    counts: NDArray[np.int64]
    """Edges of each structure (N,)."""
    edge_source: NDArray[np.int32]
    edge_target: NDArray[np.int32]
    edge_shift: NDArray[np.signedinteger[Any]]
    by_source: NDArray[np.int32]
    largest_cutoff: float
    """Up to which neighbours were looked for in any structure, in Å."""
    num_grown: int
    """Structures whose cutoff was adapted."""
    folder: Path | None = None
    """Where the arrays are kept; None for in memory."""
    is_new: bool = True
    """Whether they were not found in the cache."""


def find_graphs(
    tables: Sequence[StructureTable], settings: GraphSettings, ranks: TaskRanks | None = None, say: Say = print
) -> list[Graphs]:
    """The edges of all tables, from the cache or found by all ranks together; each rank must call it alike."""
    ranks = ranks or Single()
    settings = settings.checked()
    keys = [fingerprint(table, settings) for table in tables]
    wanted = dict(zip(keys, tables, strict=True))
    found = {key: _stored(_folder() / key, table, ranks, is_new=False) for key, table in wanted.items()}
    lacking = {key: (_folder() / key).exists() for key, graphs in found.items() if graphs is None}
    heard = ranks.all_gather(lacking, "what graphs each rank lacks")
    missing = {key: table for key, table in wanted.items() if any(key in each for each in heard)}
    damaged = frozenset(key for each in heard for key, is_there in each.items() if is_there)
    if missing:
        found |= _make(missing, settings, ranks, say, found, damaged)
    return [graphs for key in keys if (graphs := found[key]) is not None]


def in_memory(table: StructureTable, settings: GraphSettings) -> Graphs:
    """The edges of a table, found by this process for itself."""
    found: list[Edges] = []
    part = find_all(_geometry(table), settings.checked(), 0, len(table), found.append)
    _check([part], table)
    counts = np.array([len(edges.source) for edges in found], np.int64)
    source, target, shift, by_source = map(np.concatenate, zip(*(edges.columns for edges in found), strict=True))
    small = shift.astype(shift_type(part.largest_shift))
    return Graphs(counts, source, target, small, by_source, part.largest_cutoff, part.num_grown)


def fingerprint(table: StructureTable, settings: GraphSettings) -> str:
    """A hash of all that edges depend on; elements and targets are not of it."""
    digest = hashlib.sha256(repr((FORMAT, tuple(settings))).encode())
    for array in _geometry(table):
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()[:32]


def _folder() -> Path:
    return cache_folder("graphs")


def _geometry(table: StructureTable) -> Geometry:
    return Geometry(
        np.ascontiguousarray(table.counts, np.int64), np.ascontiguousarray(table.positions, np.float64),
        np.ascontiguousarray(table.cells, np.float64), np.ascontiguousarray(table.pbc, np.bool_),
    )  # fmt: skip


def _make(
    tables: dict[str, StructureTable],
    settings: GraphSettings,
    ranks: TaskRanks,
    say: Say,
    found: dict[str, Graphs | None],
    damaged: frozenset[str],
) -> dict[str, Graphs]:
    """Edges that at least one rank lacks: in the cache where all ranks can, else by each for itself."""
    load_vesin()
    aside = begin(_folder(), ranks, "graphs")
    why = "it cannot be written, or not by all ranks"
    if aside is not None:
        why = _written(tables, settings, ranks, aside, damaged) or "what was written there is not what all ranks read"
        made = {key: _stored(_folder() / key, table, ranks) for key, table in tables.items()}
        if not any(ranks.all_gather(None in made.values(), "graphs as written")):
            return {key: graphs for key, graphs in made.items() if graphs is not None}
    count = sum(map(len, tables.values()))
    say_first(ranks, say, f"graphs are not kept in {_folder()} ({why}): each rank makes those of {count:,} structures "
              f"for itself, in memory; set {CACHE_VARIABLE} to a folder that all share")  # fmt: skip
    kept = {key: None if key in damaged else found[key] for key in tables}
    return {key: kept[key] or in_memory(table, settings) for key, table in tables.items()}


def _written(
    tables: dict[str, StructureTable], settings: GraphSettings, ranks: TaskRanks, aside: Path, damaged: frozenset[str]
) -> str | None:
    """Put the edges into the cache, or say why the disk did not take them."""
    try:
        return _write(tables, settings, ranks, aside, damaged)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _write(
    tables: dict[str, StructureTable], settings: GraphSettings, ranks: TaskRanks, aside: Path, damaged: frozenset[str]
) -> str | None:
    """Find the edges in parts, lay files out, copy the parts into them and give them their names: by all ranks."""
    keys, listed = list(tables), list(tables.values())
    mine: list[tuple[int, Part]] = []

    def find() -> None:
        for number, start, stop in shares([len(table) for table in listed], ranks):
            parts = _parts(listed[number], settings, start, stop, aside / keys[number])
            mine.extend((number, part) for part in parts)

    refused = ranks.all_gather(attempt(find), "edges of structures")
    gathered = ranks.all_gather([(number, tuple(part)) for number, part in mine], "parts of graphs")
    parts: dict[int, list[Part]] = {number: [] for number in range(len(listed))}
    for number, values in (each for one in gathered for each in one):
        parts[number].append(Part(*values))
    for number, table in enumerate(listed):
        parts[number].sort()
        _check(parts[number], table)
    if any(refused):
        return next(filter(None, refused))

    def lay_out() -> None:
        for number, table in enumerate(listed):
            _lay_out(aside / keys[number] / "whole", len(table), parts[number])

    def copy() -> None:
        for number, part in mine:
            _copy(aside / keys[number], part, parts[number])

    def give_names() -> None:
        for key in tables:
            place = _folder() / key
            publish(aside / key / "whole", place, is_damaged=key in damaged and place.exists())

    is_first = ranks.rank == 0
    steps = ((lay_out, is_first), (copy, True), (give_names, is_first))
    for work, is_mine in steps:
        refused = ranks.all_gather(attempt(work, is_mine), "graphs in files")
        if any(refused):
            return next(filter(None, refused))
    return None


def _check(parts: Sequence[Part], table: StructureTable) -> None:
    """Refuse a table with a structure that has no graph; every rank names the same one."""
    for part in parts:
        if part.problem:
            raise UserError(part.problem.replace("{place}", table.places(part.stop)))


def _parts(table: StructureTable, settings: GraphSettings, start: int, stop: int, folder: Path) -> list[Part]:
    """Find the edges of some structures, by as many processes as are worth it."""
    geometry = _geometry(table)
    atoms = np.cumsum(geometry.counts[start:stop])
    num_processes = max(1, min(torch.get_num_threads(), int(atoms[-1]) // ATOMS_PER_PROCESS, stop - start))
    if num_processes == 1:
        return [write_part(geometry, settings, start, stop, _part_folder(folder, start))]
    cuts = start + np.searchsorted(atoms, np.linspace(0, int(atoms[-1]), num_processes + 1)[1:-1])
    edges = sorted({start, stop, *cuts.tolist()})
    structures = folder / f"structures-{start}"
    share(geometry, structures)
    ranges = list(pairwise(edges))
    commands = [order(structures, settings, first, last, _part_folder(folder, first)) for first, last in ranges]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(each, env=environment, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        said = [process.communicate()[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, text in zip(processes, said, strict=True):
        if process.returncode:
            last = text.strip().rpartition("\n")[2]
            raise OSError(f"a process that finds edges ended with status {process.returncode}: {last}")
    return [answer(_part_folder(folder, first)) for first, _ in ranges]


def _part_folder(folder: Path, start: int) -> Path:
    return folder / f"part-{start}"


def _lay_out(folder: Path, num_structures: int, parts: Sequence[Part]) -> None:
    """Files of the right size, whose rows are still to be written."""
    folder.mkdir(parents=True)
    num_edges, largest = sum(part.num_edges for part in parts), max(part.largest_shift for part in parts)
    for name, (shape, dtype) in _shapes(num_structures, num_edges, largest).items():
        header = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": shape}
        with (folder / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    facts = {
        "format": FORMAT, "structures": num_structures, "edges": num_edges, "largest_shift": largest,
        "largest_cutoff": max(part.largest_cutoff for part in parts),
        "num_grown": sum(part.num_grown for part in parts),
    }  # fmt: skip
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _shapes(num_structures: int, num_edges: int, largest: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    whole = np.dtype(np.int32)
    return {
        "edge_source": ((num_edges,), whole),
        "edge_target": ((num_edges,), whole),
        "edge_shift": ((num_edges, 3), shift_type(largest)),
        "by_source": ((num_edges,), whole),
        "counts": ((num_structures,), np.dtype(np.int64)),
        "checksum": ((num_structures,), np.dtype(np.uint32)),
    }


def _copy(folder: Path, part: Part, parts: Sequence[Part]) -> None:
    """Write a part to its place, by ordinary writes, of which a full disk is an error and not a crash."""
    edges_before = sum(other.num_edges for other in parts if other.start < part.start)
    found = _part_folder(folder, part.start)
    for name, dtype in COLUMNS.items():
        width = 3 if name == "edge_shift" else 1
        _write_rows(folder / "whole" / f"{name}.npy", edges_before * width, _blocks(found / name, dtype))
    for name in ("counts", "checksum"):
        _write_rows(folder / "whole" / f"{name}.npy", part.start, [np.load(found / f"{name}.npy")])
    shutil.rmtree(found)


def _blocks(path: Path, dtype: Any) -> Iterator[NDArray[Any]]:
    with path.open("rb") as file:
        while len(block := np.fromfile(file, dtype, _BLOCK)):
            yield block


def _write_rows(path: Path, before: int, blocks: Iterable[NDArray[Any]]) -> None:
    """Write values behind the first ones of an array in a file, in its type."""
    with path.open("r+b") as file:
        np.lib.format.read_magic(file)
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
        file.seek(before * dtype.itemsize, os.SEEK_CUR)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)
        file.flush()
        os.fsync(file.fileno())


def _stored(folder: Path, table: StructureTable, ranks: TaskRanks, is_new: bool = True) -> Graphs | None:
    """What a folder of the cache holds; None if it is not there, or not whole."""
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        if (facts["format"], facts["structures"]) != (FORMAT, len(table)):
            return None
        shapes = _shapes(len(table), int(facts["edges"]), int(facts["largest_shift"]))
        arrays = {name: _opened(folder / f"{name}.npy", *expected) for name, expected in shapes.items()}
        largest, num_grown = float(facts["largest_cutoff"]), int(facts["num_grown"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    counts, checksums = np.array(arrays.pop("counts")), arrays.pop("checksum")
    columns = list(arrays.values())
    is_right = (counts >= 0).all() and counts.sum() == facts["edges"] and _is_right(counts, columns, checksums, ranks)
    if not is_right:
        return None
    return Graphs(counts, **arrays, largest_cutoff=largest, num_grown=num_grown, folder=folder, is_new=is_new)


def _opened(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    array = np.load(path, mmap_mode="r", allow_pickle=False) if shape[0] else np.load(path, allow_pickle=False)
    if (array.shape, array.dtype) != (shape, dtype):
        raise UserError(f"{path} is not what was written there")
    return array


def _is_right(counts: NDArray[Any], columns: Sequence[NDArray[Any]], checksums: NDArray[Any], ranks: TaskRanks) -> bool:
    """Whether edges have their checksums: of all structures, or of many an even choice, shared by the ranks."""
    size = sum(column.nbytes for column in columns)
    stride = max(1, -(-size // (CHECKED_BYTES * ranks.world_size)))
    ends = np.cumsum(counts)
    for index in range(ranks.rank * stride, len(counts), ranks.world_size * stride):
        rows = slice(int(ends[index] - counts[index]), int(ends[index]))
        if checksum([column[rows] for column in columns]) != int(checksums[index]):
            return False
    return True
