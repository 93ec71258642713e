"""Reading in several threads: rows of a file that is not in memory are waited for all at once, not one by one."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from isoscale.data.columns import Array, Column, Rows, row_bytes

NUM_THREADS = 16
"""More than most machines have cores to spare: threads that wait for a disk cost nothing."""
CHUNK_BYTES = 1 << 20
"""What one thread reads at a time; what is smaller is not worth a thread."""


def rows_at_once(column: Column) -> int:
    """How many rows one thread reads at a time."""
    return max(1, CHUNK_BYTES // max(1, row_bytes(column)))


def fill(out: Array, rows: Rows, size: int, read: Callable[[Rows], Array]) -> Array:
    """Write the rows that `read` gives into `out`, `size` of them at a time, in several threads where there are more.

    `read` may fill by itself, but no more than `size` rows at once: a thread that waits for its own pool waits forever.
    """

    def one(start: int) -> None:
        out[start : start + size] = read(rows[start : start + size])

    if len(rows) <= size:
        one(0)
    else:
        list(_pool(os.getpid()).map(one, range(0, len(rows), size)))
    return out


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked process has none of its parent's."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="isoscale-rows")
