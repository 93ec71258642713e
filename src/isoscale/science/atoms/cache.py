"""The user's cache: folders named by a hash of all that their content depends on, made by all ranks together.

A folder is written aside and renamed, so that one which is there is whole, whoever was killed, and however many
processes made it at the same time.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from isoscale.data.files import sweep
from isoscale.engine.task import TaskRanks

CACHE_VARIABLE = "ISOSCALE_CACHE"
CHECKED_BYTES = 256 << 20
"""How much of what is stored each rank compares with its checksums at a start."""
_ASIDE = ".making-"

Say = Callable[[str], None]


class Single:
    """A process that works for itself."""

    rank, world_size = 0, 1

    def all_gather(self, value: Any, what: str = "") -> list[Any]:
        """Its own value."""
        return [value]


def cache_folder(kind: str = "neighbours") -> Path:
    """Where things of a kind are kept: `$ISOSCALE_CACHE`, or isoscale in the user's cache, and below it the kind."""
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get(CACHE_VARIABLE) or f"{general}/isoscale").expanduser() / kind


def shares(lengths: Sequence[int], ranks: TaskRanks) -> Iterator[tuple[int, int, int]]:
    """The frames of this rank: number of the system, first frame and end; all together are shared out evenly."""
    total = sum(lengths)
    first, end = total * ranks.rank // ranks.world_size, total * (ranks.rank + 1) // ranks.world_size
    before = 0
    for number, length in enumerate(lengths):
        start, stop = max(first - before, 0), min(end - before, length)
        if start < stop:
            yield number, start, stop
        before += length


def say_first(ranks: TaskRanks, say: Say, text: str) -> None:
    """Say something once, though all ranks know it."""
    if ranks.rank == 0:
        say(text)


def begin(cache: Path, ranks: TaskRanks, what: str = "neighbours") -> Path | None:
    """A new folder in the cache that all ranks see, or None."""
    folder = cache / ranks.all_gather(f"{_ASIDE}{uuid4().hex}", f"a name for new {what}")[0]
    if ranks.rank == 0:
        with suppress(OSError):
            folder.mkdir(parents=True)
            sweep(folder.parent, _ASIDE)
    ranks.all_gather(None, f"a place for new {what}")
    is_seen = all(ranks.all_gather(os.access(folder, os.W_OK | os.X_OK), "whether all see the cache"))
    if not is_seen and ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return folder if is_seen else None


def attempt(work: Callable[[], object], is_mine: bool = True) -> str | None:
    """Why the disk refused, if it did."""
    try:
        if is_mine:
            work()
    except OSError as error:
        return str(error)
    return None


def publish(made: Path, place: Path, is_damaged: bool) -> None:
    """Give a finished folder its name; one that is there already stays, unless it is damaged."""
    if is_damaged:
        place.rename(made.with_name(f"{made.name}-damaged"))
    try:
        made.rename(place)
    except OSError:
        if not place.exists():  # another process was not faster: the disk refused
            raise
