"""Which kernels training steps take: fast ones that a new process chooses again.

cuDNN can choose its kernels by timing them, but then the bits of a run hang on chance. Its rules choose well where the
weights of convolutions are stored channels last, and there torch's deterministic kernels are as fast as others. Both
are tried at the first step of a run, which is made again without what it does not allow; what is decided is kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from isoscale.engine.precision import Precision
from isoscale.engine.settings import Decisions
from isoscale.engine.state.module_state import ModuleSnapshot
from isoscale.engine.state.registry import Registry
from isoscale.engine.step.context import StepContext
from isoscale.errors import UserError
from isoscale.system.devices import Accelerator, be_lenient, strict_kernels

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_VIEW_ERROR = "view size is not compatible with input tensor's size and stride"
_NO_KERNEL = "does not have a deterministic implementation"


def store_channels_last(task: nn.Module, is_wanted: bool = True) -> None:
    """Store the weights of convolutions with their channels last, or back: what they compute comes out alike."""
    for module in task.modules():
        if isinstance(module, _CONVOLUTIONS):
            weight = module.weight
            wanted = CHANNELS_LAST[weight.dim()] if is_wanted else torch.contiguous_format
            weight.data = weight.data.contiguous(memory_format=wanted)


class KernelChoice:
    """Decides at the first step of a run, and lets every step have what was decided."""

    def __init__(
        self, task: nn.Module, accelerator: Accelerator, precision: Precision, decided: Decisions, automatic: bool,
        is_asked: bool,
    ) -> None:  # fmt: skip
        """With `is_asked`, the recipe demands deterministic kernels.

        Where the task updates its weights itself (not `automatic`) a step cannot be made again: nothing is tried.
        """
        self._task = task
        self._decided = decided
        self._is_asked = decided.kernels == "strict" and is_asked
        is_fast_so = accelerator.has_kernel_choice and precision.name in ("tf32", "bf16", "fp16")
        if decided.memory_format == "auto" and not (automatic and is_fast_so):
            decided.memory_format = "contiguous"
        if decided.kernels == "auto" and not (automatic and accelerator.has_kernel_choice):
            decided.kernels = "lenient"
        if decided.memory_format != "contiguous":
            store_channels_last(task)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say what to type where an operation has no deterministic kernel; a run that did not ask for it can go on."""
        try:
            yield
        except RuntimeError as error:
            if _NO_KERNEL not in str(error):
                raise
            operation = str(error).split(" does not have")[0]
            if self._is_asked:
                raise UserError(
                    f"train.deterministic is true, but {operation} has no deterministic kernel on this device; use "
                    "train.deterministic=auto, which only names it, or another operation"
                ) from error
            self._decided.kernels = "lenient"
            raise UserError(
                f"{operation} has no deterministic kernel, and was not met in the first step. The same command "
                "continues the run from its last checkpoint, with bits that may differ between starts"
            ) from error

    @contextmanager
    def in_steps(self) -> Iterator[None]:
        """Let training steps take deterministic kernels only, as far as that is known to be possible."""
        with strict_kernels(self._decided.kernels in ("auto", "strict")):
            yield

    def first_step(self, run: Callable[[], None], registry: Registry, context: StepContext, room: int) -> None:
        """Make the first step of a run, again where it does not get along with what is tried."""
        decided = self._decided
        while "auto" in (decided.memory_format, decided.kernels):
            before, as_it_was = registry.snapshot(room), ModuleSnapshot(self._task)
            counted = list(context.recorder.counted)
            try:
                run()
            except RuntimeError as error:
                if decided.memory_format == "auto" and _VIEW_ERROR in str(error):
                    decided.memory_format = "contiguous"
                    store_channels_last(self._task, is_wanted=False)
                elif decided.kernels == "auto" and _NO_KERNEL in str(error):
                    decided.kernels = "lenient"
                    be_lenient()
                else:
                    raise
                as_it_was.restore(self._task)
                before.restore(registry)
                context.forget()
                context.recorder.counted = counted + [0.0] * (len(context.recorder.counted) - len(counted))
                continue
            decided.memory_format = "channels_last" if decided.memory_format == "auto" else decided.memory_format
            decided.kernels = "strict" if decided.kernels == "auto" else decided.kernels
            return
        run()
