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
        self._known: Any = None

    def __call__(self) -> None:
        """Update the parameters by their gradients."""
        groups = self._collected()
        gradients = [[parameter.grad for parameter in group.parameters] for group in groups]
        if not groups or any(gradient is None for each in gradients for gradient in each):
            self._ordinary()
            return
        found_inf = getattr(self._optimizer, "found_inf", None)
        with torch.no_grad():
            for group, found in zip(groups, gradients, strict=True):
                group.update(found, found_inf)

    def _collected(self) -> "list[_Group]":
        """The groups, collected again where somebody has replaced the states; none before there are states."""
        state = self._optimizer.state
        first = state.get(self._optimizer.param_groups[0]["params"][0], {}).get("exp_avg")
        if first is None or first is not self._known:
            self._known = first
            self._groups = [] if first is None else _groups(self._optimizer)
        return self._groups


def _groups(optimizer: Adam) -> "list[_Group]":
    """All groups, or none where one is not as simple as the kernel needs it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kinds = {(parameter.dtype, parameter.device, parameter.layout) for parameter in parameters}
    has_all = all(optimizer.state.get(parameter) for parameter in parameters)
    is_sparse = any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters)
    if len(kinds) > 1 or not has_all or is_sparse or getattr(optimizer, "grad_scale", None) is not None:
        return []
    return [_Group(optimizer, group) for group in optimizer.param_groups]


class _Group:
    """Parameters that share their settings, with their states."""

    def __init__(self, optimizer: Adam, settings: dict[str, Any]) -> None:
        self.parameters: list[Tensor] = settings["params"]
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
        torch._foreach_add_(self._counters, 1)
        self._kernel(
            self.parameters, gradients, self._means, self._squares, self._largest, self._counters,
            amsgrad=settings["amsgrad"], lr=settings["lr"], beta1=settings["betas"][0], beta2=settings["betas"][1],
            weight_decay=settings["weight_decay"], eps=settings["eps"], maximize=settings["maximize"],
            grad_scale=None, found_inf=found_inf,
        )  # fmt: skip
        if found_inf is not None:
            torch._foreach_sub_(self._counters, [found_inf] * len(self._counters))
