"""Cores of its own for every rank, where nobody has given it some: ranks that wander over cores disturb each other.

Ranks of one host that may all use the same cores divide them: whole cores with all their hardware threads, neighbours,
of one NUMA node where that costs nobody a core, and of the node of the rank's device where that is possible for all.
"""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from isoscale.system.machine import text_of

SYSTEM = Path("/sys")
_THREADS = Path("/proc/self/task")

Cores = list[tuple[int, ...]]
"""Cores in the order of their numbers, each with its hardware threads."""


class Member(Protocol):
    """What has to be known of a rank."""

    @property
    def rank(self) -> int:
        """Its number."""

    @property
    def cores(self) -> tuple[int, ...]:
        """Those that it may use."""

    @property
    def node(self) -> int | None:
        """The NUMA node of its device."""


def own_cores() -> tuple[int, ...]:
    """The cores that this process may use, by the numbers of their hardware threads; none where nobody can say."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_setaffinity") else ()


def own_share(
    rank: int, here: Sequence[Member], threads: int | None, by_device: bool, system: Path = SYSTEM
) -> tuple[int, ...] | None:
    """The cores that a rank gets of those of its host; None where ranks are left as they are.

    That is so where it is alone, where somebody has given ranks cores already, where there are fewer cores than ranks,
    and where ranks compute with more threads than they would have cores.
    """
    mine = next(member.cores for member in here if member.rank == rank)
    crew = [member for member in here if member.cores == mine]
    others = {core for member in here if member.cores != mine for core in member.cores}
    if len(crew) < 2 or not others.isdisjoint(mine):
        return None
    shares = divide(read_nodes(mine, system), [member.node if by_device else None for member in crew])
    if shares is None or min(map(len, shares)) < (threads or 1):
        return None
    return shares[[member.rank for member in crew].index(rank)]


def divide(nodes: dict[int, Cores], near: Sequence[int | None]) -> list[tuple[int, ...]] | None:
    """Hardware threads for each of several ranks, `near` being the nodes of their devices; None where they are too few.

    Where there are fewer cores than ranks, the hardware threads of one core may go to several.
    """
    single: dict[int, Cores] = {node: [(thread,) for core in nodes[node] for thread in core] for node in nodes}
    for found in (nodes, single):
        shares = _near(found, near) or _spread(found, len(near))
        if shares is not None:
            return [tuple(sorted(thread for core in share for thread in core)) for share in shares]
    return None


def _near(nodes: dict[int, Cores], near: Sequence[int | None]) -> list[Cores] | None:
    """Each rank at its device; None where that is not possible for all."""
    counts = Counter(near)
    if any(node is None or len(nodes.get(node, [])) < count for node, count in counts.items()):
        return None
    cut = {node: iter(_cut(nodes[node], count)) for node, count in counts.items() if node is not None}
    return [next(cut[node]) for node in near if node is not None]


def _spread(nodes: dict[int, Cores], num_ranks: int) -> list[Cores] | None:
    """Each rank in one node, if no rank gets fewer cores by that than by an even cut; else an even cut."""
    cores = [core for node in sorted(nodes) for core in nodes[node]]
    fewest = len(cores) // num_ranks
    if fewest == 0:
        return None
    if sum(len(found) // fewest for found in nodes.values()) < num_ranks:
        return _cut(cores, num_ranks)
    counts = dict.fromkeys(sorted(nodes), 0)
    for _ in range(num_ranks):
        counts[max(counts, key=lambda node: (len(nodes[node]) / (counts[node] + 1), -counts[node]))] += 1
    return [share for node, count in counts.items() if count for share in _cut(nodes[node], count)]


def _cut(cores: Cores, count: int) -> list[Cores]:
    """Neighbours together, as evenly as possible, the first never getting more than another."""
    ends = [number * len(cores) // count for number in range(count + 1)]
    return [cores[first:last] for first, last in pairwise(ends)]


def read_nodes(allowed: Collection[int], system: Path = SYSTEM) -> dict[int, Cores]:
    """The cores of every NUMA node, as far as their hardware threads are allowed; of one where there is no telling."""
    found: dict[int, Cores] = {}
    lists = (system / "devices/system/node").glob("node[0-9]*/cpulist")
    node_of = {
        thread: int(path.parent.name.removeprefix("node")) for path in lists for thread in _numbers(text_of(path))
    }
    left = sorted(allowed)
    while left:
        folder = system / f"devices/system/cpu/cpu{left[0]}/topology"
        siblings = _numbers(text_of(folder / "core_cpus_list") or text_of(folder / "thread_siblings_list"))
        core = tuple(sorted((siblings | {left[0]}) & set(left)))
        found.setdefault(node_of.get(left[0], 0), []).append(core)
        left = [thread for thread in left if thread not in core]
    return found


def node_of_device(address: str, system: Path = SYSTEM) -> int | None:
    """The NUMA node of a device with an address on the PCI bus, such as 0000:3b:00.0."""
    text = text_of(system / "bus/pci/devices" / address / "numa_node")
    return int(text) if text.isdigit() else None  # -1: it is near to none


def _numbers(text: str) -> set[int]:
    """What the system writes as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def in_words(cores: Collection[int]) -> str:
    """As the system writes them: 0-3,8."""
    starts = [core for core in sorted(cores) if core - 1 not in cores]
    ends = [core for core in sorted(cores) if core + 1 not in cores]
    parts = zip(starts, ends, strict=True)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def pin(cores: Collection[int]) -> None:
    """Keep this process, all its threads and those that they start, on some cores."""
    if not hasattr(os, "sched_setaffinity") or set(cores) == os.sched_getaffinity(0):
        return
    with suppress(OSError):  # the system may have taken them away meanwhile
        os.sched_setaffinity(0, cores)
        for thread in _THREADS.iterdir():
            with suppress(OSError):  # ended meanwhile
                os.sched_setaffinity(int(thread.name), cores)
