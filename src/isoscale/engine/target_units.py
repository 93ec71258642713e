"""Units of targets: from the numbers that a network learns to those that are stored, and back."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from isoscale.system.devices import widest_float


class TargetUnits:
    """The transforms of a task's target, to be undone.

    A transform can be undone if it has `inverse(values)`; one that says `keeps_units` needs not be. Where another one
    comes in between, what came before it stays: the values are in the units that this one leaves.
    """

    def __init__(self, task: Any, transforms: Sequence[Any]) -> None:
        """Those among `transforms` whose `key` is the target of `task`."""
        key = target_key(task)
        changing = [each for each in transforms if key_of(each) == key and not getattr(each, "keeps_units", False)]
        lasting = [place for place, each in enumerate(changing) if not callable(getattr(each, "inverse", None))]
        self.kept: Any = changing[lasting[-1]] if lasting else None
        """The last one that cannot be undone."""
        self._undone = changing[lasting[-1] + 1 :] if lasting else changing
        self.changes = bool(changing)
        """Whether the network learns in other units than the stored ones."""

    def stored(self, values: Tensor) -> Tensor:
        """Learned values in the units of the stored target."""
        for transform in reversed(self._undone):
            values = transform.inverse(values)
        return values

    def stored_in_full(self, values: Tensor) -> Tensor:
        """The same with more digits, where there is something to undo: a small error of a large number has few left."""
        if not self._undone or not values.is_floating_point():
            return self.stored(values)
        return self.stored(values.to(widest_float(values.device)))

    def learned(self, values: Tensor) -> Tensor:
        """Stored values in the units that the network learns."""
        for transform in self._undone:
            values = transform({transform.key: values})[transform.key]
        return values


def target_key(task: Any) -> str:
    """The entry of a batch that a task predicts."""
    return str(getattr(task, "target_key", "target"))


def key_of(transform: Any) -> str | None:
    """The one entry of a batch that a transform changes, where it says so."""
    key = getattr(transform, "key", None)
    return key if isinstance(key, str) else None
