"""Whether a file system can do what a run asks of it: write, sync, rename, lock, and let all hosts see it."""

import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from isoscale.observe.doctor.finding import GIB, Amount, Finding, Verdict
from isoscale.observe.doctor.hosts import names

ENOUGH_DISK = 2 * GIB
MOUNTS = Path("/proc/mounts")
TRIAL = 16 * 2**20
"""Bytes that are written to see how fast that is."""
APPEARS = 3.0
"""Seconds until a file that another host has made is seen on a file system that is shared."""
NO_LOCKS = (
    "without them a second training in the same run is noticed by a counter in .lock alone, which takes seconds; "
    "mount it with locks (Lustre: -o flock), or keep runs elsewhere"
)


def folder(subject: str, path: Path, *, must_be_writable: bool) -> Finding:
    """Whether a run's files can be written below a folder, which need not be there yet, and how fast."""
    place = existing(path)
    words = f"{path} ({kind(place)})"
    free = shutil.disk_usage(place).free
    try:
        seconds, has_locks = _try(place)
    except OSError as error:
        verdict: Verdict = "problem" if must_be_writable else "warning"
        return Finding(subject, verdict, f"{words}: {error.strerror or error}", _remedy(error, place, free))
    amounts = (Amount(free / GIB, "GiB free"), Amount(TRIAL / 1e6 / seconds, "MB/s written"))
    if not has_locks:
        return Finding(subject, "warning", f"{words}: no file locks", NO_LOCKS, amounts=amounts)
    if free < ENOUGH_DISK:
        return Finding(subject, "warning", words, "make room: checkpoints and data need it", amounts=amounts)
    return Finding(subject, "ok", words, amounts=amounts)


def existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def kind(place: Path) -> str:
    """The kind of file system at a place (ext4, nfs4, lustre …), or `unknown`."""
    found, longest = "unknown", -1
    with suppress(OSError):
        resolved = place.resolve()
        for line in MOUNTS.read_text().splitlines():
            mount = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[1]))
            if resolved.is_relative_to(mount) and len(mount.parts) >= longest:
                found, longest = line.split()[2], len(mount.parts)
    return found


def _try(place: Path) -> tuple[float, bool]:
    """Do what a checkpoint does: the seconds that writing took, and whether a lock keeps others out."""
    name = place / f".isoscale-{secrets.token_hex(8)}"
    try:
        with name.open("xb") as file:
            seconds = _write(file)
            has_locks = _locks(name, file)
        name.rename(name.with_suffix(".renamed"))
    finally:
        for left in (name, name.with_suffix(".renamed")):
            with suppress(OSError):
                left.unlink()
    return seconds, has_locks


def _write(file: BinaryIO) -> float:
    start = time.perf_counter()
    block = os.urandom(2**20)  # a file system may store zeros for free
    for _ in range(TRIAL // len(block)):
        file.write(block)
    file.flush()
    os.fsync(file.fileno())
    return time.perf_counter() - start


def _locks(name: Path, file: BinaryIO) -> bool:
    """Whether a lock is given once, and not a second time."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with name.open("rb+") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _remedy(error: OSError, place: Path, free: int) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        whose = "the quota is used up" if error.errno == errno.EDQUOT else f"{free / 1e6:.0f} MB are free"
        return f"{whose}: make room in {place}, or work in another folder"
    return f"make {place} writable, or work in another folder"


def leave_mark(path: Path) -> str | None:
    """Leave an empty file with a name that nobody else has; None where nothing may be written."""
    try:
        handle, name = tempfile.mkstemp(prefix=".isoscale-", dir=existing(path))
    except OSError:
        return None
    os.close(handle)
    return Path(name).name


def sees_mark(path: Path, mark: str) -> bool:
    """Whether the file that another host has left is seen here; some file systems take a moment."""
    until = time.monotonic() + APPEARS
    while not (existing(path) / mark).exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def remove_mark(path: Path, mark: str) -> None:
    """Take the file away again."""
    (existing(path) / mark).unlink(missing_ok=True)


def shared(subject: str, path: Path, is_seen: Sequence[tuple[str, bool | None]], first: str, advice: str) -> Finding:
    """Whether all hosts see what the first one writes; None where it could write nothing. Given by host."""
    blind = [host for host, seen in is_seen if seen is False]
    if any(seen is None for _, seen in is_seen):
        return Finding(
            subject, "ok", f"{path} may not be written on {first}: whether all hosts see the same is not known"
        )
    if blind:
        return Finding(subject, "warning", f"{path} is another place on {names(blind)} than on {first}", advice)
    return Finding(subject, "ok", f"{path} is the same place on all {len(is_seen)} hosts")
