"""Step programs: how the steps of a launch run. All of them give the same bits where they use the same kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from isoscale.data.batches import Plan
from isoscale.data.feeds.feed import Feed, Part
from isoscale.engine.diagnose.profile import Profile
from isoscale.engine.lightning.batch_hooks import SkipEpoch
from isoscale.engine.optim.loss_weights import WeightCurve
from isoscale.engine.optim.own_update import OwnUpdate
from isoscale.engine.optim.schedules import LearningRate
from isoscale.engine.step.step import Step
from isoscale.system import devices


class Program(Protocol):
    """Runs training steps."""

    profile: Profile | None
    """Told when steps begin, where somebody wants to know where time goes."""

    def run(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """Run steps `start` to `stop`, all of one batch size; returns where it stopped, earlier if interrupted."""

    def run_visibly(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """The same, but the last step leaves its gradients in the parameters."""

    def run_eagerly(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """The same, but every step is issued anew, because it may do something else than others."""


@dataclass
class Inputs:
    """What changes from step to step besides the samples: learning rate and loss weights."""

    rate: LearningRate
    weights: Mapping[str, WeightCurve]
    num_steps: int
    """Steps of the whole run."""
    device: torch.device
    tensor_lr: bool
    own_lr: bool = False
    """Whether the task sets the learning rate itself."""
    own: OwnUpdate | None = None
    """The update by an optimizer of the task's own, where it can be captured."""

    def rates(self, start: int, count: int) -> list[Any]:
        """The learning rate of `count` steps: tensors where the optimizer takes them."""
        if self.own_lr:
            return [None] * count
        values = [self.rate(step) for step in range(start, start + count)]
        return list(self.sent(values).unbind()) if self.tensor_lr else values

    def numbers(self, step: int) -> list[float]:
        """What the update of a step is fed with: the learning rate, or all that a scheduler of the task's own moves."""
        return [self.rate(step)] if self.own is None else self.own.read()

    def rate_of(self, row: Tensor) -> Tensor | None:
        """What a step is told of such numbers, on the device; nothing where they are constants."""
        if self.own is None:
            return row[0]
        return None if self.own.constant else row

    def record(self, start: int, count: int) -> Callable[[], list[list[float]]]:
        """Note what eager steps are fed with from here on; whoever calls what is returned gets it, and ends that."""
        own = self.own
        if own is None:
            return lambda: [self.numbers(step) for step in range(start, start + count)]
        used: list[list[float]] = []
        own.used = used

        def end() -> list[list[float]]:
            own.used = None
            return used if not own.constant else [[]] * count

        return end

    def weight_rows(self, start: int, count: int) -> Tensor:
        """Loss weights (count, terms) on the device."""
        rows = [[weight(step) for weight in self.weights.values()] for step in range(start, start + count)]
        return self.sent(rows).view(count, len(self.weights))

    def named(self, row: Tensor) -> dict[str, Tensor]:
        """A row of loss weights by term."""
        return dict(zip(self.weights, row.unbind(), strict=True)) if self.weights else {}

    def sent(self, values: Any) -> Tensor:
        """Numbers on the device."""
        return devices.of(self.device).sent(torch.tensor(values, dtype=torch.float32))


