"""The connections between processes, where the system lets us see them.

Whoever waits for another process in Gloo waits until a connection closes, and Gloo has no way to be told. A connection
that is shut from below closes for both sides. Now and then (one in forty, three ranks on a busy machine) Gloo waits on,
in `UnboundBuffer::waitSend`, although its connections are closed: then the watch ends the process.
"""

import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from isoscale.parallel.health.server import Line

_DESCRIPTORS = Path("/proc/self/fd")
_SO_ATTACH_FILTER = 26
_TAKE_NOTHING = ctypes.create_string_buffer(struct.pack("@HBBI", 0x06, 0, 0, 0))
"""A filter of packets in the language of the kernel (BPF) with one instruction: return, with 0 bytes of the packet."""


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


def shut_doors(names: Iterable[str], port: int) -> None:
    """Let nobody connect any more at some sockets that listen, nor at a port; those who are connected stay so.

    Neither torch's store nor Gloo asks who connects, or how often. The sockets are theirs and must stay open, so that
    the system is told to drop what arrives.
    """
    for name, descriptor in open_sockets().items() if sys.platform == "linux" else ():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as door:
            is_door = door.family != socket.AF_UNIX and door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_door and (name in names or door.getsockname()[1] == port):
                program = struct.pack("@HP", 1, ctypes.addressof(_TAKE_NOTHING))
                door.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
