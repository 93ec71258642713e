"""Devices: all that differs between cpu, cuda, xpu and mps, a class for each kind; nobody else asks torch for it."""

import os
import re
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from isoscale.errors import UserError
from isoscale.system.machine import total_memory

Kernels = Literal["auto", "strict", "lenient", "fastest", "by cuDNN"]
"""Deterministic ones: wherever torch has them (auto, lenient), or none besides. The fastest ones. Deterministic ones of
cuDNN and others of torch."""


class Accelerator:
    """A device: the CPU, and what holds for all kinds unless their classes say otherwise."""

    kind: ClassVar[str] = "cpu"
    backend: ClassVar[str | None] = None
    """What torch.distributed carries tensors by between such devices, of which each rank then has its own."""
    can_capture: ClassVar[bool] = False
    """Whether whole steps can be captured into a graph and replayed."""
    copies_beside: ClassVar[bool] = False
    """Whether streams, events and page-locked memory let it copy while it computes and the host goes on."""
    has_fused: ClassVar[bool] = True
    """Whether torch has fused kernels of optimizers for it."""
    has_tf32: ClassVar[bool] = False
    has_kernel_choice: ClassVar[bool] = False
    """Whether there are deterministic kernels and others."""
    has_float64: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        """The device `device`, which is of this kind."""
        self.device = device

    @classmethod
    def count(cls) -> int:
        """How many of its kind this process sees."""
        return 1

    @classmethod
    def of_this_process(cls) -> "Accelerator":
        """The one that this process computes on."""
        return cls(torch.device(cls.kind))

    @property
    def total_memory(self) -> int:
        """Bytes of the device's memory, in use or not."""
        return total_memory()

    @property
    def peak_memory(self) -> int:
        """Most bytes in use so far: by tensors on a device, by the process on a CPU."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    @property
    def memory_in_use(self) -> int:
        """Bytes in use now, where the device can tell; else the most so far."""
        return self.peak_memory

    def memory_stats(self) -> dict[str, Any]:
        """What torch's allocator counts, where it does."""
        return {}

    @property
    def available_memory(self) -> int:
        """Bytes that tensors can still take, as far as that can be told."""
        return self.total_memory

    @property
    def name(self) -> str:
        """What its maker calls it; "" where torch does not say."""
        return ""

    @property
    def identity(self) -> str:
        """What tells it from others of its machine; "" where there is only one."""
        return ""

    @property
    def description(self) -> str:
        """The device in words."""
        count = torch.get_num_threads()
        return f"cpu ({count} thread{'s' * (count != 1)})"

    @property
    def activities(self) -> list[Any]:
        """What torch's profiler can record of it."""
        return [torch.profiler.ProfilerActivity.CPU]

    def make_current(self) -> None:
        """Let this thread compute on it where nobody says which one."""

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""

    def moment(self) -> "Moment":
        """Now, as the device sees it: behind all work that it was given so far, without waiting for it."""
        return Moment(time.perf_counter())

    def seeder(self) -> Callable[[int], Any]:
        """Seeds torch's generators, cheaply enough to do it every step (torch.manual_seed costs 350 µs)."""
        return torch.default_generator.manual_seed

    def sent(self, tensor: Tensor) -> Tensor:
        """A small tensor of the host on the device, without waiting for it where that is possible."""
        return tensor.to(self.device)

    def fetched(self, tensor: Tensor) -> "Arrival":
        """A copy of a tensor of the device on its way to the host, behind all work that the device was given so far."""
        return Arrival(tensor.clone() if tensor.device.type == "cpu" else tensor.cpu())

    def new_stream(self) -> Any:
        """A stream of its own, for copies beside the computation; None where there are none."""
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Give work to this stream for a while."""
        return nullcontext()

    def apart(self) -> AbstractContextManager[Any]:
        """Give all work to one stream of its own for a while: what warms up there can be captured there."""
        return nullcontext()


class Numbered(Accelerator):
    """A GPU of which a machine may have several, each with memory of its own; `module` is its part of torch."""

    module: ClassVar[ModuleType]

    @classmethod
    def is_available(cls) -> bool:
        """Whether torch can use one here."""
        return bool(cls.module.is_available())

    @classmethod
    def count(cls) -> int:
        """How many of its kind this process sees."""
        return int(cls.module.device_count())

    @classmethod
    def of_this_process(cls) -> Accelerator:
        """The current one."""
        return cls(torch.device(cls.kind, cls.module.current_device()))

    @property
    def properties(self) -> Any:
        """What torch knows about the device."""
        return self.module.get_device_properties(self.device)

    @property
    def total_memory(self) -> int:
        """Bytes of the device's memory, in use or not."""
        return int(self.properties.total_memory)

    @property
    def peak_memory(self) -> int:
        """Most bytes that tensors have had so far."""
        return int(torch.accelerator.max_memory_allocated(self.device))

    @property
    def name(self) -> str:
        """What its maker calls it."""
        return str(self.module.get_device_name(self.device))

    @property
    def identity(self) -> str:
        """Its number, the same from every process that sees it, where it has one."""
        return str(getattr(self.properties, "uuid", self.device.index))

    def make_current(self) -> None:
        """Let this thread compute on it where nobody says which one."""
        self.module.set_device(self.device)

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        torch.accelerator.synchronize(self.device)


