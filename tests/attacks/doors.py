"""Which doors processes have open, as the system tells everybody."""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LISTENING = "0A"


def doors(processes: Iterable[int]) -> set[tuple[str, int]]:
    """Address and port of every socket at which some processes listen."""
    return {door for process in processes for door in _doors(process)}


def _doors(process: int) -> Iterable[tuple[str, int]]:
    mine = set(_sockets(process))
    for table in ("tcp", "tcp6"):
        for line in _lines(Path(f"/proc/{process}/net", table)):  # those of its machine, where it has one of its own
            words = line.split()
            if words[3] == LISTENING and words[9] in mine:
                number, _, port = words[1].partition(":")
                yield _address(number), int(port, 16)


def _lines(table: Path) -> list[str]:
    with suppress(OSError):  # it has ended meanwhile
        return table.read_text().splitlines()[1:]
    return []


def _sockets(process: int) -> Iterable[str]:
    with suppress(OSError):
        for entry in list(Path(f"/proc/{process}/fd").iterdir()):
            with suppress(OSError):
                name = os.readlink(entry)
                if name.startswith("socket:["):
                    yield name[8:-1]


def _address(number: str) -> str:
    words = [bytes.fromhex(number[start : start + 8])[::-1] for start in range(0, len(number), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
