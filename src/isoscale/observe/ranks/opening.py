"""Whose words are kept where: opens this rank's part of the log as `observe.log` says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from isoscale.errors import Stopped
from isoscale.observe.config import Observe
from isoscale.observe.console import Console
from isoscale.observe.events import Observer
from isoscale.observe.observers import Observers
from isoscale.observe.ranks.rank_log import Collector, RankFiles, Speaker, of_rank
from isoscale.observe.text_log import TextLog
from isoscale.parallel import world
from isoscale.parallel.collectives import Ranks

RankLog = Collector | Speaker


def watchers(section: Observe, ranks: Ranks, where: Path | None) -> list[Observer]:
    """Who is told of a start from its first word on, also where no run is saved; `where` is the run."""
    if not ranks.is_main:
        return []
    rank, path = told_apart(section, ranks), _besides(section, where)
    named = [TextLog.named(path, rank)] if path is not None else []
    return [Console(section.level, section.format, rank=rank), *named]


def _besides(section: Observe, where: Path | None) -> Path | None:
    """The file that gets what log.txt gets, unless it is that."""
    path = Path(section.log_file) if section.log_file else None
    is_log = path is not None and where is not None and path.resolve() == (where / "log.txt").resolve()
    return None if is_log else path


def told_apart(section: Observe, ranks: Ranks) -> int | None:
    """The rank that stands before each line of this one, where lines of several ranks come together."""
    return ranks.rank if section.log == "collect" and not ranks.alone else None


def open_rank_log(
    section: Observe, ranks: Ranks, observers: Observers, where: Path | None, status: Callable[[], str]
) -> RankLog | None:
    """Hear other ranks or be heard; rank 0 comes first. `where` is the run, `status` tells how this rank is."""
    if section.log == "main" or (section.log == "workers" and ranks.alone):
        return None
    if ranks.is_main:
        collector = Collector(observers, ranks.world_size - 1, overhear=section.log == "collect")
        world.voice(collector.hear)
        return collector
    voice = world.voice()
    files = RankFiles(ranks.name(ranks.rank), voice) if section.log == "workers" else None
    if files is not None:
        _open_files(files, section, ranks, where)
    speaker = Speaker(ranks.rank, status, voice, files)
    observers.add(speaker)
    return speaker


def _open_files(files: RankFiles, section: Observe, ranks: Ranks, where: Path | None) -> None:
    named = _besides(section, where)
    if where is not None:
        files.open(of_rank(where / "log.txt", ranks.rank, ranks.world_size))
    if named is not None:
        files.open(of_rank(named, ranks.rank, ranks.world_size), TextLog.named)


@contextmanager
def last_words(log: RankLog | None) -> Iterator[None]:
    """What this rank said before an error reaches rank 0 before the error does."""
    try:
        yield
    except Stopped:
        raise
    except BaseException:
        if isinstance(log, Speaker):
            log.give_up()
        raise
