"""LightningModules as they are, by duck typing: `lightning` itself is never imported.

A module finds what it expects: `self.log`, `self.trainer` with the common attributes, `self.optimizers()` and
`self.manual_backward` for manual optimisation. A hook that is not called is refused, never passed over.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from isoscale.engine.lightning.loaders import LoadedData, prepare_data
from isoscale.engine.lightning.overrides import overrides
from isoscale.errors import UserError
from isoscale.parallel.collectives import ALONE, Ranks

_REFUSED_HOOKS = {
    "backward": "set automatic_optimization = False and call self.manual_backward",
    "configure_callbacks": "use the recipe's checkpoint and train.early_stopping sections",
    "configure_sharded_model": "create the layers in configure_model",
    "on_before_batch_transfer": "use on_after_batch_transfer or the collate function",
    "on_load_checkpoint": "keep the values in buffers (register_buffer), which are saved and restored",
    "on_predict_model_eval": "set modes in on_predict_start",
    "on_save_checkpoint": "keep the values in buffers (register_buffer), which are saved and restored",
    "on_test_model_eval": "set modes in on_test_start",
    "on_test_model_train": "modes are put back after a test",
    "on_validation_model_eval": "set modes in on_validation_start",
    "on_validation_model_train": "modes are put back after an evaluation",
    "optimizer_zero_grad": "set automatic_optimization = False and zero the gradients there",
    "transfer_batch_to_device": "use on_after_batch_transfer or the collate function",
}
_OF_LIGHTNING_1 = {
    "on_batch_end": "on_train_batch_end",
    "on_batch_start": "on_train_batch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_epoch_start": "on_train_epoch_start",
    "on_hpc_load": "buffers (register_buffer), which are saved and restored",
    "on_hpc_save": "buffers (register_buffer), which are saved and restored",
    "on_pretrain_routine_end": "on_fit_start",
    "on_pretrain_routine_start": "on_fit_start",
    "on_train_dataloader": "train_dataloader",
    "on_val_dataloader": "val_dataloader",
    "predict_epoch_end": "on_predict_epoch_end",
    "tbptt_split_batch": "slices of the batch in training_step, with manual optimisation",
    "test_epoch_end": "on_test_epoch_end",
    "test_step_end": "test_step itself",
    "training_epoch_end": "on_train_epoch_end",
    "training_step_end": "training_step itself",
    "validation_epoch_end": "on_validation_epoch_end",
    "validation_step_end": "validation_step itself",
}
"""Hooks that Lightning 2 has removed, and what took their place."""
_ATTACHED = (
    "log", "log_dict", "in_stored_units", "optimizers", "lr_schedulers", "manual_backward", "toggle_optimizer",
    "untoggle_optimizer", "clip_gradients", "all_gather", "print", "on_train_start", "on_train_epoch_start",
    "_loaded_data",
)  # fmt: skip


def is_lightning_module(task: Any) -> bool:
    """Whether this is a LightningModule."""
    return any(cls.__name__ == "LightningModule" for cls in type(task).__mro__)


class TrainerView:
    """What a LightningModule sees as `self.trainer`."""

    accumulate_grad_batches = 1
    """A batch is the batch of one update here, whatever the micro-batches are."""
    sanity_checking = True
    """Until training begins: what runs before it is a rehearsal of the evaluation."""
    stage = "train"
    """What is at work: train, val, test or predict."""
    logger = log_dir = datamodule = None
    loggers: tuple[Any, ...] = ()

    def __init__(
        self, where: Callable[[], tuple[int, int]], num_steps: int, steps_per_epoch: int, ranks: Ranks = ALONE
    ) -> None:
        """`where` tells (epoch, step) between launches."""
        self._where = where
        self.ranks = ranks
        self.is_global_zero = ranks.is_main
        self.world_size, self.global_rank, self.local_rank = ranks.world_size, ranks.rank, ranks.local_rank
        self.num_nodes = len(set(ranks.hosts))
        self.num_devices = ranks.world_size // self.num_nodes
        self.node_rank = list(dict.fromkeys(ranks.hosts)).index(ranks.hosts[ranks.rank])
        self.max_steps = self.estimated_stepping_batches = num_steps
        self.num_training_batches = steps_per_epoch
        self.max_epochs = -(-num_steps // steps_per_epoch)
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.callback_metrics: dict[str, Tensor] = {}
        self.lightning_module: Any = None
        self.updates: Callable[[], int] | None = None
        """Counts the updates of manual optimisation, of which a batch may have several."""
        self.read: set[str] = set()
        """What somebody has asked for that changes from step to step."""
        self._finished: int | None = None
        self._ahead = False

    def begin_epoch(self) -> None:
        """The next step belongs to a new epoch."""
        self._ahead = True

    def finish(self, step: int) -> None:
        """So many steps are finished."""
        self._finished, self._ahead = step, False

    @property
    def _step(self) -> int:
        return self._where()[1] if self._finished is None else self._finished

    @property
    def current_epoch(self) -> int:
        """The running epoch, from 0; it lasts until the next one begins."""
        self.read.add("current_epoch")
        step = self._step
        return (step if self._ahead else max(0, step - 1)) // self.num_training_batches

    @property
    def global_step(self) -> int:
        """Finished optimizer steps."""
        self.read.add("global_step")
        return self._step if self.updates is None else self.updates()

    @property
    def training(self) -> bool:
        """Whether training batches are at work."""
        return self.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether validation batches are at work."""
        return self.stage == "val"

    @property
    def testing(self) -> bool:
        """Whether test batches are at work."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether predictions are made."""
        return self.stage == "predict"

    @property
    def should_stop(self) -> bool:
        """Whether training was asked to end."""
        return False

    @should_stop.setter
    def should_stop(self, wanted: bool) -> None:
        if wanted:
            raise UserError("trainer.should_stop is not supported: use train.early_stopping, train.steps or a signal")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.trainer has no {name!r} under isoscale")


