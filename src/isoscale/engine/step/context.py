"""What a task does in a stage (train, val, test), and where the values go that it logs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from isoscale.data.batches import Plan
from isoscale.data.combined import CombinedPlan
from isoscale.engine.lightning.batch_hooks import around
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.lightning.transfer import transfer_of
from isoscale.engine.metrics import torchmetrics as metrics
from isoscale.engine.metrics.accumulators import Recorder
from isoscale.engine.metrics.losses import as_weighted_sum
from isoscale.engine.metrics.weighted_sum import Tally
from isoscale.engine.step.recompute import is_running
from isoscale.engine.target_units import TargetUnits
from isoscale.errors import UserError
from isoscale.parallel.collectives import Ranks

METHODS = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
_OWN_STAGE = ("train", "val", "test")


def step_method(task: Any, stage: str) -> Callable[..., Any] | None:
    """A task's method for a stage, None where it has none: only `training_step` must be there.

    Without a `test_step` a test is a validation, and without a `predict_step` the task itself predicts.
    """
    names = {"test": ("test_step", "validation_step")}.get(stage, (METHODS[stage],))
    for name in names:
        found = getattr(task, name, None)
        if callable(found) and (overrides(task, name) or not hasattr(type(task), "automatic_optimization")):
            return found  # LightningModule defines all of them, to do nothing
    if stage != "predict":
        return None
    own = getattr(task, "predict_step", None)
    return own if own is not None else partial(_predict, task)


def _predict(task: nn.Module, batch: Any, batch_idx: int) -> Any:
    if type(task).forward is nn.Module.forward:
        raise UserError(
            f"{type(task).__name__} has neither predict_step(self, batch, batch_idx) nor forward: write one"
        )
    return task(batch)


class StepContext:
    """A task in a stage: its step method, and `log` bound to the stage's recorder.

    Logged values wait in a list until the step is over: a compiled step may append to it, but not touch accumulators.
    """

    def __init__(self, name: str, task: Any, recorder: Recorder, data: Any = None) -> None:
        """The stage `name` of a task; `data` is the data module that gives its batches, which may have hooks."""
        self.name = name
        self.task = task
        self.recorder = recorder
        self.dataloader_idx: int | None = None
        """The number of the loader that gives the present batch, where several come one after the other."""
        self._data = data
        self.metrics: dict[str, Any] = {}
        """torchmetrics objects by logged name."""
        self.tallies: dict[str, Tally] = {}
        self.units = TargetUnits(task, ())
        self._pending: list[tuple[str, Any, Any, bool]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self.of_epoch: set[str] = set()
        """Names logged with `on_epoch=True`: Lightning shows their means under the bare name as well."""

    @property
    def method(self) -> Callable[..., Any]:
        """The task's method for this stage, with the hooks around it that the task defines."""
        found = step_method(self.task, self.name)
        if found is None:
            raise UserError(
                f"{type(self.task).__name__} has no {METHODS[self.name]}(self, batch, batch_idx): write one, or derive "
                "from isoscale.Task, where it is the same as in training"
            )
        transfer = transfer_of(self.task, self._data, self.recorder.buffer.device)
        return around(self.task, self.name, found, transfer, lambda: self.dataloader_idx)

    def begin_batch(self, plan: Plan, step: int) -> int:
        """Note which loader gives the batch of a step of an evaluation; returns its place in that loader."""
        if not isinstance(plan, CombinedPlan) or plan.mode != "sequential":
            return step
        self.dataloader_idx = plan.loader(step)
        return plan.batch_idx(step)

    def end_batches(self) -> None:
        """What follows belongs to no loader."""
        self.dataloader_idx = None

    def enter(self) -> None:
        """Send what the task logs here. An evaluation puts it into eval mode; in training, modes are the user's."""
        if self.name != "train" and not self._modes:
            self._modes = [(module, module.training) for module in self.task.modules()]
            self.task.eval()
        view = vars(self.task).get("_trainer")
        if view is not None:
            view.stage = self.name
        # set on the instance: this is how a LightningModule's own log, which wants a Trainer, gets out of the way
        object.__setattr__(self.task, "log", self.log)
        object.__setattr__(self.task, "log_dict", self.log_dict)
        object.__setattr__(self.task, "in_stored_units", self.units.stored_in_full)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """In the stage for a while, also where that ends in an error."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Give the task its own `log` back, and every module the mode that it had."""
        for name in ("log", "log_dict", "in_stored_units"):
            self.task.__dict__.pop(name, None)
        modes, self._modes = self._modes, []
        for module, mode in modes:
            module.training = mode

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
        if is_running():  # it was logged the first time
            return
        if reduce_fx not in ("mean", None) and getattr(reduce_fx, "__name__", "") != "mean":
            raise UserError(f"log({name!r}, reduce_fx={reduce_fx!r}): isoscale adds (sum, weight) pairs, use 'mean'")
        unknown = set(shown) - _LIGHTNING_OPTIONS
        if unknown:
            raise UserError(f"log({name!r}) got unknown options {sorted(unknown)}")
        if shown.get("on_epoch"):
            self.of_epoch.add(name)
        if self.dataloader_idx is not None and shown.get("add_dataloader_idx", True):
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
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
                self.recorder.add(name, as_weighted_sum(value, count if weight is None else weight))

    def flush_together(self, count: int, ranks: Ranks) -> None:
        """The same for what a hook has logged outside of a step, on all ranks."""
        if ranks.alone:
            self.flush(count)
            return
        record = self.recorder.begin_shard()
        self.flush(count)
        ranks.all_reduce(record, "what hooks have logged")
        self.recorder.end_shards(record)

    def forget(self) -> None:
        """Leave out what was logged and not yet recorded."""
        self._pending.clear()

    def _count(self, name: str, tally: Tally) -> None:
        if self.name == "train":
            raise UserError(f"log({name!r}): a tally belongs into validation_step and test_step, not into training")
        before = self.tallies.get(name)
        self.tallies[name] = Tally(tally.counts if before is None else before.counts + tally.counts, tally.finish)

    def full_name(self, name: str) -> str:
        """`loss` becomes `val/loss`; a name that tells its stage already, such as `val_loss`, stays as it is."""
        own = "/" in name or name.split("_")[0] in _OWN_STAGE
        return name if own else f"{self.name}/{name}"

    def computed_metrics(self) -> dict[str, float]:
        """The values of torchmetrics objects since they were reset."""
        values = {}
        for name, metric in self.metrics.items():
            values.update({name + suffix: value for suffix, value in metrics.compute(metric).items()})
        return values

    def take_metrics(self) -> dict[str, float]:
        """The values of torchmetrics objects and tallies since the last time, which they forget."""
        values = {}
        for tally in self.tallies.values():
            values.update({name: float(value) for name, value in tally.finish(tally.counts.cpu()).items()})
        self.tallies.clear()
        values.update(self.computed_metrics())
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
