"""The connections between processes, where the system lets us see them.

Whoever waits for another process in Gloo waits until a connection closes, and Gloo has no way to be told. A connection
that is shut from below closes for both sides. Now and then (one in forty, three ranks on a busy machine) Gloo waits on,
in `UnboundBuffer::waitSend`, although its connections are closed: then the watch ends the process.
"""

import os
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from isoscale.parallel.hub import Line

_DESCRIPTORS = Path("/proc/self/fd")


def open_sockets() -> dict[str, int]:
    """The descriptor of every open socket, by a name that is never used again; none where there is no /proc."""
    found: dict[str, int] = {}
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(entry.stat().st_mode):
                found[os.readlink(entry)] = int(entry.name)
    return found


def shut(names: Iterable[str]) -> None:
    """Shut connections, except those over which ranks tell each other what happened."""
    kept = {line.fileno() for line in Line.everywhere}
    for name, descriptor in open_sockets().items():
        if name in names and descriptor not in kept:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # not one that listens: Gloo ends the process when that one fails
                connection.shutdown(socket.SHUT_RDWR)
