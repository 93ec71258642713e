"""A look at all data of a stage together, for metrics that are no means over samples: an energy, say, that follows from
a sum over space.

The task goes through the data as often as it wants, adds up what it needs, and gets the same sums on every rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isoscale.data import keyed
from isoscale.data.batches import Batch
from isoscale.data.sources import Source
from isoscale.engine.evaluate import Interrupted
from isoscale.engine.roles import Role
from isoscale.engine.step import Forward
from isoscale.engine.task import Task
from isoscale.parallel.reduction import Reducer

Sums = list[Tensor]


class Seen(NamedTuple):
    """Some samples of a shard."""

    shard: int
    samples: Tensor
    """Their places in the source."""
    batch: Batch
    """As they are stored, on the device."""
    output: Any
    """What `predict_step` returned; a tensor is in the units of the stored target."""


@dataclass
class Survey:
    """What a task is shown of a stage's data."""

    role: str
    """val or test."""
    epoch: int
    """Epochs that were trained."""
    is_first: bool
    """Before the first step."""
    is_last: bool
    """After the last one, or apart from a training."""
    is_rehearsal: bool
    """Only a few samples are shown, to see that it works; all names must be there, their values do not count."""
    source: Source
    note: Callable[[str], None]
    """Tells the user something."""
    _forward: Forward
    _role: Role
    _make_reducer: Callable[[], Reducer | None]
    _interrupted: Callable[[], bool] = lambda: False

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return self._forward.stage.recorder.buffer.device

    def look(self) -> Iterator[Seen]:
        """This rank's samples with their predictions, in order; once for every call."""
        forward, role = self._forward, self._role
        forward.stage.enter()
        with torch.no_grad(), keyed.use(None):
            for batch_idx in range(role.plan.steps_per_epoch):
                if self._interrupted():
                    raise Interrupted
                for shard, parts in enumerate(role.feed.parts(batch_idx)):
                    for part in parts:
                        output = stored(forward.task, forward.transforms, forward(part, batch_idx))
                        yield Seen(shard, part.samples, part.batch, output)
        forward.stage.leave()

    def add(self, sums: Mapping[int, Sums], like: Callable[[], Sums]) -> Sums:
        """The sums over all shards of all ranks, from this rank's by shard; `like` makes a list of zeros."""
        reducer = self._make_reducer()
        if reducer is None:
            return sums.get(0) or like()
        for shard in sorted(sums):
            reducer.add(shard, sums[shard])
        return reducer.total(like)


def stored(task: Any, transforms: Sequence[Any], values: Any) -> Any:
    """A prediction in the units of the stored targets, where these are scaled for training."""
    target = getattr(task, "target_key", None)
    if target is None or not isinstance(values, Tensor):
        return values
    for transform in reversed(transforms):
        if getattr(transform, "key", None) == target and hasattr(transform, "inverse"):
            values = transform.inverse(values)
    return values


def surveys(task: Any) -> bool:
    """Whether a task has metrics of all data together."""
    survey = getattr(task, "survey", None)
    return survey is not None and getattr(survey, "__func__", None) is not Task.survey
