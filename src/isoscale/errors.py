"""The errors a person reads, and the exit code that each of them becomes."""

import difflib
import errno
import json
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any

DONE = 0
FAILED = 1
USER_CAN_FIX = 2
START_AGAIN = 75
INTERRUPTED = 130
"""As shells expect after Ctrl-C."""

KeyPath = tuple[str | int, ...]
UNKNOWN_KEY = "unknown key"
MISSING_KEY = "needed here, but missing"

_PACKAGE = Path(__file__).parent
_CANNOT_WRITE = {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EPERM, errno.EROFS}


class UserError(ValueError):
    """Something the user can fix: says what was found, what was expected and what to type."""

    exit_code = USER_CAN_FIX


@dataclass(frozen=True)
class Problem:
    """One mistake in a file: the key, what is wrong with it, where it was written and what was probably meant."""

    path: KeyPath
    message: str
    origin: str | None = None
    suggestion: str | None = None

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.origin, dotted(self.path), self.message) if part)
        return f'{text}; did you mean "{self.suggestion}"?' if self.suggestion else text


def dotted(path: KeyPath) -> str:
    """A key path as overrides write it: `data.transforms.0.scale`."""
    return ".".join(str(part) for part in path)


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that was probably meant, if any is close."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else None


def found(value: Any) -> str:
    """A value as a message shows it."""
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"


class RunLost(UserError):
    """Another training has the run now; this one stops before it writes there."""


class RunGone(UserError):
    """The directory of the run is no longer where it was."""


class Stopped(SystemExit):
    """Training stopped on request, with a checkpoint: start the same command again to go on.

    A script that does not expect it ends with the exit code that says so, as a command does.
    """

    exit_code = START_AGAIN

    def __init__(self, message: str = "") -> None:
        """Why and where it stopped."""
        super().__init__(message)
        self.code = START_AGAIN


class StoppedEarly(Stopped):
    """Stopped on request before the training began; other ranks have not heard of it yet."""


class PeerFailed(Exception):
    """Another rank failed, and so this one cannot go on; says which one and why, and ends as that one does."""

    def __init__(self, message: str, exit_code: int = FAILED, traceback: str = "") -> None:
        """What happened, in words, and the traceback of the rank where it did."""
        super().__init__(message)
        self.exit_code = exit_code
        self.traceback = traceback


class RankLost(PeerFailed):
    """Another rank is gone or no longer comes along, and could not say why."""


def exit_code(error: BaseException) -> int:
    """2 for what the user can fix: what a UserError says, and a disk that is full or may not be written."""
    if isinstance(error, PeerFailed):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, Stopped):
        return START_AGAIN
    can_be_fixed = isinstance(error, UserError) or is_full_disk(error) or _is_long_name(error)
    return USER_CAN_FIX if can_be_fixed else FAILED


def message(error: BaseException) -> str:
    """What happened, and where in the user's own code; without a traceback."""
    if isinstance(error, UserError | PeerFailed):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, StoppedEarly):
        return "stopped on request before the training began; nothing is lost"
    if isinstance(error, OSError) and is_full_disk(error):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}\n  make room or fix the permissions, then start the same command again"
    if isinstance(error, OSError) and _is_long_name(error):
        return f"{error.strerror}: {error.filename}\n  systems allow 255 bytes in a name; give a shorter one"
    place = _place(error)
    return "\n  ".join([f"{type(error).__name__}: {error}", *([place] if place else [])])


def is_full_disk(error: BaseException) -> bool:
    """Whether a disk is full or may not be written."""
    return isinstance(error, OSError) and error.errno in _CANNOT_WRITE


def _is_long_name(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG


def _place(error: BaseException) -> str:
    """The innermost line of the user's own code on the way to the error, or else the innermost of isoscale's."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if _is_users(frame)]
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    chosen = (own or ours or frames)[-1:]
    return "".join(f"in {frame.name}, {frame.filename}:{frame.lineno}: {frame.line or ''}".rstrip() for frame in chosen)


def _is_users(frame: FrameSummary) -> bool:
    path = Path(frame.filename)
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return (
        path.is_file()
        and not path.is_relative_to(_PACKAGE)
        and not {"site-packages", "dist-packages"} & set(path.parts)
        and not any(path.is_relative_to(folder) for folder in libraries)
        and path.name != "isoscale"  # the installed command itself
    )