class Cuda(Numbered):
    """A GPU of NVIDIA, or of AMD under ROCm."""

    kind = "cuda"
    module: ClassVar[ModuleType] = torch.cuda
    backend = "nccl"
    can_capture = True
    copies_beside = True
    has_tf32 = True
    has_kernel_choice = True

    @property
    def memory_in_use(self) -> int:
        """Bytes of tensors now."""
        return int(torch.cuda.memory_allocated(self.device))

    def memory_stats(self) -> dict[str, Any]:
        """What torch's allocator counts."""
        return torch.cuda.memory_stats(self.device)

    @property
    def free_memory(self) -> int:
        """Bytes that nobody has taken."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    @property
    def available_memory(self) -> int:
        """Bytes that tensors can still take, in what torch holds already or beyond it."""
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return self.free_memory + int(held)

    @property
    def description(self) -> str:
        """The device in words."""
        return f"cuda ({self.name})"

    @property
    def activities(self) -> list[Any]:
        """What torch's profiler can record of it."""
        return [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

    def moment(self) -> "Moment":
        """Now, as the device sees it: behind all work that it was given so far, without waiting for it."""
        return Moment(self.recorded(enable_timing=True))

    def seeder(self) -> Callable[[int], Any]:
        """Seeds the generators of the host and of this device."""
        on_host = torch.default_generator.manual_seed
        on_device = torch.cuda.default_generators[self.device.index or 0].manual_seed
        return lambda seed: (on_host(seed), on_device(seed))

    def sent(self, tensor: Tensor) -> Tensor:
        """A small tensor of the host on the device, without waiting for it."""
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def fetched(self, tensor: Tensor) -> "Arrival":
        """A copy of a tensor of the device on its way to the host, behind all work that the device was given so far."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        return Arrival(copy, self.recorded())

    def recorded(self, **options: Any) -> Any:
        """An event behind all work of the running stream."""
        event = torch.cuda.Event(**options)
        event.record()
        return event

    def new_stream(self) -> Any:
        """A stream of its own, for copies beside the computation."""
        return torch.cuda.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Give work to this stream for a while."""
        return torch.cuda.stream(stream)

    def running_stream(self) -> Any:
        """The stream that work goes to now."""
        return torch.cuda.current_stream(self.device)

    def apart(self) -> AbstractContextManager[Any]:
        """Give all work to one stream of its own for a while: what warms up there can be captured there."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def page_lock(self, buffer: Tensor) -> Callable[[], Any]:
        """Let the device write to host memory by itself; what is returned ends that.

        Not by `pin_memory`, which rounds up to a power of two.
        """
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        return partial(runtime.cudaHostUnregister, buffer.data_ptr())


class Xpu(Numbered):
    """A GPU of Intel."""

    kind = "xpu"
    module: ClassVar[ModuleType] = torch.xpu
    backend = "xccl"
    has_fused = False

    @property
    def description(self) -> str:
        """The device in words."""
        return self.kind

    def seeder(self) -> Callable[[int], Any]:
        """Seeds the generators of the host and of the device."""
        on_host = torch.default_generator.manual_seed
        on_device: Callable[[int], Any] = torch.xpu.manual_seed
        return lambda seed: (on_host(seed), on_device(seed))


class Mps(Accelerator):
    """The GPU of a Mac, which shares the memory of the host."""

    kind = "mps"
    has_fused = False
    has_float64 = False

    @classmethod
    def is_available(cls) -> bool:
        """Whether torch can use it here."""
        return bool(torch.backends.mps.is_available())

    @property
    def description(self) -> str:
        """The device in words."""
        return self.kind

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        torch.accelerator.synchronize(self.device)

    def seeder(self) -> Callable[[int], Any]:
        """Seeds the generators of the host and of the device."""
        on_host = torch.default_generator.manual_seed
        on_device: Callable[[int], Any] = torch.mps.manual_seed
        return lambda seed: (on_host(seed), on_device(seed))


KINDS: dict[str, type[Accelerator]] = {each.kind: each for each in (Cuda, Xpu, Mps, Accelerator)}
"""By name, the one to prefer first."""


class Arrival:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor, event: Any = None) -> None:
        """`event` is where it will have arrived; None where it is there already."""
        self._tensor = tensor
        self._event = event

    @property
    def is_there(self) -> bool:
        """Whether nobody has to wait for it."""
        return self._event is None

    def wait(self) -> Tensor:
        """The tensor, when it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


class Moment:
    """A point in time, by the host's clock or by an event on the device's stream."""

    def __init__(self, when: Any) -> None:
        """Seconds, or an event that measures time."""
        self._when = when

    def seconds_until(self, later: "Moment") -> float:
        """How long after this moment another one of the same device was; waits until the device has reached it."""
        if isinstance(self._when, float):
            return float(later._when - self._when)
        later._when.synchronize()
        return float(self._when.elapsed_time(later._when)) / 1000


@cache
def of(device: torch.device) -> Accelerator:
    """The device that torch calls so, with what its kind can do."""
    return KINDS.get(device.type, Accelerator)(device)


def find(kind: str = "auto") -> Accelerator:
    """The device of a kind, or the best one there is; of several, the one that is this rank's."""
    available = [name for name in KINDS if is_available(name)]
    if kind == "auto":
        kind = available[0]
    if kind == Cuda.kind:  # before cuBLAS is used: its products are then the same in every process
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if kind not in available:
        raise UserError(
            f"train.device is {kind}, but this machine offers {', '.join(available)}; use train.device=auto"
        )
    return KINDS[kind].of_this_process()


def is_available(kind: str) -> bool:
    """Whether torch can use devices of a kind here."""
    cls = KINDS[kind]
    return cls.is_available() if issubclass(cls, Numbered | Mps) else True


def every() -> list[Accelerator]:
    """Every device that torch can use here besides the CPU."""
    found = [
        of(torch.device(cls.kind, number)) for cls in (Cuda, Xpu) if cls.is_available() for number in range(cls.count())
    ]
    return found + [of(torch.device(Mps.kind))] * Mps.is_available()


def take(kind: str, number: int) -> Accelerator:
    """Take one of the devices of a kind for this process: the `number`-th, counted round."""
    found = KINDS[kind](torch.device(kind, number % KINDS[kind].count()))
    found.make_current()
    return found


def are_in_use() -> bool:
    """Whether this process has begun to use a GPU: a process that is forked from it could not."""
    return torch.cuda.is_initialized() or torch.xpu.is_initialized()


def is_capturing() -> bool:
    """Whether what is given to the device now is captured, and not computed."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def visible_gpus() -> list[str]:
    """The GPUs that a process may be given by CUDA_VISIBLE_DEVICES, as that names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(Cuda.count())] if chosen is None else chosen.split(",")


