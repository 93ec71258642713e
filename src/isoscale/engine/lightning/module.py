"""LightningModules as they are, by duck typing: `lightning` itself is never imported.

A module finds what it expects: `self.log`, `self.trainer` with the common attributes, `self.optimizers()` and
`self.manual_backward` for manual optimisation. A hook that is not called is refused, never passed over.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isoscale.engine.lightning.loaders import LoadedData, prepare_data
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.errors import UserError

_REFUSED_HOOKS = {
    "backward": "set automatic_optimization = False and call self.manual_backward",
    "configure_callbacks": "use the recipe's checkpoint and train.early_stopping sections",
    "configure_sharded_model": "create the layers in configure_model",
    "on_load_checkpoint": "keep the values in buffers (register_buffer), which are saved and restored",
    "on_predict_model_eval": "set modes in on_predict_start",
    "on_save_checkpoint": "keep the values in buffers (register_buffer), which are saved and restored",
    "on_test_model_eval": "set modes in on_test_start",
    "on_test_model_train": "modes are put back after a test",
    "on_validation_model_eval": "set modes in on_validation_start",
    "on_validation_model_train": "modes are put back after an evaluation",
    "optimizer_zero_grad": "set automatic_optimization = False and zero the gradients there",
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
