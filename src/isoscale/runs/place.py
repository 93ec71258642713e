"""A directory that is written to for long, and that people may move, delete or replace meanwhile."""

import os
from contextlib import suppress
from pathlib import Path

from isoscale.errors import RunGone


class Place:
    """A directory itself, by its identity, wherever it is moved."""

    def __init__(self, path: Path, words: str) -> None:
        """The directory in `path`; `words` say what it is to people."""
        self.path = path
        self.first = path.absolute()
        """Where it was when it was opened."""
        self._words = words
        self.handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def is_here(self) -> bool:
        """Whether it is still what its path names."""
        return is_file(self.handle, self.path)

    def check(self) -> None:
        """Raise where it is not."""
        if not self.is_here:
            raise RunGone(self._what_became_of_it())

    def moved_to(self) -> Path | None:
        """Where it is now, as far as the system tells; None for one that is deleted."""
        with suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{self.handle}"))
            return path if is_file(self.handle, path) else None
        return None

    def _what_became_of_it(self) -> str:
        moved = self.moved_to()
        if moved is not None:
            return f"{self._words} {self.path} was moved to {moved} while it was trained in"
        others = ", and another put in its place" if self.path.exists() else ""
        return f"{self._words} {self.path} was deleted while it was trained in{others}"

    def close(self) -> None:
        """Let go of it."""
        os.close(self.handle)


def is_file(handle: int, path: Path) -> bool:
    """Whether an open file or directory is still the one of that name."""
    try:
        found = path.stat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(handle), found)
