"""A thread that carries what ranks say to where it is read, so that nobody who says something waits for it."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from isoscale.observe.events import Said

MOST_HELD = 1000
"""Lines of each rank that may be on their way; of more, the oldest are dropped."""
PAUSE = 0.1
"""Seconds between two deliveries."""

Deliver = Callable[[Sequence[Said]], int]
"""Delivers what it can now, and says how many of them that was."""


@dataclass(frozen=True)
class Dropped(Said):
    """Stands where lines are missing."""

    num_lines: int = 0

    @classmethod
    def count(cls, num_lines: int, rank: int) -> "Dropped":
        """So many lines of a rank."""
        lines = "line was" if num_lines == 1 else "lines were"
        return cls(
            f"{num_lines:,} {lines} dropped here, because this rank prints too fast",
            "warning",
            rank,
            num_lines=num_lines,
        )


class Courier:
    """Takes words from any thread and delivers them in their order."""

    def __init__(self, deliver: Deliver, lock: "threading.RLock | None" = None) -> None:
        """`lock` is held while words are delivered, where others use the same place."""
        self._deliver_some = deliver
        self._lock = lock or threading.RLock()
        self._held: dict[int, deque[Said]] = {}
        self._num_dropped: Counter[int] = Counter()
        self._guard = threading.RLock()  # of the two above; a signal may come while it is held
        self._deliverer: int | None = None
        self._news, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="isoscale courier", daemon=True)
        self._thread.start()

    def say(self, said: Said) -> bool:
        """Take words along; False from the thread that delivers, whose own words would never come to an end."""
        if self._deliverer == threading.get_ident() or self._closed.is_set():
            return False
        with self._guard:
            held = self._held.setdefault(said.rank, deque())
            held.append(said)
            self._drop_oldest(said.rank, held)
        if not self._news.is_set():
            self._news.set()
        return True

    def flush(self, seconds: float = 0.0) -> bool:
        """Deliver all that was said, trying so long; whether that was possible."""
        until = time.monotonic() + seconds
        while not self._deliver():
            if time.monotonic() >= until:
                return False
            time.sleep(PAUSE / 10)
        return True

    def close(self, seconds: float = 0.0) -> list[Said]:
        """Take nothing more and deliver what is left; returns what could not be delivered."""
        self._closed.set()
        self._news.set()
        self._thread.join(2 * PAUSE)
        self.flush(seconds)
        return self._take()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._news.wait()
            self._news.clear()
            self._deliver()
            self._closed.wait(PAUSE)

    def _deliver(self) -> bool:
        if self._deliverer == threading.get_ident():
            return True
        with self._lock:
            self._deliverer = threading.get_ident()
            try:
                taken = self._take()
                rest = taken[self._deliver_some(taken) :] if taken else []
            finally:
                self._deliverer = None
            self._put_back(rest)
        return not rest

    def _take(self) -> list[Said]:
        with self._guard:
            taken = [*self._words_about_dropped(), *(said for held in self._held.values() for said in held)]
            self._held.clear()
            self._num_dropped.clear()
        return taken

    def _words_about_dropped(self) -> Iterable[Said]:
        for rank, count in self._num_dropped.items():
            yield Dropped.count(count, rank)

    def _put_back(self, rest: Sequence[Said]) -> None:
        with self._guard:
            for said in reversed(rest):
                held = self._held.setdefault(said.rank, deque())
                held.appendleft(said)
                self._drop_oldest(said.rank, held)
        if rest:
            self._news.set()

    def _drop_oldest(self, rank: int, held: deque[Said]) -> None:
        while len(held) > MOST_HELD:
            oldest = held.popleft()
            self._num_dropped[rank] += oldest.num_lines if isinstance(oldest, Dropped) else 1


def merged(words: Iterable[Said]) -> list[Said]:
    """What one rank said in a row, as one."""
    groups = groupby(words, key=lambda said: (type(said), said.rank, said.level, said.source))
    return [_joined(list(group)) for _, group in groups]


def _joined(words: Sequence[Said]) -> Said:
    return replace(words[0], text="\n".join(said.text for said in words))
