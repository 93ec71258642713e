"""What a task does in a stage (train, val, test), and where the values go that it logs."""

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from isoscale.data.batches import Plan
from isoscale.data.combined import CombinedPlan
from isoscale.engine.lightning.batch_hooks import around
from isoscale.engine.lightning.log_options import LogOptions, checked, refuse_silent
from isoscale.engine.lightning.module import is_lightning_module
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.lightning.trainer_metrics import Shown, TrainerMetrics
from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.engine.lightning.transfer import transfer_of
from isoscale.engine.metrics import torchmetrics as metrics
from isoscale.engine.metrics.accumulators import Recorded, Recorder, means
from isoscale.engine.metrics.losses import as_weighted_sum
from isoscale.engine.metrics.weighted_sum import Tally, WeightedSum
from isoscale.engine.step.recompute import is_running
from isoscale.engine.target_units import TargetUnits
from isoscale.errors import UserError
from isoscale.parallel.collectives import Ranks

METHODS = {"train": "training_step", "val": "validation_step", "test": "test_step", "predict": "predict_step"}
_STAGES = {"val": "validation", "test": "test", "predict": "predict"}
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
        self._pending: list[tuple[Any, ...]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._is_lightning = is_lightning_module(task)
        self.options: dict[str, LogOptions] = {}
        """How a LightningModule logs, by the name of the accumulator."""
        self.shown = TrainerMetrics()
        """What `self.trainer` shows of it."""
        self.hidden: set[str] = set()
        """Names of the last evaluation that no logger gets."""
        if self._is_lightning and name == "train":
            recorder.keep_last()

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
            self._call_mode_hook("eval", self.task.eval)
        view = self._view
        if view is not None:
            view.stage = self.name
            self.shown = view.metrics
        if view is not None and self.name == "train":
            view.metrics.of_step = self.of_step
        # set on the instance: this is how a LightningModule's own log, which wants a Trainer, gets out of the way
        object.__setattr__(self.task, "log", self.log_as_lightning if self._is_lightning else self.log)
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

        def put_back() -> None:
            for module, mode in modes:
                module.training = mode

        if modes:
            self._call_mode_hook("train", put_back)

    def _call_mode_hook(self, mode: str, otherwise: Callable[[], Any]) -> None:
        """Let the task set modes itself (`on_validation_model_eval`, say), where it defines how."""
        name = f"on_{_STAGES[self.name]}_model_{mode}"
        (getattr(self.task, name) if overrides(self.task, name) else otherwise)()

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
        if self.dataloader_idx is not None and shown.get("add_dataloader_idx", True):
            name = f"{name}/dataloader_idx_{self.dataloader_idx}"
        self._wait(name, value, weight if weight is not None else batch_size, root)

    def log_as_lightning(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """`self.log` of a LightningModule; all ranks are always added up (`sync_dist`).

        What the options mean is looked at when the step is over, and by then it is known how many samples it had.
        """
        view = self._view
        hook = METHODS[self.name] if view is None or view.hook is None else view.hook
        refuse_silent(name, hook)
        if enable_graph:
            raise UserError(f"log({name!r}, enable_graph=True): logged values are detached; keep the tensor as it is")
        if sync_dist_group is not None:
            raise UserError(f"log({name!r}, sync_dist_group=…): all ranks are added up, leave it out")
        is_one_of_many = add_dataloader_idx and self.dataloader_idx is not None
        suffix = f"/dataloader_idx_{self.dataloader_idx}" if is_one_of_many else ""
        how = (hook, on_step, on_epoch, prog_bar, logger, reduce_fx, suffix)
        is_mine = not rank_zero_only or view is None or view.is_global_zero
        self._wait(name, value, batch_size, (how, metric_attribute, is_mine))

    def _wait(self, *entry: Any) -> None:
        """Keep what is logged until the step is over; where activations are computed again, it was logged before."""
        if not is_running():
            self._pending.append(entry)

    def log_dict(self, dictionary: Any, *arguments: Any, **options: Any) -> None:
        """Record several values, or the metrics of a MetricCollection."""
        log = self.log_as_lightning if self._is_lightning else self.log
        is_collection = self._is_lightning and hasattr(dictionary, "compute_groups")
        items = dictionary.items(keep_base=False, copy_state=False) if is_collection else dictionary.items()
        for name, value in items:
            log(name, value, *arguments, **options)

    def flush(self, count: int) -> None:
        """Move what was logged for a batch of `count` samples into the accumulators."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        for name, value, weight, rest in pending:
            if self._is_lightning and isinstance(rest, tuple):
                self._record(name, value, weight, count, *rest)
                continue
            if rest:
                self.recorder.roots.add(name)
            if metrics.is_metric(value):
                self.metrics[name] = value
            elif isinstance(value, Tally):
                self._count(name, value)
            else:
                self.recorder.add(name, as_weighted_sum(value, count if weight is None else weight))

    def _record(
        self, name: str, value: Any, weight: Any, count: int, how: tuple[Any, ...], attribute: str | None, is_mine: bool
    ) -> None:
        """Record what a LightningModule has logged, as its options say."""
        hook, *rest = how
        options = checked(name, hook, *rest)
        key = _key(options, METHODS[self.name])
        if self.options.setdefault(key, options) != options:
            raise UserError(f"log({name!r}) was called twice in {hook} with different options, which cannot both hold")
        if metrics.is_metric(value):
            if attribute is None and not any(value is module for module in self.task.modules()):
                raise UserError(
                    f"log({name!r}): the metric is no attribute of the module, so that nothing would save it: make it "
                    "one in __init__"
                )
            self.metrics[key] = value
            value = value._forward_cache
            if not options.on_step or not isinstance(value, Tensor) or value.numel() != 1:
                return
        elif isinstance(value, Tally):
            self._count(name, value)
            return
        else:
            _check_value(name, value)
        if weight is None:
            weight = 1 if options.is_of_epoch else count
        if options.reduce == "mean" or options.on_step:
            pair = as_weighted_sum(float(value) if isinstance(value, bool | np.number) else value, weight)
            self.recorder.add(key, pair if is_mine else WeightedSum(pair.sum * 0, 0))
        if options.reduce == "sum" and options.on_epoch:
            self.recorder.add(f"{key}:sum", as_weighted_sum(value if is_mine else 0.0, 1))
        elif options.reduce != "mean" and options.on_epoch:
            self.recorder.add_extreme(f"{key}:{options.reduce}", value, options.reduce)

    def flush_together(self, count: int, ranks: Ranks, agree: bool = False) -> None:
        """The same for what a hook has logged outside of a step, on all ranks, which may `agree` first on names."""
        if self.name == "train" and not agree:  # of a step that somebody may have looked at
            self.shown.finish_step()
        if ranks.alone:
            self.flush(count)
            return
        record = self.recorder.begin_shard()
        self.flush(count)
        if agree:
            every = ranks.all_gather(tuple(self.recorder.recorded), "what hooks log")
            self.recorder.agree([Recorded(*each) for each in every], [record])
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

    def of_window(self, values: Mapping[str, float]) -> dict[str, float]:
        """The means over a window by the names that people see."""
        named: dict[str, float] = {}
        for key, value in values.items():
            options = self.options.get(key)
            if options is None and not _is_of_epoch_alone(key, self.options):
                named.setdefault(self.full_name(key), value)  # a module may call its own so
            elif options is not None and options.on_step and options.logger:
                named[self._own(options.step_name)] = value
        return named

    def _own(self, name: str) -> str:
        """The name of a value of training: where a validation has one of that name, it is the validation's."""
        return f"{self.name}/{name}" if self.name == "train" and name in self.shown.validated else name

    def of_epoch(self, pairs: Mapping[str, tuple[float, float]]) -> "OfEpoch":
        """The values of an epoch or an evaluation, of which the sums are given, with those of torchmetrics."""
        found, computed = self.recorder.shown(means(pairs)), self.computed_metrics()
        result = OfEpoch()
        for key, value in found.items():
            options = self.options.get(key)
            if options is None and not _is_of_epoch_alone(key, self.options):
                result.values.setdefault(self._full_name_of_epoch(key), value)
            elif options is not None and key not in computed and (options.reduce == "mean" or not options.on_epoch):
                self._tell(result, options, "", value)
        for key, options in self.options.items():
            slot = f"{key}:{options.reduce}"
            if slot in found:
                self._tell(result, options, "", pairs[slot][0] if options.reduce == "sum" else found[slot])
        for key, by_suffix in computed.items():
            for suffix, value in by_suffix.items():
                if key in self.options:
                    self._tell(result, self.options[key], suffix, value)
                else:
                    result.values[self._full_name_of_epoch(key + suffix)] = value
        return result

    def _full_name_of_epoch(self, key: str) -> str:
        return self.full_name(key) + "_epoch" * (self.name == "train")

    def _tell(self, result: "OfEpoch", options: LogOptions, suffix: str, value: float) -> None:
        """A value of an epoch; one that was logged for steps alone is kept beside them, in training as `_epoch`."""
        name = self._own(options.epoch_name + suffix) if options.on_epoch else (
            self._own(options.step_name + suffix) + "_epoch" * (self.name == "train")
        )  # fmt: skip
        result.values[name] = value
        if not options.logger:
            result.hidden.add(name)
        if not options.on_epoch:
            return
        result.shown.callback.update({options.bare_name + suffix: value, options.epoch_name + suffix: value})
        if options.logger:
            result.shown.logged[options.epoch_name + suffix] = value
        if options.prog_bar:
            result.shown.progress_bar[options.epoch_name + suffix] = value

    def of_step(self) -> Shown:
        """The values of the last step that were logged for steps."""
        shown = Shown()
        for key, (total, weight) in self.recorder.last().items():
            options = self.options.get(key)
            if options is None or not options.on_step:
                continue
            value = total if options.reduce == "sum" else total / weight
            shown.callback.update({options.bare_name: value, options.step_name: value})
            if options.logger:
                shown.logged[options.step_name] = value
            if options.prog_bar:
                shown.progress_bar[options.step_name] = value
        return shown

    @property
    def _view(self) -> TrainerView | None:
        found = vars(self.task).get("_trainer")
        return found if isinstance(found, TrainerView) else None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What was recorded, and how a LightningModule logs it."""
        tensors, values = self.recorder.state()
        if not self._is_lightning:
            return tensors, values
        options = {key: each.as_dict() for key, each in self.options.items()}
        return tensors, {**values, "options": options, "shown": self.shown.state()}

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over a state; earlier versions knew of no options."""
        self.recorder.load(tensors, values)
        self.options = {key: LogOptions(**each) for key, each in values.get("options", {}).items()}
        if "shown" in values:
            self.shown.load(values["shown"])

    def computed_metrics(self) -> dict[str, dict[str, float]]:
        """The values of torchmetrics objects since they were reset, by suffix: "" for one number."""
        return {name: metrics.compute(metric) for name, metric in self.metrics.items()}

    def take_tallies(self) -> dict[str, float]:
        """The values of tallies since the last time, which they forget."""
        values = {}
        for tally in self.tallies.values():
            values.update({name: float(value) for name, value in tally.finish(tally.counts.cpu()).items()})
        self.tallies.clear()
        return values

    def reset_metrics(self) -> None:
        """Let torchmetrics objects begin anew; only when all are computed: those of a collection may share state."""
        for metric in self.metrics.values():
            metrics.reset(metric)


@dataclass
class OfEpoch:
    """The values of an epoch or an evaluation."""

    values: dict[str, float] = field(default_factory=dict)
    """By the names that people see."""
    hidden: set[str] = field(default_factory=set)
    """Those of them that no logger gets."""
    shown: Shown = field(default_factory=Shown)


def _key(options: LogOptions, method: str) -> str:
    """The name of an accumulator: that of the value, unless another hook or the engine's own loss may have it."""
    name = options.bare_name
    return name if options.hook == method and name != "loss" else f"{options.hook}.{name}"


def _is_of_epoch_alone(key: str, options: Mapping[str, LogOptions]) -> bool:
    """Whether an accumulator keeps the sum or the largest value of an epoch."""
    name, _, word = key.rpartition(":")
    return name in options and options[name].reduce == word


def _check_value(name: str, value: Any) -> None:
    """Refuse what is no number."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UserError(f"log({name!r}) got a tensor of shape {tuple(value.shape)}: only one number can be logged")
    if not isinstance(value, numbers.Number | Tensor | WeightedSum) and not _is_pair(value):
        raise UserError(f"log({name!r}) got a {type(value).__name__}, which cannot be logged: give a number")


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2


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
