"""Which rank is where: its host, its device and its cores, in words for people and as values for programs."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from isoscale.parallel.pinning import in_words
from isoscale.parallel.rank_info import Facts

MOST_RANKS = 4
"""On a host, that are named one by one."""
MOST_HOSTS = 8
"""That are named one by one."""


def rank_map(facts: Sequence[Facts], threads: int) -> list[dict[str, Any]]:
    """For run.json: one entry per rank."""
    return [
        {
            "rank": each.rank, "host": each.host, "process": each.process, "device": each.device,
            "name": each.device_name, "cores": in_words(each.cores), "threads": threads, "visible": each.visible,
        }
        for each in facts
    ]  # fmt: skip


def rank_rows(facts: Sequence[Facts], threads: int) -> list[tuple[str, str]]:
    """A row for every host, or, where they are many, for neighbours that are alike."""
    hosts: dict[str, list[Facts]] = {}
    for each in facts:
        hosts.setdefault(each.host, []).append(each)
    if len(hosts) <= MOST_HOSTS:
        return [(host, _on_host(members, threads)) for host, members in hosts.items()]
    runs = [list(run) for _, run in groupby(hosts.values(), key=_kind)]
    rows = [(_label(run), f"{_numbers(run)}: {_together(run[0], threads)}") for run in runs]
    more = sum(map(len, runs[MOST_HOSTS:]))
    return rows[:MOST_HOSTS] + ([("…", f"{more} more host{'s' * (more > 1)}")] if more else [])


def _on_host(members: Sequence[Facts], threads: int) -> str:
    alike = len({(each.device, each.cores) for each in members}) == 1
    if len(members) > MOST_RANKS or (alike and len(members) > 1):
        return f"ranks {in_words([each.rank for each in members])}: {_together(members, threads)}"
    named = "; ".join(f"rank {each.rank}: {_device(each)}{_cores(each)}" for each in members)
    return f"{named}{_threads(members, threads, '; ' if len(members) > 1 else ', ')}"


def _together(members: Sequence[Facts], threads: int) -> str:
    return f"{_devices(members)}{_all_cores(members)}{_threads(members, threads)}"


def _device(member: Facts) -> str:
    return f"{member.device} ({member.device_name})" if member.device_name and member.device != "cpu" else member.device


def _devices(members: Sequence[Facts]) -> str:
    """Devices of one kind as one: cuda:0-7 (NVIDIA H200)."""
    kinds: dict[str, list[str]] = {}
    for each in members:
        kind, _, index = each.device.partition(":")
        name = f" ({each.device_name})" if each.device_name and kind != "cpu" else ""
        kinds.setdefault(f"{kind}{{}}{name}", []).append(index)
    numbers = {kind: in_words({int(index) for index in found if index}) for kind, found in kinds.items()}
    return ", ".join(kind.format(f":{found}" if found else "") for kind, found in numbers.items())


def _cores(member: Facts) -> str:
    if not member.cores:
        return ""
    return f", core{'s' * (len(member.cores) > 1)} {in_words(member.cores)}"


def _all_cores(members: Sequence[Facts]) -> str:
    if not all(each.cores for each in members):
        return ""
    if len(members) > 1 and len({each.cores for each in members}) == 1:
        return f"{_cores(members[0])} for all"
    counts = sorted({len(each.cores) for each in members})
    count = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    return f", {count} core{'s' * (counts[-1] > 1)}{' each' * (len(members) > 1)}"


def _threads(members: Sequence[Facts], threads: int, before: str = ", ") -> str:
    """Of tensor operations, which matter where there is no other device."""
    if any(each.device != "cpu" for each in members):
        return ""
    return f"{before}{threads} thread{'s' * (threads > 1)}{' each' * (len(members) > 1)}"


def _kind(members: Sequence[Facts]) -> list[Any]:
    """What hosts have in common that are alike."""
    return [(each.device, each.device_name, each.cores) for each in members]


def _label(run: Sequence[Sequence[Facts]]) -> str:
    first, last = run[0][0].host, run[-1][0].host
    return first if first == last else f"{first} … {last}"


def _numbers(run: Sequence[Sequence[Facts]]) -> str:
    ranks = [each.rank for members in run for each in members]
    numbers = f"rank{'s' * (len(ranks) > 1)} {in_words(ranks)}"
    return f"{numbers}, on each of {len(run)} hosts" if len(run) > 1 else numbers
