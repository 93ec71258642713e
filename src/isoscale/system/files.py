"""How a file gets onto the disk: whole or not at all, and never through a link that lies in a run.

A run directory may come from somebody else. Its root may be a link, as where runs are kept on another disk; a file or
folder inside it that is a link is refused, because what it points to is not the run's to change.
"""

import errno
import fcntl
import glob
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from isoscale.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def failures_in_words(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal to write `path` into an error that names the file and the reason."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot write {path}: {reason}{_full_disk(path, error)}. Free space or permission is needed there."
        ) from error


def _full_disk(path: Path, error: OSError) -> str:
    """Which disk is full, and of what."""
    if error.errno not in FULL:
        return ""
    folder = next((above for above in path.absolute().parents if above.is_dir()), Path("/"))
    disk = next(above for above in (folder.resolve(), *folder.resolve().parents) if above.is_mount())
    found = os.statvfs(folder)
    if error.errno == errno.EDQUOT:
        return f": your share of the disk at {disk} is used up"
    what = "has as many files as it can hold (df -i)" if found.f_files and not found.f_favail else "is full"
    return f": the disk at {disk} {what}"


def open_own(path: Path, mode: str, **options: Any) -> Any:
    """Open a file of a run to write it, as `open` does: the file itself and nothing that it is a link to.

    A file with several names (a hard link, as `cp -al` makes) becomes a file of its own first.
    """
    with suppress(FileNotFoundError):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            with path.open("rb") as shared, written_aside(path) as own:
                shutil.copyfileobj(shared, own)
    return open(path, mode, opener=open_no_link, **options)


def open_no_link(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file for its descriptor, as `os.open` does; what is no plain file of one name is refused."""
    with suppress(FileNotFoundError):
        _refuse_shared(path, os.lstat(path))  # before a pipe is waited for, and anything is cut
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        _refuse_shared(path, os.fstat(handle))  # somebody may have been quicker
    except UserError:
        os.close(handle)
        raise
    return handle


def _refuse_shared(path: str | os.PathLike[str], found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        refuse_link(Path(path))
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        what = "has several names (hard links)" if stat.S_ISREG(found.st_mode) else "is not a plain file"
        raise UserError(f"{path} {what} and is not written to: remove it, or put a copy in its place")


def own_folder(path: Path) -> Path:
    """Make a folder inside one that is there; one that is a link is refused."""
    refuse_link(path)
    if not path.is_dir():
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)
    return path


def refuse_link(path: Path) -> None:
    """Refuse to write to a file or into a folder that is a link."""
    if path.is_symlink():
        raise UserError(
            f"{path} is a link to {os.readlink(path)}, and nothing is written through a link: one in a run that came "
            "from elsewhere could point to any file of yours. Remove it, or put a copy in its place; the directory of "
            "a whole run may be a link"
        )


def refuse_links_out_of(folder: Path) -> None:
    """Refuse a folder, where a library is about to write, that is a link or holds one to somewhere else."""
    refuse_link(folder)
    inside = folder.resolve()
    for where, folders, files in os.walk(folder):
        for path in (Path(where, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                refuse_link(path)


def write_aside(path: Path, content: str | bytes, synced: bool = True) -> None:
    """Write a file so that a reader never sees half of it; where it is synced, also after the machine has crashed."""
    with written_aside(path, synced) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def written_aside(path: Path, synced: bool = True) -> Iterator[BinaryIO]:
    """A file beside `path` to be written, which gets that name when it is whole and on the disk, and else is removed.

    A library that wants a path instead finds it as `.name`. What processes that were killed have left there is removed.
    """
    refuse_link(path)
    _remove_abandoned(path)
    file, aside = _open_aside(path)
    try:
        with file:
            yield file
        if synced:
            sync_file(aside)
        aside.replace(path)
        if synced:
            sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # the one that people know
        raise


def _open_aside(path: Path) -> tuple[BinaryIO, Path]:
    """A new file, locked for as long as it is written.

    Nobody can have put a link there: the name cannot be guessed, and one that is taken is refused.
    """
    while True:
        aside = path.with_name(f".{path.name[:50]}-{int.from_bytes(os.urandom(6))}")
        file = aside.open("xb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody takes it for abandoned
            file.close()
            continue
        except OSError:  # a file system without locks
            return file, aside
        if os.fstat(file.fileno()).st_nlink:
            return file, aside
        file.close()


def _remove_abandoned(path: Path) -> None:
    """Remove what was to become this file and never did: whoever writes one has it locked."""
    for aside in path.parent.glob(f".{glob.escape(path.name[:50])}-*"):
        if aside.name.rpartition("-")[2].isdigit():
            with suppress(OSError), aside.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                aside.unlink()


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk, as far as its file system can tell."""
    with suppress(PermissionError):  # one may write into a folder that one may not read
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)
