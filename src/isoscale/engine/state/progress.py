"""Where a run is, as its checkpoints know it."""

from dataclasses import dataclass, field
from typing import Any

from isoscale.data.batches import Plan
from isoscale.errors import UserError
from isoscale.observe.metric_log import MetricLog


@dataclass
class Progress:
    """Where a run is, and which boundary work of the present step is done."""

    step: int = 0
    logged_at: int = 0
    evaluated_at: int = 0
    saved_at: int = 0
    ended: bool = False
    """Whether early stopping, or somebody who asked for it, has ended the training."""
    should_stop: bool = False
    """Whether a hook has asked the training to end."""
    seconds: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    """The metrics of the last evaluation."""
    skipped: int = 0
    """Steps that were left out, because a hook has skipped the rest of an epoch."""
    skipped_to: int = 0
    """The end of the last epoch of which some were left out."""

    def skip_epoch(self, step: int, steps_per_epoch: int) -> int:
        """Leave out what is left of an epoch from a step on; returns where the next one begins."""
        self.skipped_to = (step // steps_per_epoch + 1) * steps_per_epoch
        self.skipped += self.skipped_to - step
        return self.skipped_to

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All of it."""
        return {}, dict(vars(self))

    def load(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """Take over a state."""
        vars(self).update(values)


class OrderState:
    """Where the order of samples is; a checkpoint of another order is refused."""

    def __init__(self, seed: int, plan: Plan, progress: Progress) -> None:
        """The order of a seed for the batches of a plan."""
        self._seed = seed
        self._plan = plan
        self._progress = progress

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Seed, epoch and position, and the number of samples they refer to."""
        num_samples = self._plan.num_samples
        epoch, position = divmod(self._plan.place(self._progress.step), num_samples)
        return {}, {"seed": self._seed, "epoch": epoch, "position": position, "samples": num_samples}

    def load(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """Nothing to take over: the order is a function of the step. It must be the same function."""
        own = self.state()[1]
        for key, word in (("seed", "seed"), ("samples", "number of samples per epoch")):
            if own[key] != values[key]:
                raise UserError(f"the checkpoint's {word} is {values[key]}, this run's is {own[key]}")


class LogState:
    """How much of metrics.jsonl belongs to a checkpoint."""

    def __init__(self, log: MetricLog | None) -> None:
        """The length of `log`."""
        self._log = log

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its bytes; whoever writes the checkpoint brings them to the disk first."""
        return {}, {"bytes": self._log.position() if self._log else 0}

    def load(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """The log was cut to this length when it was opened."""
