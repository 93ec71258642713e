"""The arithmetic of a run: which dtype the weights have, and what the step computes in."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch

from isoscale.errors import UserError
from isoscale.system.devices import KINDS, Accelerator, Kernels, chosen_kernels


@dataclass(frozen=True)
class Precision:
    """A resolved `train.precision`."""

    name: str
    device_type: str
    kernels: Kernels = "auto"
    varying: set[str] = field(default_factory=set, compare=False)
    """Operations that were met and have no deterministic kernel."""
    say: Callable[[str], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """The fastest kernels have other bits from start to start."""
        if self.kernels == "fastest" and KINDS[self.device_type].has_kernel_choice:
            self._meet("train.deterministic=false")

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and floating point inputs."""
        return torch.float64 if self.name == "64" else torch.float32

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients need loss scaling: fp16 has too small an exponent for them."""
        return self.name == "fp16"

    @cached_property
    def mixed(self) -> bool:
        """Whether the forward pass computes in another dtype than that of the weights."""
        return self.name in ("bf16", "fp16")

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward pass."""
        if not self.mixed:
            return nullcontext()
        # a cached cast would outlive the captured step that made it
        dtype = torch.bfloat16 if self.name == "bf16" else torch.float16
        return torch.autocast(self.device_type, dtype=dtype, cache_enabled=False)

    def _meet(self, operation: str) -> None:
        """An operation has no deterministic kernel."""
        if operation not in self.varying and self.say is not None:
            is_choice = operation.startswith("train.")
            why = "takes the fastest kernels" if is_choice else "has no deterministic kernel"
            advice = "" if is_choice else " (train.deterministic=true refuses it)"
            self.say(f"{operation} {why}: the bits of this run may differ between starts{advice}")
        self.varying.add(operation)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the process-wide switches of this precision, and set them back afterwards."""
        before = torch.get_float32_matmul_precision(), torch.get_default_dtype()
        torch.set_float32_matmul_precision("high" if self.name == "tf32" else "highest")
        torch.set_default_dtype(self.dtype)
        try:
            with chosen_kernels(self.device_type, self.name == "tf32", self.kernels, self._meet):
                yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.set_default_dtype(before[1])


def resolve(name: str, accelerator: Accelerator) -> Precision:
    """Decide `auto` (tf32 on CUDA, else 32) and refuse what the device cannot do."""
    kind = accelerator.kind
    if name == "auto":
        name = "tf32" if accelerator.has_tf32 else "32"
    if name == "tf32" and not accelerator.has_tf32:
        raise UserError(f"train.precision tf32 needs a CUDA device, and this is {kind}; use 32 or auto")
    if name == "64" and not accelerator.has_float64:
        raise UserError("MPS devices have no float64; use train.precision=32 or train.device=cpu")
    return Precision(name, kind)
