import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoscale.errors import UserError
from isoscale.science.crystals import edge_parts, graph_cache
from isoscale.science.crystals.edges import GraphSettings, find_edges
from isoscale.science.crystals.graph_cache import Graphs, find_graphs, in_memory
from isoscale.science.crystals.reading.structure import Structure
from isoscale.science.crystals.reading.table import StructureTable
from tests.science.crystals.made_tables import structure, table, together

SETTINGS = GraphSettings(4.0)
COLUMNS = ("counts", "edge_source", "edge_target", "edge_shift", "by_source")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ranges of structures whose edges were looked for."""
    calls: list[tuple[int, int]] = []
    find = edge_parts.find_all

    def counted(geometry: Any, settings: Any, start: int, stop: int, take: Any) -> Any:
        calls.append((start, stop))
        return find(geometry, settings, start, stop, take)

    monkeypatch.setattr(edge_parts, "find_all", counted)
    monkeypatch.setattr(graph_cache, "find_all", counted)
    return calls


def found(structures: StructureTable, settings: GraphSettings = SETTINGS, **arguments: Any) -> Graphs:
    arguments.setdefault("say", lambda text: pytest.fail(text))
    return find_graphs([structures], settings, **arguments)[0]


def same(one: Graphs, other: Graphs) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        for name in COLUMNS
    )


def test_edges_are_those_of_each_structure_one_after_the_other(cache: Path):
    structures = table(6)
    graphs = found(structures)
    ends = np.cumsum(graphs.counts)
    assert len(graphs.counts) == 6
    for index, each in enumerate(structures):
        expected = find_edges(each.positions, each.cell, each.pbc, SETTINGS)
        rows = slice(ends[index] - graphs.counts[index], ends[index])
        for name, column in zip(COLUMNS[1:], expected.columns, strict=True):
            assert np.array_equal(getattr(graphs, name)[rows], column)
    assert all(isinstance(getattr(graphs, name), np.memmap) for name in COLUMNS[1:])
    assert graphs.edge_shift.dtype == np.int8
    assert same(graphs, in_memory(structures, SETTINGS))


def test_edges_are_found_once(cache: Path, looked: list[Any]):
    first = found(table(5))
    assert first.is_new and first.folder is not None and first.folder.parent == cache
    again = found(table(5))
    assert same(first, again) and not again.is_new
    assert (again.largest_cutoff, again.num_grown) == (4.0, 0)
    assert looked == [(0, 5)]
    assert [entry.name[0] != "." for entry in cache.iterdir()] == [True]


@pytest.mark.parametrize("what", ["cutoff", "max_neighbors", "positions", "cells", "pbc", "fewer", "order"])
def test_what_edges_depend_on_is_noticed(looked: list[Any], what: str):
    structures = table(4)
    first = found(structures)
    settings = SETTINGS
    if what == "cutoff":
        settings = GraphSettings(4.5)
    elif what == "max_neighbors":
        settings = GraphSettings(4.0, max_neighbors=3)
    elif what == "fewer":
        structures = structures.subset([0, 1, 2])
    elif what == "order":
        structures = structures.subset([1, 0, 2, 3])
    elif what == "pbc":
        structures.pbc[2] = [True, True, False]
    else:
        getattr(structures, what)[2] += 0.3 * np.eye(3) if what == "cells" else 0.3
    changed = found(structures, settings)
    assert changed.is_new and len(looked) == 2
    assert same(changed, in_memory(structures, settings))
    assert what in ("positions", "order", "cells") or not same(first, changed)


def test_targets_and_elements_make_no_new_edges(looked: list[Any]):
    structures = table(4)
    found(structures)
    structures.numbers[:] = 29
    structures.targets["energy"].values[:] = 7
    assert not found(structures).is_new
    assert found(structures, GraphSettings(4)).folder == found(structures).folder  # 4 is 4.0


def damage(folder: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(folder / "by_source.npy", (folder / "by_source.npy").stat().st_size - 1)
    elif how == "missing":
        (folder / "edge_shift.npy").unlink()
    elif how == "flipped":
        content = bytearray((folder / "edge_target.npy").read_bytes())
        content[-3] ^= 1
        (folder / "edge_target.npy").write_bytes(content)
    elif how == "counts":
        counts = np.load(folder / "counts.npy")
        np.save(folder / "counts.npy", counts[::-1])
    elif how == "facts":
        (folder / "facts.json").write_text('{"format": 1')
    else:
        facts = json.loads((folder / "facts.json").read_text())
        (folder / "facts.json").write_text(json.dumps(facts | {"format": 0}))


@pytest.mark.parametrize("how", ["truncated", "missing", "flipped", "counts", "facts", "format"])
def test_a_damaged_cache_is_made_again(cache: Path, looked: list[Any], how: str):
    first = in_memory(table(4), SETTINGS)
    found(table(4))
    (folder,) = cache.iterdir()
    damage(folder, how)
    looked.clear()
    assert same(first, found(table(4)))
    assert same(first, found(table(4)))
    assert looked == [(0, 4)]
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


def test_damage_that_one_rank_sees_is_mended_for_all(cache: Path, monkeypatch: pytest.MonkeyPatch):
    structures = table(8)
    first = in_memory(structures, SETTINGS)
    graphs = found(structures)
    (folder,) = cache.iterdir()
    content = bytearray((folder / "edge_target.npy").read_bytes())
    content[-3] ^= 1  # of the last structure
    (folder / "edge_target.npy").write_bytes(content)
    size = sum(getattr(graphs, name).nbytes for name in COLUMNS[1:])
    monkeypatch.setattr(
        graph_cache, "CHECKED_BYTES", size // 2
    )  # alone, a rank looks at every second one, and not at the last
    everyone = together(2, lambda ranks: found(structures, ranks=ranks))
    assert all(same(first, each) and each.folder == folder for each in everyone)


@pytest.mark.parametrize("world", [2, 3, 7])
def test_ranks_share_the_work_and_get_the_same(cache: Path, looked: list[Any], world: int):
    tables = [table(count, first=count) for count in (4, 1, 3)]
    alone = [in_memory(each, SETTINGS) for each in tables]
    looked.clear()
    everyone = together(world, lambda ranks: find_graphs(tables, SETTINGS, ranks, pytest.fail))
    assert sum(stop - start for start, stop in looked) == 8  # each structure once
    for graphs in everyone:
        assert all(same(one, expected) for one, expected in zip(graphs, alone, strict=True))
    assert sorted(entry.name[0] for entry in cache.iterdir()).count(".") == 0


def test_several_processes_find_what_one_does(cache: Path, monkeypatch: pytest.MonkeyPatch, looked: list[Any]):
    structures = table(9)
    alone = in_memory(structures, SETTINGS)
    looked.clear()
    monkeypatch.setattr(graph_cache, "ATOMS_PER_PROCESS", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert same(alone, found(structures))
    assert looked == []  # not by this process
    shutil.rmtree(cache)
    structures.positions[structures.starts[7] + 1] = structures.positions[structures.starts[7]]
    with pytest.raises(UserError, match="made 7: atoms 0 and 1 "):
        found(structures)
    assert list(cache.iterdir()) == []


def test_a_process_that_finds_edges_needs_no_torch(tmp_path: Path):
    edge_parts.share(graph_cache._geometry(table(4)), tmp_path / "structures")
    command = edge_parts.order(tmp_path / "structures", SETTINGS, 1, 3, tmp_path / "part")
    done = subprocess.run([command[0], "-X", "importtime", *command[1:]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "torch.nn" not in done.stderr
    assert edge_parts.answer(tmp_path / "part").num_edges == in_memory(table(4), SETTINGS).counts[1:3].sum()


def test_a_process_that_dies_is_done_without(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graph_cache, "ATOMS_PER_PROCESS", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(edge_parts.sys, "executable", shutil.which("false"))
    said: list[str] = []
    assert same(in_memory(table(9), SETTINGS), found(table(9), say=said.append))
    assert len(said) == 1 and "ended with status 1" in said[0]


def test_the_shifts_of_atoms_that_drifted_away_get_more_bits(cache: Path):
    drifted = structure(2, 0)
    drifted.positions[1] += 200 * drifted.cell[0]
    tables = StructureTable.of([structure(3, 1), drifted])
    graphs = found(tables)
    assert graphs.edge_shift.dtype == np.int16
    assert same(graphs, in_memory(tables, SETTINGS)) and same(graphs, found(tables))


def test_structures_without_any_edge_are_kept_too(cache: Path):
    lone = Structure(np.array([3]), np.zeros((1, 3)), np.zeros((3, 3)), np.zeros(3, bool))
    settings = GraphSettings(4.0, allow_isolated=True)
    graphs = found(StructureTable.of([lone, lone]), settings)
    assert graphs.counts.tolist() == [0, 0] and graphs.edge_shift.shape == (0, 3)
    assert not found(StructureTable.of([lone, lone]), settings).is_new


def test_adapted_cutoffs_are_counted(cache: Path):
    far = Structure(np.array([3]), np.zeros((1, 3)), 7.2 * np.eye(3), np.ones(3, bool), place="far")
    structures = StructureTable.of([structure(4, 0), far, structure(4, 1)])
    for _ in range(2):
        graphs = found(structures, GraphSettings(4.0, adaptive_cutoff=True))
        assert (graphs.largest_cutoff, graphs.num_grown, int(graphs.counts[1])) == (7.5, 1, 6)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = in_memory(table(4), SETTINGS)
    (tmp_path / "file").touch()
    monkeypatch.setenv("ISOSCALE_CACHE", str(tmp_path / "file" / "below"))
    said: list[str] = []
    alone = found(table(4), say=said.append)
    assert same(expected, alone) and alone.folder is None
    assert len(said) == 1 and "cannot be written" in said[0] and "ISOSCALE_CACHE" in said[0]
    everyone = together(2, lambda ranks: found(table(4), ranks=ranks, say=said.append))
    assert all(same(expected, each) for each in everyone)
    assert len(said) == 2


def test_ranks_that_share_no_disk_each_find_what_they_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = in_memory(table(4), SETTINGS)
    local = threading.local()
    monkeypatch.setattr(graph_cache, "_folder", lambda: local.folder)

    def work(ranks: Any) -> Graphs:
        local.folder = tmp_path / f"disk{ranks.rank}"
        return found(table(4), ranks=ranks, say=said.append)

    said: list[str] = []
    assert all(same(expected, each) for each in together(3, work))
    assert len(said) == 1


def test_a_full_disk_is_done_without(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    expected = in_memory(table(4), SETTINGS)
    said: list[str] = []
    for name in ("write_part", "_write_rows"):
        with monkeypatch.context() as patch:
            patch.setattr(graph_cache, name, full)
            assert same(expected, found(table(4), say=said.append))
        assert "No space left" in said[-1] and "in memory" in said[-1]
        assert list(cache.iterdir()) == []


@pytest.mark.parametrize("world", [1, 3])
def test_every_rank_names_the_first_bad_structure_and_nothing_is_left_behind(cache: Path, world: int):
    structures = table(9)
    for bad in (7, 2):
        structures.positions[structures.starts[bad] + 1] = structures.positions[structures.starts[bad]]
    errors = together(world, lambda ranks: found(structures, ranks=ranks))
    assert [type(error) for error in errors] == [UserError] * world
    assert {str(error)[:22] for error in errors} == {"made 2: atoms 0 and 1 "}
    assert list(cache.iterdir()) == []


@pytest.mark.full
@pytest.mark.skipif("ISOSCALE_SHARED" not in os.environ, reason="ISOSCALE_SHARED names no folder of data")
def test_crystals_of_85_elements_have_the_edges_that_ase_finds(cache: Path):
    from ase.io import read
    from ase.neighborlist import neighbor_list

    atoms = read(Path(os.environ["ISOSCALE_SHARED"]) / "data/crystals/mptrj_random_1k.extxyz", ":200")
    structures = StructureTable.of(
        [Structure(each.numbers, each.positions, np.array(each.cell), each.pbc) for each in atoms]
    )
    graphs = found(structures, GraphSettings(5.0))
    assert graphs.counts.tolist() == [len(neighbor_list("i", each, 5.0)) for each in atoms]
