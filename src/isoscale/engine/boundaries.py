"""The one place that knows the boundaries of training: where a launch must end, and what happens there."""

from dataclasses import dataclass

from isoscale.data.batches import Plan
from isoscale.engine.config import Cadence


@dataclass(frozen=True)
class Due:
    """What has to happen after a step."""

    log: bool
    epoch_end: bool
    evaluate: bool
    checkpoint: bool
    end: bool
    steers: bool = True
    """Whether the evaluation decides anything: not one that is only there to be seen."""

    @property
    def anything(self) -> bool:
        """Whether there is something to do."""
        return self.log or self.epoch_end or self.evaluate or self.checkpoint or self.end


@dataclass(frozen=True)
class Planner:
    """Boundaries as pure functions of the number of finished steps."""

    batches: Plan
    num_steps: int
    log_every: int
    evaluate: Cadence
    checkpoint: Cadence
    first: bool = False
    """Whether the first step is logged and evaluated as well, to be seen: there a learning curve begins."""

    def next_boundary(self, step: int) -> int:
        """The first step count after `step` at which something is due or the batch size changes."""
        candidates = [self.num_steps, self.batches.end_of_kind(step), _next(step, self.log_every)]
        candidates += [1] if self.first else []
        candidates += [self._next_of(cadence, step) for cadence in (self.evaluate, self.checkpoint) if _steps(cadence)]
        return min(candidate for candidate in candidates if candidate > step)

    def _next_of(self, cadence: Cadence, step: int) -> int:
        per_epoch, every = self.batches.steps_per_epoch, int(cadence.count)
        began = step - step % per_epoch if cadence.of_epoch else 0
        found = began + _next(step - began, every)
        return min(found, began + per_epoch) if cadence.of_epoch else found

    def due(self, step: int) -> Due:
        """What is due when `step` steps are finished."""
        epoch, rest = divmod(step, self.batches.steps_per_epoch)
        end, first = step >= self.num_steps, self.first and step == 1
        evaluates = self.evaluate.unit != "never"
        steers = self._due(self.evaluate, step, epoch, rest) or (end and evaluates)
        return Due(
            log=step % self.log_every == 0 or rest == 0 or end or first,
            epoch_end=rest == 0,
            evaluate=steers or (first and evaluates),
            checkpoint=self._due(self.checkpoint, step, epoch, rest) or end,
            end=end,
            steers=steers,
        )

    def _due(self, cadence: Cadence, step: int, epoch: int, rest: int) -> bool:
        if cadence.unit == "epoch":
            return rest == 0 and epoch % cadence.count == 0
        within = (rest or self.batches.steps_per_epoch) if cadence.of_epoch else step
        return cadence.unit == "step" and step > 0 and within % cadence.count == 0


def _next(step: int, every: int) -> int:
    return (step // every + 1) * every


def _steps(cadence: Cadence) -> bool:
    return cadence.unit == "step"
