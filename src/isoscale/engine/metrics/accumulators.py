"""Accumulators for losses and metrics that live on the device and are read back once in a while.

A name's sum lives in a float64 slot on the device; so does its weight, unless it is a plain number: that is counted on
the host, where it costs no operation. Slots run from the start of an epoch; a logging window is the difference of two
readings.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isoscale.engine.metrics.weighted_sum import WeightedSum
from isoscale.errors import UserError
from isoscale.system import devices

MAX_NAMES = 256


class Recorded(NamedTuple):
    """What is recorded."""

    names: list[str]
    """In the order of their slots."""
    roots: frozenset[str]
    """Those of which the root of the mean is shown."""


class Recorder:
    """Running (sum, weight) pairs by name, for one stage (train, val or test)."""

    def __init__(self, device: torch.device) -> None:
        """Empty accumulators on a device."""
        self._buffer = torch.zeros(2, MAX_NAMES, dtype=devices.widest_float(device), device=device)
        self._sums = list(self._buffer[0].unbind())
        self._weights = list(self._buffer[1].unbind())
        self._slots: dict[str, int] = {}
        self.counted: list[float] = []
        """Weights counted on the host, by slot."""
        self.roots: set[str] = set()
        """Names of which the root of the mean is shown."""
        self._shard: Tensor | None = None
        self._last: Tensor | None = None

    @property
    def names(self) -> list[str]:
        """The names recorded so far."""
        return list(self._slots)

    @property
    def buffer(self) -> Tensor:
        """Sums and device weights (2, MAX_NAMES)."""
        return self._buffer

    def add(self, name: str, pair: WeightedSum) -> None:
        """Add a pair to a name's accumulator; never waits for the device."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._new_slot(name)
        if self._shard is not None:
            pair.add_to(self._shard[0, slot])
            self._shard[1, slot].add_(pair.weight.detach() if isinstance(pair.weight, Tensor) else pair.weight)
            return
        if self._last is not None and name != "loss":  # the engine's own, which nobody asks for by step
            mean = pair.mean.detach()
            (self._last[0, slot].copy_ if mean.device == self._last.device else self._last[0, slot].fill_)(mean)
            self._last[1, slot].fill_(1)
        pair.add_to(self._sums[slot])
        if isinstance(pair.weight, Tensor):
            self._weights[slot].add_(pair.weight.detach())
        else:
            self.counted[slot] += pair.weight

    def count(self, weights: Sequence[float]) -> None:
        """Count on the host what a replayed step weighs; names that were logged since it was captured have no part."""
        missing = [0.0] * (len(self.counted) - len(weights))
        self.counted = [total + more for total, more in zip(self.counted, [*weights, *missing], strict=True)]

    def add_extreme(self, name: str, value: Any, word: str) -> None:
        """Keep the largest or smallest value of a name: `word` is max or min."""
        if self._shard is not None:
            raise UserError(
                f"log({name.rpartition(':')[0]!r}, reduce_fx={word!r}): on several ranks, or where a batch is computed "
                f"in parts, only means and sums are added up; log a torchmetrics.{word.title()}Metric instead"
            )
        slot = self._slots.get(name)
        if slot is None:
            slot = self._new_slot(name)
        kept, weight = self._sums[slot], self._weights[slot]
        given = torch.zeros_like(kept).add_(value.detach().reshape(()) if isinstance(value, Tensor) else value)
        further = torch.maximum(kept, given) if word == "max" else torch.minimum(kept, given)
        kept.copy_(torch.where(weight == 0, given, further))
        weight.fill_(1)

    def keep_last(self) -> None:
        """Remember the pairs of the last step, besides."""
        self._last = torch.zeros_like(self._buffer)

    def last(self) -> dict[str, tuple[float, float]]:
        """(sum, weight) of each name at the last step that has recorded it; waits for the device."""
        if self._last is None:
            return {}
        sums, weights = self._last[:, : len(self._slots)].tolist()
        pairs = dict(zip(self.names, zip(sums, weights, strict=True), strict=True))
        return {name: pair for name, pair in pairs.items() if pair[1]}

    def _new_slot(self, name: str) -> int:
        if len(self._slots) == MAX_NAMES - 1:  # the last slot is the flag's
            raise UserError(f"more than {MAX_NAMES - 1} names are logged; {name!r} is one too many")
        self._slots[name] = len(self.counted)
        self.counted.append(0.0)
        return self._slots[name]

    def fresh(self) -> Tensor:
        """Empty accumulators."""
        return torch.zeros_like(self._buffer)

    def begin_shard(self, accumulators: Tensor | None = None) -> Tensor:
        """Collect what follows in accumulators of its own, which travel through a reduction."""
        self._shard = self.fresh() if accumulators is None else accumulators
        return self._shard

    def end_shards(self, total: Tensor) -> None:
        """Add the sum over all shards."""
        self._shard = None
        self._buffer.add_(total)
        if self._last is not None:
            self._last.copy_(torch.where(total[1] != 0, total, self._last))

    @property
    def recorded(self) -> Recorded:
        """What this rank has recorded so far."""
        return Recorded(self.names, frozenset(self.roots))

    def agree(self, every: Sequence[Recorded], shards: Iterable[Tensor] = ()) -> None:
        """Give each name the slot that it has on all ranks: some met names in another order, or without samples none.

        `shards` are accumulators of this rank that are still to be added up.
        """
        before, counted = self.names, self.counted
        self.roots.update(*(each.roots for each in every))
        names = dict.fromkeys(name for each in every for name in each.names)
        if list(names) == before:
            return
        self._slots, self.counted = {}, []
        slots = {name: self._new_slot(name) for name in names}
        for tensor in (self._buffer, *([] if self._last is None else [self._last]), *shards):
            own = tensor[:, : len(before)].clone()
            tensor.zero_()
            tensor[:, [slots[name] for name in before]] = own
        for name, weight in zip(before, counted, strict=True):
            self.counted[slots[name]] = weight

    def means(self, total: Tensor, names: list[str]) -> dict[str, Tensor]:
        """The means of names in the sum over shards, on the device."""
        means = total[0] / total[1]
        return {name: means[self._slots[name]] for name in names}

    def read(self, flag: Tensor | None = None, count: Tensor | None = None) -> "Reading":
        """Start copying the accumulators, a flag and a count with them, to the host; does not wait for them."""
        if flag is not None:
            self._weights[-1].copy_(flag)
        if count is not None:
            self._sums[-1].copy_(count)
        return Reading(self.names, list(self.counted), self._buffer)

    def shown(self, means: Mapping[str, float]) -> dict[str, float]:
        """Means as people see them."""
        return {name: math.sqrt(max(value, 0.0)) if name in self.roots else value for name, value in means.items()}

    def reset(self) -> None:
        """Set every accumulator to zero."""
        self._buffer.zero_()
        self.counted = [0.0] * len(self.counted)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What continuing needs."""
        last = {} if self._last is None else {"last": self._last}
        values = {"names": self.names, "counted": self.counted, "roots": sorted(self.roots)}
        return {"buffer": self._buffer, **last}, values

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take over a state."""
        self._buffer.copy_(tensors["buffer"])
        if self._last is not None and "last" in tensors:
            self._last.copy_(tensors["last"])
        self._slots = {name: slot for slot, name in enumerate(values["names"])}
        self.counted = list(values["counted"])
        self.roots = set(values.get("roots", ()))