class EagerProgram:
    """Every operation is issued from Python; the step may be compiled in its parts."""

    def __init__(
        self,
        step: Step,
        feed: Feed,
        plan: Plan,
        inputs: Inputs,
        steps_per_launch: int = 1,
        after_step: Callable[[int], None] | None = None,
        before_fetch: Callable[[int], None] | None = None,
        time: Tensor | None = None,
        first_step: Callable[[Callable[[], Any], Callable[[], Any]], None] | None = None,
        skip_epoch: Callable[[int], int] | None = None,
    ) -> None:
        """Looks for interruptions every `steps_per_launch` steps; `after_step` is told the number of finished steps.

        `before_fetch` is told the number of the step whose samples are read next. `time` is a tensor to keep the step
        number in: a compiled step would be compiled anew for every plain number. `first_step` makes the first step
        that is handed to it, beside its forward pass alone. `skip_epoch` is told at which step a hook has skipped the
        rest of an epoch, and says where to go on.
        """
        self._skip_epoch = skip_epoch
        self._first_step = first_step
        self._begun = 0
        self.profile: Profile | None = None
        self._time = time
        self.fetch = feed.parts if before_fetch is None else _told(before_fetch, feed.parts)
        """Reads the parts of a step."""
        self._after_step = after_step
        self.step = step
        self._feed = feed
        self._plan = plan
        self._inputs = inputs
        self._steps_per_launch = steps_per_launch

    def run(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """Run steps one by one; returns a step beyond `stop` where the rest of an epoch is skipped."""
        try:
            return self.run_all(start, stop, interrupted)
        except SkipEpoch:
            return self.skip_from(self._begun)

    def skip_from(self, number: int) -> int:
        """Skip the rest of the epoch from a step on that was begun; returns where the next one begins."""
        assert self._skip_epoch is not None
        recorder = self.step.recorder
        recorder.end_shards(recorder.fresh())  # which the step may have begun
        return self._skip_epoch(number)

    def run_all(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """The same, but whoever calls it hears of a SkipEpoch."""
        rates = self._inputs.rates(start, stop - start)
        rows = self._inputs.weight_rows(start, stop - start) if self._inputs.weights else None
        for offset, number in enumerate(range(start, stop)):
            if offset % self._steps_per_launch == 0 and interrupted():
                return number
            weights = {} if rows is None else self._inputs.named(rows[offset])
            if self.profile is not None:
                self.profile.begin()
            self._issue(self.fetch(number), number, rates[offset], weights)
            self.finish(number)
        return stop

    def run_on(self, shards: list[list[Part]], number: int) -> None:
        """Run one step on parts that are read already; what follows it is left to `finish`."""
        if self.profile is not None:
            self.profile.begin()
        self._issue(shards, number, self._inputs.rates(number, 1)[0], self._weights(number))

    def finish(self, number: int) -> None:
        """What follows a step: schedulers, hooks."""
        if self._after_step is not None:
            self._after_step(number + 1)

    def repeat(self, shards: list[list[Part]], number: int, numbers: list[float]) -> None:
        """Run a step again with the numbers that it had before; nobody else hears of it."""
        self._issue(shards, number, self._inputs.rate_of(self._inputs.sent(numbers)), self._weights(number))

    def _weights(self, number: int) -> dict[str, Tensor]:
        return self._inputs.named(self._inputs.weight_rows(number, 1)[0]) if self._inputs.weights else {}

    def _issue(self, shards: list[list[Part]], number: int, rate: Any, weights: dict[str, Tensor]) -> None:
        self._begun = number
        time = number if self._time is None else self._time.fill_(number)
        batch_idx = number % self._plan.steps_per_epoch
        if self._first_step is None:
            self.step(shards, number, batch_idx, rate, weights, time)
            return
        first_step, self._first_step = self._first_step, None
        first_step(
            lambda: self.step(shards, number, batch_idx, rate, weights, time),
            lambda: self.step.look(shards, number, batch_idx, time),
        )

    run_visibly = run_eagerly = run


def _told(before: Callable[[int], None], parts: Callable[[int], Any]) -> Callable[[int], Any]:
    def fetch(step: int) -> Any:
        before(step)
        return parts(step)

    return fetch


class ManualProgram:
    """A task that updates its weights itself (manual optimisation): its step method is called, and no more."""

    def __init__(
        self,
        forward: Callable[[Part, int], Any],
        random: Any,
        reseed: Any,
        feed: Feed,
        plan: Plan,
        before_step: Callable[[int], None],
        after_step: Callable[[int, Any], None],
        skip_epoch: Callable[[int], int],
    ) -> None:
        """Run `forward` on whole batches; `after_step` is told the number of finished steps, and what it returned.

        `skip_epoch` is told at which step a hook has skipped the rest of an epoch, and says where to go on.
        """
        self._skip_epoch = skip_epoch
        self.profile: Profile | None = None
        self._before_step = before_step
        self._after_step = after_step
        self._forward = forward
        self._random = random
        self._reseed = reseed
        self._feed = feed
        self._plan = plan

    def run(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """Run steps one by one."""
        for number in range(start, stop):
            if interrupted():
                return number
            if self.profile is not None:
                self.profile.begin()
            self._before_step(number)
            part = next(part for shard in self._feed.parts(number) for part in shard)
            self._reseed(number, 0)
            self._random.step, self._random.samples = number, part.samples
            try:
                output = self._forward(part, number % self._plan.steps_per_epoch)
            except SkipEpoch:
                return self._skip_epoch(number)
            self._after_step(number + 1, output)
            if self.profile is not None:
                self.profile("step")  # the task computes, differentiates and updates as it likes
        return stop

    run_visibly = run_eagerly = run
