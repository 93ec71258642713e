"""An exponential moving average of the weights, updated on the device after every step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """Averaged copies of a module's floating point weights."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Start from the present weights."""
        self.decay = decay
        self._names = [name for name, _ in module.named_parameters()]
        self._live: list[Tensor] = list(module.parameters())
        self._shadow = [parameter.detach().clone() for parameter in self._live]

    @property
    def tensors(self) -> list[Tensor]:
        """The averages."""
        return self._shadow

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, in one operation."""
        torch._foreach_lerp_(self._shadow, self._live, 1 - self.decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put the averages in the place of the weights for a while."""
        saved = [parameter.detach().clone() for parameter in self._live]
        self._put(self._shadow)
        try:
            yield
        finally:
            self._put(saved)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self._live, values)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The averages by weight name."""
        return dict(zip(self._names, self._shadow, strict=True)), {}

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over averages."""
        for name, shadow in zip(self._names, self._shadow, strict=True):
            shadow.copy_(tensors[name])
