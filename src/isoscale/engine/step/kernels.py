"""Which kernels training steps take: fast ones that a new process chooses again.

cuDNN can choose its kernels by timing them, but then the bits of a run hang on chance. Its rules choose well where the
weights of convolutions are stored channels last; in three dimensions they sometimes do not, and matrix products take
their place. Torch's deterministic kernels are taken as far as the task allows it. All that is tried at the first step
of a run, which is made again without what it does not get along with; what is decided is kept.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from isoscale.engine.precision import Precision
from isoscale.engine.settings import Decisions
from isoscale.engine.state.module_state import ModuleSnapshot
from isoscale.engine.state.registry import Registry
from isoscale.engine.step.context import StepContext
from isoscale.engine.step.convolutions import as_products
from isoscale.engine.step.slow_convolutions import slow_convolutions
from isoscale.errors import UserError
from isoscale.parallel.collectives import Ranks
from isoscale.system.devices import Accelerator, be_lenient, strict_kernels

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_IN_3D = (nn.Conv3d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, *_IN_3D)
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
        is_asked: bool, undo: ExitStack,
    ) -> None:  # fmt: skip
        """With `is_asked`, the recipe demands deterministic kernels.

        Where the task updates its weights itself (not `automatic`) a step cannot be made again: nothing is tried.
        """
        self.is_new = False
        """Whether something was decided that nobody has written down yet."""
        self._task = task
        self._accelerator = accelerator
        self._decided = decided
        self._is_asked = decided.kernels == "strict" and is_asked
        can_try = automatic and accelerator.has_kernel_choice
        if decided.memory_format == "auto" and not (can_try and precision.name in ("tf32", "bf16", "fp16")):
            decided.memory_format = "contiguous"
        if decided.kernels == "auto" and not can_try:
            decided.kernels = "lenient"
        if decided.products is None and decided.memory_format == "contiguous":
            decided.products = []
        if decided.memory_format != "contiguous":
            store_channels_last(task)
        self._undo_products: Callable[[], None] = lambda: None
        if decided.products:
            self._undo_products = as_products(task, decided.products)
        undo.callback(lambda: self._undo_products())

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

    @property
    def _is_open(self) -> bool:
        decided = self._decided
        return decided.products is None or "auto" in (decided.memory_format, decided.kernels)

    def first_step(
        self, run: Callable[[], Any], look: Callable[[], Any], registry: Registry, context: StepContext, ranks: Ranks
    ) -> None:
        """Make the first step of a run, again where it does not get along with what is tried.

        `look` makes the forward pass alone.
        """
        decided = self._decided
        while self._is_open:
            before = registry.snapshot(self._accelerator.available_memory // 2)
            as_it_was, counted = ModuleSnapshot(self._task), list(context.recorder.counted)
            is_made = False
            try:
                if decided.products is None:
                    self._choose_products(look, ranks)
                else:
                    run()
                    is_made = True
                    decided.memory_format = (
                        "channels_last" if decided.memory_format == "auto" else decided.memory_format
                    )
                    decided.kernels = "strict" if decided.kernels == "auto" else decided.kernels
            except RuntimeError as error:
                self._give_up(error)
            if not is_made:
                as_it_was.restore(self._task)
                before.restore(registry)
                context.forget()
                context.recorder.counted = counted + [0.0] * (len(context.recorder.counted) - len(counted))
            self.is_new = True
            if is_made:
                return
        run()

    def _choose_products(self, look: Callable[[], Any], ranks: Ranks) -> None:
        """Compute the convolutions as matrix products that are much faster so, on the first rank's device."""
        has_any = any(isinstance(module, _IN_3D) for module in self._task.modules())
        names = slow_convolutions(self._task, look) if has_any else []
        self._decided.products = ranks.broadcast(names, "convolutions as matrix products") if has_any else []
        if self._decided.products:
            self._undo_products = as_products(self._task, self._decided.products)

    def _give_up(self, error: RuntimeError) -> None:
        """Do without what a step has refused."""
        decided = self._decided
        if decided.memory_format == "auto" and _VIEW_ERROR in str(error):
            decided.memory_format = "contiguous"
            store_channels_last(self._task, is_wanted=False)
        elif decided.kernels == "auto" and _NO_KERNEL in str(error):
            decided.kernels = "lenient"
            be_lenient()
        else:
            raise error
