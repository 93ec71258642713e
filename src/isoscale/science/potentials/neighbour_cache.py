"""Neighbour tables of whole systems: found once, by all ranks together, and kept in files for the next start.

A system's tables are a folder that is named by a hash of all that they depend on. It is written aside and renamed, so
that a folder which is there is whole, whoever was killed, and however many processes made it at the same time.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isoscale.data.columns import Column, row_bytes
from isoscale.data.formats.mapped import MemoryColumn
from isoscale.data.formats.npy import open_npy
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
from isoscale.science.atoms.neighbours import find_once, shift_type
from isoscale.science.potentials.frames import SortedSystem, StoredTables
from isoscale.science.potentials.geometry import Layout
from isoscale.science.potentials.neighbours import Tables, fill_tables, find_pairs

FORMAT = 1
"""Of the folders: one of another format is not looked at."""
_FACTS = "facts.json"


class Seen(NamedTuple):
    """What is known of the neighbours in some frames."""

    most: tuple[int, ...]
    """Neighbours of each type at any atom."""
    nearest: float
    largest_shift: int

    def __add__(self, other: "Seen") -> "Seen":  # type: ignore[override]
        """Of these frames and others."""
        most = tuple(map(max, zip(self.most, other.most, strict=True)))
        return Seen(most, min(self.nearest, other.nearest), max(self.largest_shift, other.largest_shift))


def neighbour_tables(systems: Sequence[SortedSystem], cutoff: float, ranks: TaskRanks, say: Say) -> list[StoredTables]:
    """The tables of all systems, taken from the cache or made by all ranks together; each rank must call it alike."""
    for number, start, stop in shares([len(system) for system in systems], ranks):
        systems[number].check(start, stop)
    keys = [system.fingerprint(cutoff) for system in systems]
    wanted = dict(zip(keys, systems, strict=True))
    found = {key: _stored(cache_folder() / key, system, ranks) for key, system in wanted.items()}
    lacking = ranks.all_gather(
        [key for key, tables in found.items() if tables is None], "what neighbours each rank has"
    )
    missing = [key for key in wanted if any(key in each for each in lacking)]
    if missing:
        made = _make({key: wanted[key] for key in missing}, cutoff, ranks, say, {key: found[key] for key in missing})
        found |= made
    return [tables for key in keys if (tables := found[key]) is not None]


def look(system: SortedSystem, cutoff: float, start: int, stop: int) -> Seen:
    """How many neighbours atoms have, how near they come, and how many boxes apart they are stored."""
    num_types = len(system.atoms)
    seen = Seen((0,) * num_types, float("inf"), 0)
    for frame, (positions, types, _, box) in enumerate(system.each(start, stop), start):
        pairs = find_once(positions, box, cutoff)
        most = pairs.counts(types, num_types).max(0)
        nearest = float(pairs.distances.min(initial=np.inf))
        if nearest == 0:
            raise UserError(f"{system.system.locate(frame)}: two atoms are at the same place; leave the frame out")
        seen += Seen(tuple(most.tolist()), nearest, int(np.abs(pairs.shifts).max(initial=0)))
    return seen


def _make(
    systems: dict[str, SortedSystem], cutoff: float, ranks: TaskRanks, say: Say, found: dict[str, StoredTables | None]
) -> dict[str, StoredTables]:
    """Tables that at least one rank lacks: in the cache where all ranks can, else by each for itself."""
    count = sum(map(len, systems.values()))
    aside = begin(cache_folder(), ranks)
    if aside is not None:
        say_first(ranks, say, f"finding the neighbours of {count:,} frames, once: they are kept in {cache_folder()}")
        if _written(systems, cutoff, ranks, aside):
            made = {key: _stored(cache_folder() / key, system, ranks) for key, system in systems.items()}
            if not any(
                ranks.all_gather([key for key, tables in made.items() if tables is None], "the tables as written")
            ):
                return {key: tables for key, tables in made.items() if tables is not None}
    say_first(ranks, say, f"{cache_folder()} cannot be written, or not by all ranks: each finds the neighbours of "
              f"{count:,} frames for itself, in memory; set {CACHE_VARIABLE} to a folder that all share")  # fmt: skip
    return {key: found[key] or _in_memory(system, cutoff) for key, system in systems.items()}


def _written(systems: dict[str, SortedSystem], cutoff: float, ranks: TaskRanks, aside: Path) -> bool:
    """Put the tables into the cache; False where the disk did not take them."""
    try:
        return _write(systems, cutoff, ranks, aside)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)


def _write(systems: dict[str, SortedSystem], cutoff: float, ranks: TaskRanks, aside: Path) -> bool:
    """Look at all frames, lay files out, fill them, and give them their names: each step by all ranks."""
    keys, listed = list(systems), list(systems.values())
    mine = list(shares([len(system) for system in listed], ranks))
    looked = ranks.all_gather(
        [(number, tuple(look(listed[number], cutoff, *cut))) for number, *cut in mine], "neighbours"
    )
    seen = _together([(number, Seen(*found)) for one in looked for number, found in one])

    def lay_out() -> None:
        for number, system in enumerate(listed):
            _lay_out(aside / keys[number], system, seen[number])

    def fill() -> None:
        for number, *cut in mine:
            _fill(aside / keys[number], listed[number], cutoff, seen[number], *cut)

    def give_names() -> None:
        for key, system in systems.items():
            place = cache_folder() / key
            publish(aside / key, place, is_damaged=place.exists() and _stored(place, system, Single()) is None)

    is_first = ranks.rank == 0
    steps = ((lay_out, is_first), (fill, True), (give_names, is_first))
    return not any(any(ranks.all_gather(attempt(work, is_mine), "neighbours in files")) for work, is_mine in steps)


def _together(looked: Sequence[tuple[int, Seen]]) -> dict[int, Seen]:
    """What all ranks have seen of each system."""
    seen: dict[int, Seen] = {}
    for number, some in looked:
        seen[number] = seen[number] + some if number in seen else some
    return seen


def _shapes(layout: Layout, seen: Seen) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Of one frame."""
    table = sum(layout.atoms), sum(layout.slots)
    whole = np.dtype(np.int32)
    return {
        "neighbours": (table, whole),
        "shifts": ((*table, 3), shift_type(seen.largest_shift)),
        "reverse": (table, whole),
        "checksum": ((), np.dtype(np.uint32)),
    }