def attach(task: Any, view: TrainerView, loaded: LoadedData | None) -> None:
    """Let a LightningModule find its trainer, and set it up; refuse what would silently not be called."""
    _set(task, "_loaded_data", loaded)
    if not is_lightning_module(task):
        return
    _refuse(task)
    view.lightning_module = task
    view.datamodule = None if loaded is None else loaded.owner
    task._trainer = view
    _set(task, "optimizers", lambda use_pl_optimizer=True: _one_or_all(view.optimizers))
    _set(task, "lr_schedulers", lambda: _one_or_all(view.schedulers) if view.schedulers else None)
    _set(task, "manual_backward", _manual_backward(task))
    _set(task, "toggle_optimizer", lambda optimizer: _toggle(task, view.optimizers, optimizer))
    _set(task, "untoggle_optimizer", lambda optimizer: _untoggle(task))
    _set(task, "clip_gradients", clip_gradients)
    _set(task, "all_gather", lambda data, *arguments, **options: data)
    _set(task, "print", print if view.is_global_zero else _say_nothing)
    _set(task, "on_train_start", _after(lambda: setattr(view, "sanity_checking", False), task.on_train_start))
    _set(task, "on_train_epoch_start", _after(view.begin_epoch, task.on_train_epoch_start))
    if loaded is None or loaded.owner is not task:
        prepare_data(task, view.ranks)
        task.setup("fit")
    task.configure_model()


def _say_nothing(*words: Any, **options: Any) -> None:
    """What `self.print` does on all ranks but the first."""


def adds_modules(task: Any) -> bool:
    """Whether a LightningModule may have created layers when it was attached."""
    return is_lightning_module(task) and any(overrides(task, name) for name in ("setup", "configure_model"))


def detach(task: Any) -> None:
    """Take back what `attach` and the stages set on the instance, and let module and data clean up."""
    loaded = task.__dict__.get("_loaded_data")
    attached = task.__dict__.get("_trainer") is not None
    _untoggle(task)
    for name in _ATTACHED:
        task.__dict__.pop(name, None)
    if attached:
        task._trainer = None
        task.teardown("fit")
    if loaded is not None:
        loaded.teardown()


def remember(task: Any, values: Mapping[str, float]) -> None:
    """Let a LightningModule find the last metrics in `self.trainer.callback_metrics`."""
    view = task.__dict__.get("_trainer")
    if isinstance(view, TrainerView):
        view.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})


def forget(task: Any) -> None:
    """Let a LightningModule find no metrics: those of a rehearsal mean nothing."""
    view = task.__dict__.get("_trainer")
    if isinstance(view, TrainerView):
        view.callback_metrics.clear()


def _refuse(task: Any) -> None:
    advice = [f"{name} ({instead})" for name, instead in _REFUSED_HOOKS.items() if overrides(task, name)]
    if advice:
        raise UserError(f"{type(task).__name__} overrides what isoscale does not call: {'; '.join(advice)}")
    removed = [f"{name} (use {instead})" for name, instead in _OF_LIGHTNING_1.items() if overrides(task, name)]
    if removed:
        raise UserError(
            f"{type(task).__name__} defines hooks of Lightning 1, which nobody calls any more: {'; '.join(removed)}"
        )
    parameters = list(inspect.signature(task.training_step).parameters)
    if len(parameters) > 2 or {"optimizer_idx", "hiddens"} & set(parameters):
        raise UserError(
            f"training_step of {type(task).__name__} takes {', '.join(parameters)}, as in Lightning 1; take "
            "(batch, batch_idx), and with several optimizers set automatic_optimization = False"
        )


def _set(task: Any, name: str, value: Any) -> None:
    object.__setattr__(task, name, value)


def _after(first: Callable[[], None], hook: Callable[[], Any]) -> Callable[[], None]:
    def both() -> None:
        first()
        hook()

    return both


def _one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else list(items)


def _manual_backward(task: Any) -> Callable[..., None]:
    before, after = overrides(task, "on_before_backward"), overrides(task, "on_after_backward")

    def manual_backward(loss: Tensor, *arguments: Any, **options: Any) -> None:
        if before:
            task.on_before_backward(loss)
        loss.backward(*arguments, **options)
        if after:
            task.on_after_backward()

    return manual_backward


def _toggle(task: nn.Module, optimizers: list[Optimizer], optimizer: Optimizer) -> None:
    """Let gradients flow to one optimizer's parameters and not to those of the others."""
    needed = {parameter: parameter.requires_grad for each in optimizers for parameter in _parameters(each)}
    own = {id(parameter) for parameter in _parameters(optimizer)}
    task.__dict__["_toggled"] = needed
    for parameter, flag in needed.items():
        parameter.requires_grad = flag and id(parameter) in own


def _untoggle(task: nn.Module) -> None:
    for parameter, flag in task.__dict__.pop("_toggled", {}).items():
        parameter.requires_grad = flag


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clip_gradients(
    optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
) -> None:
    """Clip the gradients of an optimizer's parameters, by norm or by value."""
    if gradient_clip_val is None:
        return
    if gradient_clip_algorithm not in (None, "norm", "value"):
        raise UserError(f"gradient_clip_algorithm is {gradient_clip_algorithm!r}: use 'norm' or 'value'")
    clip = nn.utils.clip_grad_value_ if gradient_clip_algorithm == "value" else nn.utils.clip_grad_norm_
    clip(_parameters(optimizer), gradient_clip_val)


class Configured:
    """What `configure_optimizers` returned, in one form."""

    def __init__(self, returned: Any, task: Any, steps_per_epoch: int) -> None:
        """Accepts every form that Lightning does; `frequency` counts inside an epoch of so many steps, as there."""
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[dict[str, Any]] = []
        self.updates = 0
        """Updates that manual optimisation has made."""
        self._task = task
        self._own_step = overrides(task, "lr_scheduler_step")
        self._steps_per_epoch = steps_per_epoch
        self._automatic = getattr(task, "automatic_optimization", True)
        self._take(returned)
        self._check()

    def rates(self) -> dict[str, float]:
        """The learning rate of each optimizer's first group, `lr` or `lr-0`, `lr-1`; none that lives on a device."""
        found = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]
        names = ["lr"] if len(found) == 1 else [f"lr-{number}" for number in range(len(found))]
        return {name: rate for name, rate in zip(names, found, strict=True) if isinstance(rate, float)}

    def _take(self, returned: Any) -> None:
        if isinstance(returned, Optimizer):
            self.optimizers.append(returned)
        elif isinstance(returned, dict):
            if "optimizer" not in returned:
                raise UserError(f"configure_optimizers returned a dict without 'optimizer': {sorted(returned)}")
            self.optimizers.append(returned["optimizer"])
            if returned.get("lr_scheduler") is not None:
                self._schedule(returned["lr_scheduler"], returned.get("monitor"))
        elif isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], list | tuple):
            for optimizer in returned[0]:
                self._take(optimizer)
            for scheduler in returned[1]:
                self._schedule(scheduler)
        elif isinstance(returned, tuple | list):
            for entry in returned:
                self._take(entry)
        else:
            raise UserError(f"configure_optimizers returned {type(returned).__name__}, which is not an optimizer")

    def _schedule(self, scheduler: Any, monitor: str | None = None) -> None:
        entry = dict(scheduler) if isinstance(scheduler, dict) else {"scheduler": scheduler}
        defaults = {"interval": "epoch", "frequency": 1, "monitor": monitor, "strict": True}
        unknown = set(entry) - {*defaults, "scheduler", "reduce_on_plateau", "name"}
        if unknown or "scheduler" not in entry:
            raise UserError(f"configure_optimizers returned an lr_scheduler with the keys {sorted(entry)}")
        plateau = entry.get("reduce_on_plateau", isinstance(entry["scheduler"], ReduceLROnPlateau))
        self.schedulers.append({**defaults, **entry, "reduce_on_plateau": plateau})

    def _check(self) -> None:
        if self._automatic and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise UserError(
                "LBFGS evaluates the loss several times per step: use it with automatic_optimization = False"
            )
        for entry in self.schedulers if self._automatic else []:
            if entry["interval"] not in ("step", "epoch"):
                raise UserError(f"an lr_scheduler's interval is {entry['interval']!r}: use 'step' or 'epoch'")
            if entry["reduce_on_plateau"] and entry["interval"] == "step":
                raise UserError("a plateau scheduler reads the metrics of an epoch: use interval 'epoch'")
            if entry["reduce_on_plateau"] and not entry["monitor"]:
                raise UserError("a plateau scheduler needs the name of a metric: add 'monitor' to the lr_scheduler")

    def after_step(self, step: int) -> None:
        """Move the schedulers that count steps."""
        within = (step - 1) % self._steps_per_epoch + 1
        for entry in self.schedulers if self._automatic else []:
            if entry["interval"] == "step" and within % entry["frequency"] == 0:
                self._move(entry["scheduler"], None)

    def after_epoch(self, epoch: int, values: dict[str, float]) -> None:
        """Move the schedulers that count epochs; plateau ones by the metric they watch."""
        remember(self._task, values)
        for entry in self.schedulers if self._automatic else []:
            if entry["interval"] != "epoch" or epoch % entry["frequency"]:
                continue
            watched = _watched(values, entry["monitor"]) if entry["reduce_on_plateau"] else None
            if watched is None and entry["reduce_on_plateau"]:
                if entry["strict"]:
                    raise UserError(f"the scheduler watches {entry['monitor']!r}, but there is: {', '.join(values)}")
                continue
            self._move(entry["scheduler"], watched)

    def _move(self, scheduler: Any, value: float | None) -> None:
        if self._own_step:
            self._task.lr_scheduler_step(scheduler, value)
        elif value is None:
            scheduler.step()
        else:
            scheduler.step(value)

    def count_update(self, *arguments: Any) -> None:
        """An optimizer of manual optimisation has made a step."""
        self.updates += 1

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The schedulers' and param groups' numbers."""
        return {}, {
            "schedulers": [_saved(entry["scheduler"].state_dict()) for entry in self.schedulers],
            "groups": [[_saved(_settings(group)) for group in each.param_groups] for each in self.optimizers],
            "members": [[self._names(group["params"]) for group in each.param_groups] for each in self.optimizers],
            "updates": self.updates,
        }

    def _names(self, parameters: list[Tensor]) -> list[str]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._task.named_parameters()}
        return [names[parameter] for parameter in parameters]

    def _regroup(self, optimizer: Optimizer, members: list[list[str]]) -> None:
        """Give an optimizer the groups that it had when it was saved: some may have been added in training."""
        parameters = dict(self._task.named_parameters())
        unknown = [name for group in members for name in group if name not in parameters]
        if unknown:
            raise UserError(f"the checkpoint's optimizer knows {unknown[0]!r}, which is not a parameter of the model")
        if [self._names(group["params"]) for group in optimizer.param_groups] == members:
            return
        first, added = _settings(optimizer.param_groups[0]), members[len(optimizer.param_groups) :]
        groups = [*optimizer.param_groups[: len(members)], *[deepcopy(first) for _ in added]]
        for group, names in zip(groups, members, strict=True):
            group["params"] = [parameters[name] for name in names]
        optimizer.param_groups[:] = groups

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over a state."""
        self.updates = values["updates"]
        for entry, saved in zip(self.schedulers, values["schedulers"], strict=True):
            entry["scheduler"].load_state_dict(_merged(entry["scheduler"].state_dict(), saved))
        for optimizer, members in zip(self.optimizers, values.get("members", []), strict=False):
            self._regroup(optimizer, members)
        for optimizer, groups in zip(self.optimizers, values["groups"], strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(_merged(_settings(group), saved))


def _watched(values: Mapping[str, float], monitor: str) -> float | None:
    """A metric by the name that the task gave it, whatever the stage added to it."""
    names = (monitor, f"{monitor}_epoch", f"val/{monitor}", f"train/{monitor}_epoch")
    return next((values[name] for name in names if name in values), None)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


_PLAIN = (int, float, str, bool, type(None))


def _saved(value: Any) -> Any:
    """What JSON can hold of a value; the rest, such as functions, comes from the constructor and is left out."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_saved(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _saved(entry) for key, entry in value.items() if isinstance(key, str)}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, _PLAIN) else None


def _merged(own: Any, saved: Any) -> Any:
    """A value as it is in the program, with the numbers that were saved."""
    if isinstance(own, Tensor):
        return own.copy_(torch.tensor(saved))
    if isinstance(own, dict) and isinstance(saved, dict):
        merged = {key: _merged(value, saved[key]) if key in saved else value for key, value in own.items()}
        return {**merged, **{key: value for key, value in saved.items() if key not in own}}
    if isinstance(own, list | tuple) and isinstance(saved, list):
        same = len(own) == len(saved)
        return type(own)(_merged(*pair) for pair in zip(own, saved, strict=True)) if same else type(own)(saved)
    if isinstance(own, float) and isinstance(saved, str):
        return float(saved)
    return own if saved is None and not isinstance(own, _PLAIN) else saved
