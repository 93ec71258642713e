"""Lists of hosts as Slurm writes them: `n[1-4,7],gpu-[001-003]`."""

import re
from collections.abc import Iterator
from itertools import product

from isoscale.errors import UserError

_ENTRY = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
"""A host or several of them: no comma outside of brackets."""
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")


def expand(text: str) -> list[str]:
    """Every host, in the order of the list."""
    hosts = [host for entry in _ENTRY.findall(text) for host in _hosts(entry, text)]
    if not hosts or _ENTRY.sub("", text).strip(","):
        raise _unreadable(text)
    return hosts


def expand_counts(text: str) -> list[int]:
    """Tasks on each host, as in `2(x3),1`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _hosts(entry: str, text: str) -> list[str]:
    parts = [[found[2]] if found[2] else list(_numbers(found[1], text)) for found in _PART.finditer(entry)]
    return ["".join(combined) for combined in product(*parts)]


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """What a bracket holds; numbers are as wide as the first of their range."""
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise _unreadable(text)
        yield from (f"{value:0{len(first)}d}" for value in range(int(first), int(last) + 1))


def _unreadable(text: str) -> UserError:
    return UserError(
        f"the list of hosts is {text!r}, but should look like n[1-4,7],login: export MASTER_ADDR, the host of rank 0"
    )
