"""An error as a person reads it: what happened, where in their own code, and how to see more."""

import errno
import sysconfig
import traceback
from pathlib import Path
from traceback import FrameSummary

from isoscale.errors import FAILED, USER_CAN_FIX, UserError

_PACKAGE = Path(__file__).parents[1]
_CANNOT_WRITE = {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EPERM, errno.EROFS}
HINT = "add --debug to the command to see the traceback"


def exit_code(error: Exception) -> int:
    """2 for what the user can fix: what a UserError says, and a disk that is full or may not be written."""
    return USER_CAN_FIX if isinstance(error, UserError) or _is_full_disk(error) else FAILED


def describe(error: Exception) -> str:
    """The message, without a traceback."""
    notes = getattr(error, "__notes__", [])
    if isinstance(error, UserError):
        return "\n  ".join([f"error: {error}", *notes])
    if isinstance(error, OSError) and _is_full_disk(error):
        where = f": {error.filename}" if error.filename else ""
        return f"error: {error.strerror}{where}\n  make room or fix the permissions, then start the same command again"
    place = _place(error)
    return "\n  ".join([f"error: {type(error).__name__}: {error}", *([place] if place else []), *notes, HINT])


def _is_full_disk(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _CANNOT_WRITE


def _place(error: Exception) -> str:
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
