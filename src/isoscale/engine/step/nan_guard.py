"""What a step does about gradients and losses that are NaN or infinite, without the host knowing of it.

`stop`: a latch closes, and fused optimizers leave the weights alone until somebody looks. `skip`: the step is undone.
`zero`: what is not finite in the gradients is set to zero.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from isoscale.engine.state.registry import as_real

Policy = Literal["stop", "skip", "zero"]


class NanGuard:
    """Judges the gradients of each step."""

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device, scaled: bool) -> None:
        """The optimizers whose updates depend on it; scaled ones (fp16) have a judge of their own."""
        self.policy: Policy = "stop"
        self.latch = torch.zeros((), dtype=torch.float32, device=device)
        """1 once a gradient was not finite, under `stop`."""
        self.count = torch.zeros((), dtype=torch.float32, device=device)
        """Steps that were skipped, or whose gradients were mended."""
        self._bad = torch.zeros((), dtype=torch.float32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._optimizers = list(optimizers)
        self._scaled = scaled
        self._kept: list[tuple[Tensor, Tensor]] = []
        self.choose("stop")

    def choose(self, policy: Policy) -> None:
        """Do this from the next step on."""
        self.policy = policy
        if self._scaled:
            return
        for optimizer in self._optimizers:
            if optimizer.defaults.get("fused"):
                flags = {"stop": self.latch, "skip": self._bad, "zero": None}
                optimizer.found_inf = flags[policy]  # type: ignore[attr-defined]

    def begin(self, buffers: Iterable[Tensor], averages: Iterable[Tensor]) -> None:
        """Keep what a step that is not sound must not change."""
        if self.policy == "stop":
            return
        tensors = [*buffers, *(averages if self.policy == "skip" else ())]
        if self.policy == "skip":
            plain = [optimizer for optimizer in self._optimizers if not optimizer.defaults.get("fused")]
            every = [parameter for each in plain for group in each.param_groups for parameter in group["params"]]
            tensors += [parameter for parameter in every if parameter.requires_grad]
            tensors += _states(plain)
        self._kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def judge(self, gradients: Sequence[Tensor], record: Tensor) -> Tensor:
        """Look at the gradients and at what was recorded of the losses, which is returned without what is not sound."""
        if self.policy == "stop":
            return record
        self._bad.zero_()
        _note_not_finite(gradients, self._bad, self._one)
        losses_are_bad = (~torch.isfinite(record)).any().to(self._bad.dtype)
        self._bad.copy_(torch.maximum(self._bad, losses_are_bad))
        self.count.add_(self._bad)
        return torch.where(self._bad > 0, torch.zeros_like(record), record)

    def check(self, gradients: list[Tensor]) -> None:
        """Before the update: close the latch, or mend the gradients."""
        if self.policy == "stop":
            _note_not_finite(gradients, self.latch, self._one)
        elif self.policy == "zero":
            for gradient in gradients:
                torch.nan_to_num_(as_real(gradient), 0.0, 0.0, 0.0)

    @torch.no_grad()
    def end(self) -> None:
        """After the update: put back what was kept, where the step was not sound."""
        kept, self._kept = self._kept, []
        if self.policy == "zero":
            for tensor, before in kept:
                tensor.copy_(torch.where(torch.isfinite(tensor), tensor, before))
        elif self.policy == "skip":
            known = {id(tensor) for tensor, _ in kept}
            plain = [optimizer for optimizer in self._optimizers if not optimizer.defaults.get("fused")]
            made = [(tensor, torch.zeros_like(tensor)) for tensor in _states(plain) if id(tensor) not in known]
            for tensor, before in (*kept, *made):
                tensor.copy_(torch.where(self._bad.to(tensor.device) > 0, before, tensor))

    @property
    def weight(self) -> Tensor | float:
        """How much a step counts: 0 where it was skipped."""
        return 1.0 if self.policy == "stop" else 1 - self._bad


def _note_not_finite(gradients: Sequence[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set a flag to 1 if a number is not finite; the kernel knows dense real numbers only."""
    torch._amp_foreach_non_finite_check_and_unscale_([as_real(gradient) for gradient in gradients], flag, one)


def _states(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """The tensors that optimizers keep."""
    return [
        value for optimizer in optimizers for entries in optimizer.state.values()
        for value in (entries.values() if isinstance(entries, dict) else [entries]) if isinstance(value, Tensor)
    ]  # fmt: skip
