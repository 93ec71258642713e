"""The words of several ranks: gathered on rank 0, or each rank's in a file of its own."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from isoscale.errors import UserError
from isoscale.observe.events import EpochEnded, Event, Level, Logged, Note, Said
from isoscale.observe.observers import Observers
from isoscale.observe.ranks.sender import Courier, Dropped, merged
from isoscale.observe.ranks.streams import Overheard
from isoscale.observe.text import duration, logged_line
from isoscale.observe.text_log import TextLog
from isoscale.system.printing import echo

PATIENCE = 2.0
"""Seconds to wait for the last words of a rank to leave it, and for rank 0 to have them."""
MOST_SENT = 16_000
"""Characters in one message to rank 0."""
LONGEST_NOTE = 100_000

Voice = Callable[[list[Any]], bool]
"""Tells rank 0 something, if that is possible now.

Of what was said it is [text, level, source], or a number of lines that were dropped; nothing at all after the last.
"""


class Collector:
    """On rank 0: tells those who watch a run what any rank says, each rank's words in their order."""

    def __init__(self, observers: Observers, num_others: int, overhear: bool) -> None:
        """There are so many other ranks; with `overhear`, what code prints on this one is told too."""
        self._observers, self._num_others = observers, num_others
        self._courier = Courier(self._tell, observers.lock)
        self._finished: set[int] = set()
        self._overheard = Overheard(lambda line: self._courier.say(Said(line, source="print"))) if overhear else None
        observers.add(self, first=True)

    def hear(self, rank: int, words: list[Any]) -> None:
        """Take what another rank has said; never waits."""
        if not words:
            self._finished.add(rank)
        for word in words:
            self._courier.say(
                Dropped.count(word, rank) if isinstance(word, int) else Said(word[0], word[1], rank, word[2])
            )

    def notify(self, event: Event) -> None:
        """What was said before comes first."""
        if not isinstance(event, Said):
            self._courier.flush()

    def say(self, text: str, level: Level = "info") -> None:
        """Say something as rank 0."""
        if self._overheard is not None:
            self._courier.say(Said(text, level))

    def finish(self) -> None:
        """Wait a little for the last words of the other ranks."""
        until = time.monotonic() + PATIENCE
        while len(self._finished) < self._num_others and time.monotonic() < until:
            time.sleep(0.01)
        self._courier.flush()

    def close(self) -> None:
        """Give the streams back and tell what is left."""
        if self._overheard is not None:
            self._overheard.release()
        self._courier.close()

    def _tell(self, words: Sequence[Said]) -> int:
        for said in merged(words):
            self._observers.notify(said)
        return len(words)


class Speaker:
    """On another rank: what its code prints and what happens to it, said to rank 0 or written to files."""

    def __init__(self, rank: int, status: Callable[[], str], voice: Voice, files: "RankFiles | None" = None) -> None:
        """`status` tells how this rank is, in words; without `files`, everything is said to rank 0."""
        self._rank, self._status, self._voice, self._files = rank, status, voice, files
        self._courier = Courier(files.write if files else self._send)
        self._overheard = Overheard(lambda line: self.say(line, source="print"))

    def notify(self, event: Event) -> None:
        """Say what is this rank's own; means over all ranks are told by rank 0."""
        match event:
            case Note():
                self.say(event.text, event.level)
            case Logged():
                own = {name: value for name, value in event.values.items() if name.startswith("time/")}
                self.say(logged_line(Logged(event.step, event.epoch, own)), source="log")
            case EpochEnded():
                words = f"epoch {event.epoch + 1}  step {event.step}  {duration(event.seconds)}, {self._status()}"
                self.say(words, source="log")

    def say(self, text: str, level: Level = "info", source: Any = "note") -> bool:
        """Say something as this rank; False where nobody takes it any more."""
        if self._files is not None and not self._files.are_open:
            return False
        return self._courier.say(Said(text[:LONGEST_NOTE], level, self._rank, source))

    def finish(self) -> None:
        """Let rank 0 know that it has the last words of this rank."""
        self._courier.flush(PATIENCE)
        self._voice([])

    def give_up(self) -> None:
        """After an error: rank 0 has to know what was said before it knows of the error."""
        if self._files is None:
            self.close()

    def close(self) -> None:
        """Give the streams back and say what is left: to nobody but them, where rank 0 is gone."""
        self._overheard.release()
        for said in self._courier.close(PATIENCE):
            echo(said.text, err=True)
        if self._files is not None:
            self._files.close()

    def _send(self, words: Sequence[Said]) -> int:
        num_sent = 0
        for message in _messages(words):
            if not self._voice([_packed(said) for said in message]):
                break
            num_sent += len(message)
        return num_sent


def _packed(said: Said) -> Any:
    return said.num_lines if isinstance(said, Dropped) else [said.text, said.level, said.source]


def _messages(words: Sequence[Said]) -> Iterator[list[Said]]:
    """As much as may travel at once, so that nothing else has to wait for long."""
    message: list[Said] = []
    room = MOST_SENT
    for said in words:
        if message and len(said.text) > room:
            yield message
            message, room = [], MOST_SENT
        message.append(said)
        room -= len(said.text) + 1
    if message:
        yield message


class RankFiles:
    """The files that a rank writes; one that cannot be written is left out, and rank 0 says so."""

    def __init__(self, name: str, voice: Voice) -> None:
        """`name` says which rank this is, and where."""
        self._name, self._voice = name, voice
        self._logs: dict[Path, TextLog] = {}

    def open(self, path: Path, make: Callable[[Path], TextLog] = TextLog) -> None:
        """Write to one more."""
        try:
            self._logs[path] = make(path)
        except UserError as error:
            self._complain(path, error.__cause__ or error)

    @property
    def are_open(self) -> bool:
        """Whether there is one to write to."""
        return bool(self._logs)

    def write(self, words: Sequence[Said]) -> int:
        """Write words with the time."""
        for path, log in list(self._logs.items()):
            try:
                for said in merged(words):
                    log.notify(said)
            except OSError as error:
                del self._logs[path]
                self._complain(path, error)
        return len(words)

    def close(self) -> None:
        """Close all."""
        for log in self._logs.values():
            with suppress(OSError):
                log.close()

    def _complain(self, path: Path, error: BaseException | None) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = f"{self._name} cannot write {path}: {reason}. Training goes on without this log"
        until = time.monotonic() + PATIENCE
        while not self._voice([[text, "warning", "note"]]) and time.monotonic() < until:
            time.sleep(0.01)


def of_rank(path: Path, rank: int, world: int) -> Path:
    """The file of another rank, beside that of rank 0: log-rank1.txt for log.txt."""
    return path.with_name(f"{path.stem}-rank{rank:0{len(str(world - 1))}d}{path.suffix}")
