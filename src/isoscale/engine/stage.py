"""What a task does in a stage (train, val, test), and where the values go that it logs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isoscale.engine import metrics
from isoscale.engine.batch_hooks import around
from isoscale.engine.losses import as_pair
from isoscale.engine.pairs import Tally
from isoscale.engine.recorder import Recorder
from isoscale.engine.target_units import TargetUnits
from isoscale.errors import UserError

METHODS = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
_OWN_STAGE = ("train", "val", "test")


class Stage:
    """A task in a stage: its step method, and `log` bound to the stage's recorder.

    Logged values wait in a list until the step is over: a compiled step may append to it, but not touch accumulators.
    """

    def __init__(self, name: str, task: Any, recorder: Recorder) -> None:
        """The stage `name` of a task."""
        self.name = name
        self.task = task
        self.recorder = recorder
        self.metrics: dict[str, Any] = {}
        """torchmetrics objects by logged name."""
        self.tallies: dict[str, Tally] = {}
        self.units = TargetUnits(task, ())
        self._pending: list[tuple[str, Any, Any, bool]] = []

    @property
    def method(self) -> Callable[..., Any]:
        """The task's method for this stage, with the hooks around it that the task defines."""
        return around(self.task, self.name, getattr(self.task, METHODS[self.name]))

    def enter(self) -> None:
        """Send what the task logs here, and put it into the right mode."""
        self.task.train(self.name == "train")
        # set on the instance: this is how a LightningModule's own log, which wants a Trainer, gets out of the way
        object.__setattr__(self.task, "log", self.log)
        object.__setattr__(self.task, "log_dict", self.log_dict)
        object.__setattr__(self.task, "in_stored_units", self.units.stored_in_full)

    def leave(self) -> None:
        """Give the task its own `log` back."""
        for name in ("log", "log_dict", "in_stored_units"):
            self.task.__dict__.pop(name, None)

    def log(
        self,
        name: str,
        value: Any,
        weight: Tensor | float | None = None,
        *,
        batch_size: int | None = None,
        root: bool = False,
        reduce_fx: Any = "mean",
        **shown: Any,
    ) -> None:
        """Record a mean, a pair or a torchmetrics object; with `root`, the root of the mean over all is shown.

        Lightning's display options change nothing here.
        """
        if reduce_fx not in ("mean", None) and getattr(reduce_fx, "__name__", "") != "mean":
            raise UserError(f"log({name!r}, reduce_fx={reduce_fx!r}): isoscale adds (sum, weight) pairs, use 'mean'")
        unknown = set(shown) - _LIGHTNING_OPTIONS
        if unknown:
            raise UserError(f"log({name!r}) got unknown options {sorted(unknown)}")
        self._pending.append((name, value, weight if weight is not None else batch_size, root))

    def log_dict(self, dictionary: dict[str, Any], *arguments: Any, **options: Any) -> None:
        """Record several values."""
        for name, value in dictionary.items():
            self.log(name, value, *arguments, **options)

    def flush(self, count: int) -> None:
        """Move what was logged for a batch of `count` samples into the accumulators."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        for name, value, weight, root in pending:
            if root:
                self.recorder.roots.add(name)
            if metrics.is_metric(value):
                self.metrics[name] = value
            elif isinstance(value, Tally):
                self._count(name, value)
            else:
                self.recorder.add(name, as_pair(value, count if weight is None else weight))

    def _count(self, name: str, tally: Tally) -> None:
        if self.name == "train":
            raise UserError(f"log({name!r}): a tally belongs into validation_step and test_step, not into training")
        before = self.tallies.get(name)
        self.tallies[name] = Tally(tally.counts if before is None else before.counts + tally.counts, tally.finish)

    def full_name(self, name: str) -> str:
        """`loss` becomes `val/loss`; a name that tells its stage already, such as `val_loss`, stays as it is."""
        own = "/" in name or name.split("_")[0] in _OWN_STAGE
        return name if own else f"{self.name}/{name}"

    def take_metrics(self) -> dict[str, float]:
        """The values of torchmetrics objects and tallies since the last time, which they forget."""
        values = {}
        for tally in self.tallies.values():
            values.update({name: float(value) for name, value in tally.finish(tally.counts.cpu()).items()})
        self.tallies.clear()
        for name, metric in self.metrics.items():
            values.update({name + suffix: value for suffix, value in metrics.compute(metric).items()})
        for metric in self.metrics.values():  # only now: metrics of a collection may share their state
            metrics.reset(metric)
        return values


_LIGHTNING_OPTIONS = {
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "metric_attribute",
    "rank_zero_only",
}
