"""What becomes of memory that a step has freed.

The C library gives large pieces back to the system at once, or takes them from it anew, page by page, depending on what
was freed before. A step frees and takes the same pieces again and again: for activations of half a megabyte, getting
their pages takes several times as long as computing them.
"""

import ctypes
import os
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""As mallopt(3) numbers its parameters."""
LARGEST_PIECE = 32 << 20
"""The most that glibc allows: larger ones come from the system, as before."""
MOST_KEPT = 512 << 20


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, up to half a gigabyte; returns whether that is so.

    Nothing is changed where the user has set the allocator's parameters, or where it is not glibc's.
    """
    is_set = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    if sys.platform != "linux" or is_set:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_PIECE) and mallopt(TRIM_THRESHOLD, MOST_KEPT))