def nccl_version() -> str:
    """The version of NCCL that torch was built with."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def widest_float(device: torch.device) -> torch.dtype:
    """The floating point numbers with the most digits that a device has; MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@contextmanager
def chosen_kernels(kind: str, allow_tf32: bool, kernels: Kernels, varies: Callable[[str], None]) -> Iterator[None]:
    """Let a device take such kernels for a while, with or without TF32; `varies` is told which operations have none.

    Those of cuDNN are chosen in a way that a new process repeats, and not by their speed in this one.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    is_fastest = kernels == "fastest"
    cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = allow_tf32, not is_fastest, is_fastest
    has_choice = KINDS[kind].has_kernel_choice and kernels not in ("fastest", "by cuDNN")
    try:
        with _deterministic(varies) if has_choice else nullcontext(), strict_kernels(kernels == "strict"):
            yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


@contextmanager
def _deterministic(varies: Callable[[str], None]) -> Iterator[None]:
    """Take deterministic kernels where torch has them; `varies` is told of other operations."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    switches: Any = torch.utils.deterministic
    fills, switches.fill_uninitialized_memory = switches.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("default", message=".*does not have a deterministic implementation")
            warnings.filterwarnings("default", message=".*defaults to a non-deterministic algorithm")
            show = warnings.showwarning

            def note(message: Any, *others: Any, **options: Any) -> None:
                words = " does not have a deterministic implementation| defaults to a non-deterministic algorithm"
                found = re.match(f"(.+?)(?:{words})", str(message))
                if found is None:
                    show(message, *others, **options)
                else:
                    varies(found[1])

            warnings.showwarning = note
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        switches.fill_uninitialized_memory = fills


@contextmanager
def strict_kernels(is_wanted: bool) -> Iterator[None]:
    """Refuse operations without a deterministic kernel for a while, where deterministic ones are taken at all."""
    if not is_wanted or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    before = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=before)


def be_lenient() -> None:
    """Allow operations without a deterministic kernel after all."""
    torch.use_deterministic_algorithms(True, warn_only=True)
