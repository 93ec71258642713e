"""Adam's update as one call of its kernel.

Torch collects the parameters, gradients and states of a fused optimizer anew at every step, which on a CPU takes longer
than the update of a small network. Here they are collected once, and the kernel is the same.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam


class FusedAdam:
    """The step of a fused Adam or AdamW; what is out of the ordinary is left to torch's own."""

    def __init__(self, optimizer: Adam, ordinary: Callable[[], Any]) -> None:
        """`ordinary` is torch's step, which makes the states at first."""
        self._optimizer = optimizer
        self._ordinary = ordinary
        self._groups: list[_Group] = []
        self._known: Any = None
        self._present: list[list[bool]] | None = None

    def __call__(self) -> None:
        """Update the parameters by their gradients."""
        gradients = [[each.grad for each in group["params"]] for group in self._optimizer.param_groups]
        missing = sum(found.count(None) for found in gradients)
        groups = self._collected(missing, gradients)
        if not groups:
            self._ordinary()
            return
        found_inf = getattr(self._optimizer, "found_inf", None)
        with torch.no_grad():
            for group, found in zip(groups, gradients, strict=True):
                group.update([each for each in found if each is not None] if missing else found, found_inf)

    def _collected(self, missing: int, gradients: list[list[Tensor | None]]) -> "list[_Group]":
        """The parameters with a gradient and their states; collected again where others have one, or other states."""
        present = [[gradient is not None for gradient in found] for found in gradients] if missing else None
        first = next(self._first_of(present), None)
        state = None if first is None else self._optimizer.state.get(first, {}).get("exp_avg")
        if state is None or state is not self._known or present != self._present:
            self._known, self._present = state, present
            self._groups = [] if state is None else _groups(self._optimizer, present)
        return self._groups

    def _first_of(self, present: list[list[bool]] | None) -> Iterator[Tensor]:
        """The parameters that have a gradient."""
        for number, group in enumerate(self._optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if present is None or present[number][place]:
                    yield parameter


def _groups(optimizer: Adam, present: list[list[bool]] | None) -> "list[_Group]":
    """All groups, or none where one is not as simple as the kernel needs it."""
    every = [
        [each for place, each in enumerate(group["params"]) if present is None or present[number][place]]
        for number, group in enumerate(optimizer.param_groups)
    ]
    parameters = [parameter for chosen in every for parameter in chosen]
    kinds = {(parameter.dtype, parameter.device, parameter.layout) for parameter in parameters}
    has_all = all(optimizer.state.get(parameter) for parameter in parameters)
    is_sparse = any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters)
    if len(kinds) > 1 or not has_all or is_sparse or getattr(optimizer, "grad_scale", None) is not None:
        return []
    return [_Group(optimizer, group, chosen) for group, chosen in zip(optimizer.param_groups, every, strict=True)]


class _Group:
    """Parameters that share their settings, with their states."""

    def __init__(self, optimizer: Adam, settings: dict[str, Any], parameters: list[Tensor]) -> None:
        self.parameters = parameters
        states = [optimizer.state[parameter] for parameter in self.parameters]
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
        self._means, self._squares, self._largest, self._counters = (
            [state[name] for state in states if name in state] for name in names
        )
        self._settings = settings
        is_decoupled = settings.get("decoupled_weight_decay")
        self._kernel = torch._fused_adamw_ if is_decoupled else torch._fused_adam_

    def update(self, gradients: list[Any], found_inf: Tensor | None) -> None:
        """One call of the kernel, which does nothing where `found_inf` is 1; the counters then stay as well."""
        settings = self._settings
        if not gradients:
            return
        torch._foreach_add_(self._counters, 1)
        self._kernel(
            self.parameters, gradients, self._means, self._squares, self._largest, self._counters,
            amsgrad=settings["amsgrad"], lr=settings["lr"], beta1=settings["betas"][0], beta2=settings["betas"][1],
            weight_decay=settings["weight_decay"], eps=settings["eps"], maximize=settings["maximize"],
            grad_scale=None, found_inf=found_inf,
        )  # fmt: skip
        if found_inf is not None:
            torch._foreach_sub_(self._counters, [found_inf] * len(self._counters))
