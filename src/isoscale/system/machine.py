"""What this process may use of the machine: cores and memory, as affinity and control groups limit them."""

import os
from collections.abc import Iterator
from pathlib import Path

PROCESS_GROUPS = Path("/proc/self/cgroup")
GROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cores() -> float:
    """Cores that this process may keep busy: those it may run on, or fewer where a quota says so."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(allowed), *_core_quotas()])


def total_memory() -> int:
    """Bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory() -> int:
    """Bytes that this process may use before it is killed: all of the machine's, or fewer where a limit says so."""
    folders = _groups("memory")
    limits = (text_of(folder / "memory.max") or text_of(folder / "memory.limit_in_bytes") for folder in folders)
    return min([total_memory(), *(int(limit) for limit in limits if limit.isdigit())])


def _core_quotas() -> Iterator[float]:
    for folder in _groups("cpu"):
        quota, _, period = text_of(folder / "cpu.max").partition(" ")
        quota = quota or text_of(folder / "cpu.cfs_quota_us")
        period = period or text_of(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control groups, each inside the next; the limit of each one holds."""
    for line in text_of(PROCESS_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUP_ROOT / controllers
        group = root / path.lstrip("/")
        yield from (group, *(parent for parent in group.parents if parent.is_relative_to(root)))


def text_of(path: Path) -> str:
    """The text of a file, or nothing: which of them there are depends on the system."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
