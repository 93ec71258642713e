"""What was recorded on several ranks, or in several shards, as the values of all together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isoscale.engine.metrics import torchmetrics as metrics
from isoscale.engine.metrics.accumulators import Recorded
from isoscale.engine.metrics.weighted_sum import Tally
from isoscale.engine.step.context import StepContext
from isoscale.parallel.collectives import Ranks
from isoscale.parallel.reduction import Reducer


@dataclass
class Kept:
    """What a rank has recorded: by what name, and where."""

    recorded: Recorded
    terms: list[str]
    metrics: dict[str, str] = field(default_factory=dict)
    tallies: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)

    def as_tuple(self) -> tuple[Any, ...]:
        """In plain values, for other ranks."""
        return tuple(self.recorded), self.terms, self.metrics, self.tallies

    @classmethod
    def read(cls, recorded: tuple[Any, ...], *others: Any) -> "Kept":
        """As another rank told it."""
        return cls(Recorded(*recorded), *others)


def add_up(context: StepContext, shards: Mapping[int, Tensor], terms: set[str], reducer: Reducer) -> set[str]:
    """Add what the shards of all ranks recorded; returns the terms of the loss. Each sum is made once, at the end."""
    recorder, ranks = context.recorder, reducer.ranks
    mine = Kept(
        recorder.recorded, sorted(terms), metrics.paths(context.task, context.metrics), _shapes(context.tallies)
    )
    every = [Kept.read(*each) for each in ranks.all_gather(mine.as_tuple(), "what was evaluated")]
    known = next((kept for kept in every if kept.recorded.names or kept.tallies), mine)
    recorder.agree([kept.recorded for kept in every], shards.values())
    for shard in sorted(shards):
        reducer.add(shard, [shards[shard]])
    recorder.end_shards(reducer.total(lambda: [recorder.fresh()])[0])
    for name, path in known.metrics.items():  # torchmetrics add up themselves, if every rank asks them to
        context.metrics.setdefault(name, context.task.get_submodule(path))
    _add_tallies(context, known.tallies, ranks)
    return set(known.terms)


def agreed_values(values: dict[str, float], recorded: bool, ranks: Ranks) -> dict[str, float]:
    """The values that a rank with samples has found, so that all decide alike."""
    if ranks.alone:
        return values
    every: list[Any] = ranks.all_gather(values if recorded else None, "the values of an evaluation")
    return next((found for found in every if found is not None), values)


def _shapes(tallies: Mapping[str, Tally]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tally.counts.shape, tally.counts.dtype) for name, tally in tallies.items()}


def _add_tallies(context: StepContext, known: Mapping[str, tuple[torch.Size, torch.dtype]], ranks: Ranks) -> None:
    for name, (shape, dtype) in known.items() if not ranks.alone else ():
        own = context.tallies.get(name)
        counts = own.counts.clone() if own else torch.zeros(shape, dtype=dtype, device=context.recorder.buffer.device)
        ranks.all_reduce(counts, "the counts of an evaluation")
        if own:
            context.tallies[name] = Tally(counts, own.finish)
