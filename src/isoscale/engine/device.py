"""The one seam between the engine and kinds of devices: cpu, cuda, xpu, mps."""

import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from isoscale.errors import UserError

KINDS = ("cuda", "xpu", "mps", "cpu")


@dataclass(frozen=True)
class Accelerator:
    """A device and what the engine needs to know of its kind."""

    device: torch.device

    @property
    def kind(self) -> str:
        """cpu, cuda, xpu or mps."""
        return self.device.type

    @property
    def can_capture(self) -> bool:
        """Whether whole steps can be captured into a graph and replayed."""
        return self.kind == "cuda"

    @property
    def total_memory(self) -> int:
        """Bytes of the device's memory, in use or not."""
        if self.kind == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        if self.kind == "xpu":
            return int(torch.xpu.get_device_properties(self.device).total_memory)
        return host_memory()

    @property
    def peak_memory(self) -> int:
        """Most bytes in use so far: by tensors on a device, by the process on a CPU."""
        if self.kind in ("cuda", "xpu"):
            return int(torch.accelerator.max_memory_allocated(self.device))
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    @property
    def description(self) -> str:
        """The device in words."""
        if self.kind == "cuda":
            return f"cuda ({torch.cuda.get_device_name(self.device)})"
        if self.kind == "cpu":
            count = torch.get_num_threads()
            return f"cpu ({count} thread{'s' * (count != 1)})"
        return self.kind

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.kind != "cpu":
            torch.accelerator.synchronize(self.device)

    def moment(self) -> "Moment":
        """Now, as the device sees it: behind all work that it was given so far, without waiting for it."""
        if self.kind != "cuda":
            return Moment(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Moment(event)

    def seeder(self) -> Callable[[int], Any]:
        """Seeds torch's generators, cheaply enough to do it every step (torch.manual_seed costs 350 µs)."""
        on_host = torch.default_generator.manual_seed
        if self.kind == "cpu":
            return on_host
        on_device = (
            torch.cuda.default_generators[self.device.index or 0].manual_seed
            if self.kind == "cuda"
            else getattr(torch, self.kind).manual_seed
        )
        return lambda seed: (on_host(seed), on_device(seed))


def host_memory() -> int:
    """Bytes of the host's memory, in use or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Moment:
    """A point in time, by the host's clock or by an event on the device's stream."""

    _when: Any

    def seconds_until(self, later: "Moment") -> float:
        """How long after this moment another one of the same device was; waits until the device has reached it."""
        if isinstance(self._when, float):
            return float(later._when - self._when)
        later._when.synchronize()
        return float(self._when.elapsed_time(later._when)) / 1000


def find(kind: str = "auto") -> Accelerator:
    """The device of a kind, or the best one there is; of several, the one that is this rank's."""
    available = [name for name in KINDS if _is_available(name)]
    if kind == "auto":
        kind = available[0]
    if kind not in available:
        raise UserError(
            f"train.device is {kind}, but this machine offers {', '.join(available)}; use train.device=auto"
        )
    if kind in ("cuda", "xpu"):
        return Accelerator(torch.device(kind, getattr(torch, kind).current_device()))
    return Accelerator(torch.device(kind))


def _is_available(kind: str) -> bool:
    if kind == "cpu":
        return True
    return bool(torch.backends.mps.is_available() if kind == "mps" else getattr(torch, kind).is_available())