class Reading:
    """A copy of the accumulators on its way to the host."""

    def __init__(self, names: list[str], counted: list[float], buffer: Tensor) -> None:
        """Enqueue the copy, behind the steps that were enqueued before."""
        self._names = names
        self._counted = counted
        self._copy = devices.of(buffer.device).fetched(buffer)

    @property
    def arrived(self) -> bool:
        """Whether the copy needs no waiting for."""
        return self._copy.is_there

    @property
    def flag(self) -> bool:
        """The flag that was read with the accumulators."""
        return bool(self._copy.wait()[1, -1] != 0)

    @property
    def count(self) -> int:
        """The count that was read with the accumulators."""
        return int(self._copy.wait()[0, -1])

    def pairs(self) -> dict[str, tuple[float, float]]:
        """(sum, weight) by name; waits for the copy if it is still under way."""
        sums, weights = self._copy.wait()[:, : len(self._names)].tolist()
        totals = (counted + weight for counted, weight in zip(self._counted, weights, strict=True))
        return dict(zip(self._names, zip(sums, totals, strict=True), strict=True))


def means(pairs: Mapping[str, tuple[float, float]], before: Mapping[str, tuple[float, float]] = {}) -> dict[str, float]:
    """The means of pairs, or of what was added to them since `before`; a name with no weight is left out."""
    found = {}
    for name, (total, weight) in pairs.items():
        earlier_total, earlier_weight = before.get(name, (0.0, 0.0))
        if weight != earlier_weight:
            found[name] = (total - earlier_total) / (weight - earlier_weight)
    return found