def _lay_out(folder: Path, system: SortedSystem, seen: Seen) -> None:
    """Files of the right size, whose rows are still to be written."""
    folder.mkdir()
    for name, (shape, dtype) in _shapes(Layout(system.atoms, seen.most), seen).items():
        header = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": (len(system), *shape)}
        with (folder / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + len(system) * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    facts = {"format": FORMAT, "frames": len(system), "atoms": system.atoms, **seen._asdict()}
    (folder / _FACTS).write_text(json.dumps(facts))


def _fill(folder: Path, system: SortedSystem, cutoff: float, seen: Seen, start: int, stop: int) -> None:
    """Write the rows of some frames: by ordinary writes, of which a full disk is an error and not a crash."""
    files = {name: (folder / f"{name}.npy").open("r+b") for name in _shapes(Layout(system.atoms, seen.most), seen)}
    try:
        for file in files.values():
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            file.seek(start * int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize, os.SEEK_CUR)
        for tables in _tables(system, cutoff, seen, start, stop):
            for name, table in tables._asdict().items():
                files[name].write(np.ascontiguousarray(table, table.dtype.newbyteorder("<")).data)
            files["checksum"].write(np.array(_checksum(tables), "<u4").tobytes())
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()


def _tables(system: SortedSystem, cutoff: float, seen: Seen, start: int, stop: int) -> Iterator[Tables]:
    layout, kind = Layout(system.atoms, seen.most), shift_type(seen.largest_shift)
    for positions, types, places, box in system.each(start, stop):
        yield fill_tables(find_pairs(positions, types, box, cutoff), types, places, layout, kind)


def _checksum(tables: Sequence[NDArray[Any]]) -> int:
    found = 0
    for table in tables:
        found = zlib.crc32(np.ascontiguousarray(table, table.dtype.newbyteorder("<")).data, found)
    return found


def _stored(folder: Path, system: SortedSystem, ranks: TaskRanks) -> StoredTables | None:
    """What a folder of the cache holds; None if it is not there, or not whole."""
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        seen = Seen(tuple(facts["most"]), float(facts["nearest"]), int(facts["largest_shift"]))
        layout = Layout(system.atoms, seen.most)
        columns = {name: _opened(folder / f"{name}.npy", len(system), *expected)
                   for name, expected in _shapes(layout, seen).items()}  # fmt: skip
        if (facts["format"], facts["frames"], tuple(facts["atoms"])) != (FORMAT, len(system), system.atoms):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    checksums = columns.pop("checksum")
    return StoredTables(layout, columns) if _is_right(columns, checksums, ranks) else None


def _opened(path: Path, num_frames: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
    column = open_npy(path)
    if (column.num_rows, column.row_shape, column.dtype) != (num_frames, shape, dtype):
        raise UserError(f"{path} is not what was written there")
    return column


def _is_right(columns: dict[str, Column], checksums: Column, ranks: TaskRanks) -> bool:
    """Whether tables have their checksums: all frames are looked at, or of many an even choice, shared by the ranks."""
    num_frames, size = checksums.num_rows, sum(row_bytes(column) for column in columns.values())
    stride = max(1, -(-num_frames * size // (CHECKED_BYTES * ranks.world_size)))
    for frame in range(ranks.rank * stride, num_frames, ranks.world_size * stride):
        row = np.array([frame])
        if _checksum([column.take(row)[0] for column in columns.values()]) != int(checksums.take(row)[0]):
            return False
    return True


def _in_memory(system: SortedSystem, cutoff: float) -> StoredTables:
    seen = look(system, cutoff, 0, len(system))
    layout = Layout(system.atoms, seen.most)
    shapes = _shapes(layout, seen)
    arrays = {name: np.empty((len(system), *shapes[name][0]), shapes[name][1]) for name in Tables._fields}
    for frame, tables in enumerate(_tables(system, cutoff, seen, 0, len(system))):
        for name, table in tables._asdict().items():
            arrays[name][frame] = table
    columns = {name: MemoryColumn(system.system.name, array) for name, array in arrays.items()}
    return StoredTables(layout, columns)
