"""Adam's update as one call of its kernel.

Torch collects the parameters, gradients and states of a fused optimizer anew at every step, which on a CPU takes longer
than the update of a small network. Here they are collected once, and the kernel is the same.
"""

from collections.abc import Callable
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
        self._present: list[list[bool]] | None = None

    def __call__(self) -> None:
        """Update the parameters by their gradients."""
        gradients = [[each.grad for each in group["params"]] for group in self._optimizer.param_groups]
        is_whole = all(gradient is not None for found in gradients for gradient in found)
        groups = self._collected(None if is_whole else [[each is not None for each in found] for found in gradients])
        if not groups:
            self._ordinary()
            return
        found_inf = getattr(self._optimizer, "found_inf", None)
        with torch.no_grad():
            for group, found in zip(groups, gradients, strict=True):
                group.update(found if is_whole else [each for each in found if each is not None], found_inf)

    def _collected(self, present: "list[list[bool]] | None") -> "list[_Group]":
        """The parameters with a gradient (`present`, None for all) and their states, collected where others have one.

        None before there are states, or where somebody has replaced them: torch's own step makes new ones.
        """
        is_current = bool(self._groups) and all(group.is_current(self._optimizer) for group in self._groups)
        if present != self._present or not is_current:
            self._present, self._groups = present, _groups(self._optimizer, present)
        return self._groups


def _groups(optimizer: Adam, present: list[list[bool]] | None) -> "list[_Group]":
    """All groups, or none where one is not as simple as the kernel needs it."""
    every: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
    if present is not None:
        pairs = [zip(group, flags, strict=True) for group, flags in zip(every, present, strict=True)]
        every = [[each for each, is_present in pair if is_present] for pair in pairs]
    parameters = [parameter for chosen in every for parameter in chosen]
    kinds = {(parameter.dtype, parameter.device, parameter.layout) for parameter in parameters}
    has_all = all(optimizer.state.get(parameter) for parameter in parameters)
    is_sparse = any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters)
    if len(kinds) != 1 or not has_all or is_sparse or getattr(optimizer, "grad_scale", None) is not None:
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

    def is_current(self, optimizer: Adam) -> bool:
        """Whether the states are still those of the optimizer."""
        states = optimizer.state
        return all(
            states.get(each, {}).get("exp_avg") is mean for each, mean in zip(self.parameters, self._means, strict=True)
        )

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
