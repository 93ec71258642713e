"""Processes of this machine, and their end, which the system tells whatever becomes of their connections.

A connection closes with the last process that holds it. A worker that was forked from a rank closes those it was born
with, but one that hangs before it can (Python up to 3.11.7 at times, python/cpython#112275), or that was forked by a
library, keeps them open after the rank was killed.
"""

import os
from contextlib import suppress
from pathlib import Path


def machine() -> str:
    """The kernel's start and the space of process numbers, where the system tells."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def state(process: int) -> tuple[str, str]:
    """Letter of state and time of begin of a process of this host; empty where it is gone or nobody tells."""
    try:
        # the name of the command, in brackets, may hold anything
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return "", ""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return "", ""
    except OSError:
        pass  # there, but somebody else's
    return "?", ""


def birth(process: int) -> str:
    """What tells a process from all others, of its number too, here and elsewhere; empty where nobody can say."""
    here, begun = machine(), state(process)[1]
    return f"{here} {process} {begun}" if here and begun else ""


def end_of(process: int, born: str) -> int | None:
    """A descriptor that can be read once the process has ended; None where the system has none, or no such process."""
    descriptor = None
    if born and hasattr(os, "pidfd_open"):
        with suppress(OSError):  # an old system, or one that ended meanwhile
            descriptor = os.pidfd_open(process)
    if descriptor is not None and birth(process) != born:
        os.close(descriptor)
        return None
    return descriptor
