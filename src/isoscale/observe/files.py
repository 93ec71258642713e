"""What the observers that write files have in common."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isoscale.errors import UserError


@contextmanager
def failures_in_words(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal to write `path` into an error that names the file and the reason."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot write {path}: {reason}. Free space or permission is needed there.") from error
