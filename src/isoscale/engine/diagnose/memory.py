"""Out of memory, in words: how much was asked for, what is in use, and which setting to change."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from isoscale.errors import UserError
from isoscale.system.devices import Accelerator


@contextmanager
def explained(accelerator: Accelerator, batch_size: int) -> Iterator[None]:
    """Turn torch's out-of-memory errors into a message that says what to type."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory on {accelerator.description}: {_asked(error)} was asked for, "
            f"{size(accelerator.memory_in_use)} of {size(accelerator.total_memory)} is in use by this run. Try "
            f"train.recompute=all (the same result, in more time), train.accumulate=2 (or 4, 8; the same result from "
            f"smaller micro-batches), data.residency=host, train.precision=bf16, or a batch smaller than "
            f"data.batch_size={batch_size}"
        ) from error


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def _asked(error: BaseException) -> str:
    """The amount in the error's text."""
    gpu = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    if gpu:
        return gpu[1]
    cpu = re.search(r"tried to allocate (\d+) bytes", str(error))
    return size(int(cpu[1])) if cpu else "more"


def size(num_bytes: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "KiB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError
