import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoscale.science.atoms.cache import cache_folder, shares
from isoscale.science.potentials import neighbour_cache
from tests import warm
from tests.science.potentials.made_systems import arrays, opened, write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "neighbours"


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Ranges of frames whose neighbours were looked for."""
    calls: list[tuple[int, int]] = []
    look = neighbour_cache.look

    def counted(system: Any, cutoff: float, start: int, stop: int) -> Any:
        calls.append((start, stop))
        return look(system, cutoff, start, stop)

    monkeypatch.setattr(neighbour_cache, "look", counted)
    return calls


class Ranks:
    """Processes that are threads, which hear each other."""

    def __init__(self, rank: int, world: int, barrier: threading.Barrier, heard: list[Any]) -> None:
        self.rank, self.world_size = rank, world
        self._barrier, self._heard = barrier, heard

    def all_gather(self, value: Any, what: str = "") -> list[Any]:
        self._heard[self.rank] = value
        self._barrier.wait(30)
        values = list(self._heard)
        self._barrier.wait(30)
        return values


def together(world: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` gives on each of several ranks."""
    barrier, heard, found = threading.Barrier(world), [None] * world, [None] * world

    def one(rank: int) -> None:
        try:
            found[rank] = work(Ranks(rank, world, barrier, heard))
        except BaseException as error:
            found[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def frames(data: Any) -> dict[str, torch.Tensor]:
    source = data.train.systems[0]
    return source.fetch(torch.arange(len(source)))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def test_neighbours_are_found_once(tmp_path: Path, cache: Path, looked: list[Any]):
    said: list[str] = []
    path = write(tmp_path / "a")
    first = frames(opened(path, said=said))
    assert said == [f"finding the neighbours of 3 frames, once: they are kept in {cache}"]
    assert same(first, frames(opened(path, said=said)))
    assert same(first, frames(opened(path, path, val=str(path))))
    shutil.move(path, tmp_path / "elsewhere")
    assert same(first, frames(opened(tmp_path / "elsewhere", said=said)))
    assert looked == [(0, 3)]
    assert len(said) == 1
    assert [entry.name[0] != "." for entry in cache.iterdir()] == [True]


@pytest.mark.parametrize("what", ["cutoff", "coord", "box", "types", "model", "nopbc"])
def test_what_neighbours_depend_on_is_noticed(tmp_path: Path, looked: list[Any], what: str):
    path = write(tmp_path / "a")
    opened(path)
    times = os.stat(path / "set.000" / "coord.npy")
    arguments: dict[str, Any] = {}
    if what == "cutoff":
        arguments["cutoff"] = 2.6
    elif what == "types":
        (path / "type.raw").write_text("1 0 1 0 1")
    elif what == "model":
        arguments["types"] = ["H", "O"]
    elif what == "nopbc":
        (path / "nopbc").touch()
    else:
        values = np.load(path / "set.000" / f"{what}.npy")
        values[1, 0] += 0.5
        np.save(path / "set.000" / f"{what}.npy", values)
        os.utime(path / "set.000" / f"{what}.npy", ns=(times.st_atime_ns, times.st_mtime_ns))  # as some copies do
    changed = frames(opened(path, **arguments))
    assert looked == [(0, 3), (0, 3)]
    assert not same(changed, frames(opened(write(tmp_path / "original"))))


def test_the_model_is_noticed_also_where_frames_have_types_of_their_own(tmp_path: Path, looked: list[Any]):
    own = {**arrays(num_frames=2, types=(0, 0, 0, 0)), "real_atom_types": np.array([[0, 1, 0, 1], [1, 1, 0, 0]])}
    path = write(tmp_path / "a", [own], types=(0, 0, 0, 0))
    first = frames(opened(path))
    assert not same(first, frames(opened(path, types=["H", "O"])))
    assert looked == [(0, 2), (0, 2)]


def test_labels_are_looked_at_every_time_and_make_no_new_tables(tmp_path: Path, looked: list[Any]):
    path = write(tmp_path / "a")
    opened(path)
    forces = np.load(path / "set.000" / "force.npy")
    np.save(path / "set.000" / "force.npy", forces + 1)
    assert float(frames(opened(path))["force"].sum()) == pytest.approx(forces.sum() + forces.size)
    assert len(looked) == 1
    forces[2, 4] = np.nan
    np.save(path / "set.000" / "force.npy", forces)
    with pytest.raises(ValueError, match="a, frame 2: force is not a finite number"):
        opened(path)


def damage(folder: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(folder / "reverse.npy", (folder / "reverse.npy").stat().st_size - 1)
    elif how == "missing":
        (folder / "shifts.npy").unlink()
    elif how == "flipped":
        content = bytearray((folder / "neighbours.npy").read_bytes())
        content[-3] ^= 1
        (folder / "neighbours.npy").write_bytes(content)
    elif how == "facts":
        (folder / "facts.json").write_text('{"format": 1')
    else:
        facts = json.loads((folder / "facts.json").read_text())
        (folder / "facts.json").write_text(json.dumps(facts | {"format": 0}))


@pytest.mark.parametrize("how", ["truncated", "missing", "flipped", "facts", "format"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, cache: Path, looked: list[Any], how: str):
    path = write(tmp_path / "a")
    first = frames(opened(path))
    (folder,) = cache.iterdir()
    damage(folder, how)
    assert same(first, frames(opened(path)))
    assert same(first, frames(opened(path)))
    assert len(looked) == 2
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


@pytest.mark.parametrize("world", [2, 3, 7])
def test_ranks_share_the_work_and_get_the_same(tmp_path: Path, cache: Path, looked: list[Any], world: int):
    paths = [write(tmp_path / name, [arrays(count, seed=count)]) for name, count in (("a", 4), ("b", 1), ("c", 3))]
    alone = [frames(opened(path)) for path in paths]
    shutil.rmtree(cache)
    looked.clear()
    said: list[str] = []
    everyone = together(world, lambda ranks: opened(*paths, ranks=ranks, said=said))
    assert sum(stop - start for start, stop in looked) == 8  # each frame once
    for data in everyone:
        for source, expected in zip(data.train.systems, alone, strict=True):
            assert same(source.fetch(torch.arange(len(source))), expected)
    assert len(said) == 1
    assert sorted(entry.name[0] for entry in cache.iterdir()).count(".") == 0


def test_frames_are_shared_out_evenly_and_each_once():
    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank, self.world_size = rank, 3

        def all_gather(self, value: Any, what: str = "") -> list[Any]:
            raise AssertionError

    cuts = [list(shares([4, 1, 5], Rank(rank))) for rank in range(3)]
    assert cuts == [[(0, 0, 3)], [(0, 3, 4), (1, 0, 1), (2, 0, 1)], [(2, 1, 5)]]


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked: list[Any]
):
    path = write(tmp_path / "a")
    expected = frames(opened(path))
    (tmp_path / "file").touch()
    monkeypatch.setenv("ISOSCALE_CACHE", str(tmp_path / "file" / "below"))
    said: list[str] = []
    assert same(expected, frames(opened(path, said=said)))
    assert len(said) == 1 and "cannot be written" in said[0] and "ISOSCALE_CACHE" in said[0]
    everyone = together(2, lambda ranks: frames(opened(path, ranks=ranks, said=said)))
    assert all(same(expected, each) for each in everyone)
    assert len(said) == 2


def test_ranks_that_share_no_disk_each_find_what_they_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked: list[Any]
):
    path = write(tmp_path / "a")
    expected = frames(opened(path))
    looked.clear()
    local = threading.local()
    monkeypatch.setattr(neighbour_cache, "cache_folder", lambda: getattr(local, "folder", None) or cache_folder())

    def work(ranks: Ranks) -> Any:
        local.folder = None if ranks.rank == 0 else tmp_path / f"disk{ranks.rank}"
        return frames(opened(path, ranks=ranks, said=said))

    said: list[str] = []
    assert all(same(expected, each) for each in together(3, work))
    assert looked == [(0, 3), (0, 3)]  # the first rank has them
    assert len(said) == 1


def test_a_full_disk_is_done_without(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "a")

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(neighbour_cache, "_fill", full)
    said: list[str] = []
    found = frames(opened(path, said=said))
    monkeypatch.undo()
    assert list(cache.iterdir()) == []
    assert "in memory" in said[-1]
    monkeypatch.setenv("ISOSCALE_CACHE", str(tmp_path / "cache"))
    assert same(found, frames(opened(path)))


def test_bad_frames_leave_nothing_behind(tmp_path: Path, cache: Path):
    values = arrays()
    values["coord"][2, 3:6] = values["coord"][2, :3]
    with pytest.raises(ValueError, match="at the same place"):
        opened(write(tmp_path / "a", [values]))
    assert list(cache.iterdir()) == []


def test_the_cache_is_where_the_user_or_the_system_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ISOSCALE_CACHE", "/fast/disk")
    assert cache_folder() == Path("/fast/disk/neighbours")
    monkeypatch.delenv("ISOSCALE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert cache_folder() == Path("/scratch/cache/isoscale/neighbours")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("~/.cache/isoscale/neighbours").expanduser()


MAKING = """
import sys
from tests.science.potentials.made_systems import opened
opened(sys.argv[1])
"""


@pytest.mark.slow
def test_processes_may_be_killed_and_others_make_the_same_at_the_same_time(tmp_path: Path, cache: Path):
    path = write(tmp_path / "a", [arrays(3000)])
    command = [sys.executable, "-c", MAKING, str(path)]
    victim = warm.Popen(command)
    while not any(cache.glob(".making-*/*/reverse.npy")):
        assert victim.poll() is None
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not [entry for entry in cache.iterdir() if entry.name[0] != "."]
    both = [warm.Popen(command) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    kept = [entry for entry in cache.iterdir() if entry.name[0] != "."]
    assert len(kept) == 1
    in_cache = frames(opened(path))
    shutil.rmtree(cache)
    assert same(in_cache, frames(opened(path)))
