"""LightningModules as they are, by duck typing: `lightning` itself is never imported.

A module finds what it expects: `self.log`, `self.trainer` with the common attributes, `self.optimizers()` and
`self.manual_backward` for manual optimisation. A hook that is not called is refused, never passed over.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isoscale.engine.lightning.callbacks import combine, set_up, tear_down
from isoscale.engine.lightning.ckpt import save
from isoscale.engine.lightning.loaders import LoadedData, prepare_data
from isoscale.engine.lightning.log_options import NAMED_HOOKS, name_hooks
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.errors import UserError
from isoscale.parallel.collectives import Ranks

_REFUSED_HOOKS = {
    "configure_sharded_model": "create the layers in configure_model",
}
_OF_LIGHTNING_1 = {
    "on_batch_end": "on_train_batch_end",
    "on_batch_start": "on_train_batch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_epoch_start": "on_train_epoch_start",
    "on_hpc_load": "buffers (register_buffer), which are saved and restored",
    "on_hpc_save": "buffers (register_buffer), which are saved and restored",
    "on_post_move_to_device": "configure_model",
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
_SIGNATURES_OF_LIGHTNING_1 = {
    **dict.fromkeys(
        ("backward", "configure_gradient_clipping", "lr_scheduler_step", "on_before_optimizer_step", "optimizer_step",
         "optimizer_zero_grad"),
        ("optimizer_idx",),
    ),
    **dict.fromkeys(
        (f"on_{stage}_epoch_end" for stage in ("train", "validation", "test", "predict")), ("outputs", "results")
    ),
}  # fmt: skip
"""Arguments that hooks are not given any more."""
_ATTACHED = (
    "log", "log_dict", "in_stored_units", "optimizers", "lr_schedulers", "manual_backward", "toggle_optimizer",
    "untoggle_optimizer", "clip_gradients", "all_gather", "print", "on_train_epoch_start",
    "_loaded_data",
)  # fmt: skip


def is_lightning_module(task: Any) -> bool:
    """Whether this is a LightningModule."""
    return any(cls.__name__ == "LightningModule" for cls in type(task).__mro__)


def attach(task: Any, view: TrainerView, loaded: LoadedData | None, callbacks: Sequence[Any] = ()) -> None:
    """Let a task find its callbacks, and a LightningModule its trainer; refuse what would silently not be called."""
    _set(task, "_loaded_data", loaded)
    view.callbacks = list(callbacks)
    view.lightning_module = task
    view.datamodule = None if loaded is None else loaded.owner
    if loaded is not None and loaded.owner is not task:
        loaded.owner.trainer = view
    view.write = partial(save, view, task)
    if callbacks or is_lightning_module(task):
        _set(task, "_trainer", view)
    if callbacks and not is_lightning_module(task):
        _set(task, "_hooks_of_callbacks", (*combine(task, view), "on_train_epoch_start"))
        own = getattr(task, "on_train_epoch_start", _say_nothing)
        _set(task, "on_train_epoch_start", _after(view.begin_epoch, own))
        set_up(task, view)
    if not is_lightning_module(task):
        return
    _refuse(task)
    _set(task, "_hooks_of_callbacks", tuple(combine(task, view)))
    _set(
        task, "optimizers",
        lambda use_pl_optimizer=True: _one_or_all(view.wrap(view.optimizers) if use_pl_optimizer else view.optimizers),
    )  # fmt: skip
    _set(task, "lr_schedulers", lambda: _one_or_all(view.schedulers) if view.schedulers else None)
    _set(task, "manual_backward", _manual_backward(task))
    _set(task, "toggle_optimizer", lambda optimizer: _toggle(task, view.optimizers, optimizer))
    _set(task, "untoggle_optimizer", lambda optimizer: _untoggle(task))
    _set(task, "clip_gradients", partial(_clip_by_default, view))
    _set(task, "all_gather", partial(_all_gather, view.ranks))
    _set(task, "print", print if view.is_global_zero else _say_nothing)
    _set(task, "on_train_epoch_start", _after(view.begin_epoch, task.on_train_epoch_start))
    name_hooks(task, view)
    if loaded is None or loaded.owner is not task:
        prepare_data(task, view.ranks)
        set_up(task, view)
        task.setup("fit")
    else:
        set_up(task, view)
    task.configure_model()


def _all_gather(ranks: Ranks, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
    """The tensors and numbers of a batch or other collection from all ranks, stacked in front; alone, as they are."""
    if group is not None:
        raise UserError("self.all_gather gathers from all ranks: leave out group")
    if isinstance(data, dict):
        return {key: _all_gather(ranks, value, None, sync_grads) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_all_gather(ranks, value, None, sync_grads) for value in data))
    if isinstance(data, list | tuple):
        return type(data)(_all_gather(ranks, value, None, sync_grads) for value in data)
    if not isinstance(data, Tensor | int | float):
        return data
    tensor = torch.as_tensor(data)
    if ranks.alone:
        return tensor
    shapes = ranks.all_gather((tuple(tensor.shape), str(tensor.dtype)), "the shapes of self.all_gather")
    if len(set(shapes)) > 1:
        found = ", ".join(f"{shape} on {ranks.name(rank)}" for rank, (shape, _) in enumerate(shapes))
        raise UserError(
            f"self.all_gather stacks tensors of one shape, but there are {found}: the shares of a batch may differ in "
            "size; use data.drop_last=true, or pad them"
        )
    gathered: Tensor = _Gathered.apply(tensor, ranks) if sync_grads else _gathered(tensor.detach(), ranks)
    return gathered


def _gathered(tensor: Tensor, ranks: Ranks) -> Tensor:
    sent = tensor.contiguous() if tensor.dtype != torch.bool else tensor.to(torch.uint8)
    stacked = sent.new_empty(ranks.world_size, *sent.shape)
    ranks.tick("tensors of all ranks")
    torch.distributed.all_gather(list(stacked.unbind()), sent)
    return stacked.to(tensor.dtype)


class _Gathered(torch.autograd.Function):
    """Tensors of all ranks through which gradients flow back to where they came from."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, ranks: Ranks) -> Tensor:
        context.ranks = ranks
        return _gathered(tensor, ranks)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous().clone()
        context.ranks.all_reduce(gradient, "gradients of gathered tensors")
        return gradient[context.ranks.rank], None


def _say_nothing(*words: Any, **options: Any) -> None:
    """What `self.print` does on all ranks but the first."""


def adds_modules(task: Any) -> bool:
    """Whether a LightningModule may have created layers when it was attached."""
    return is_lightning_module(task) and any(overrides(task, name) for name in ("setup", "configure_model"))


def detach(task: Any) -> None:
    """Take back what `attach` and the stages set on the instance, and let module and data clean up."""
    loaded = task.__dict__.get("_loaded_data")
    view = task.__dict__.get("_trainer")
    _untoggle(task)
    for name in (*_ATTACHED, *NAMED_HOOKS, *task.__dict__.pop("_hooks_of_callbacks", ())):
        task.__dict__.pop(name, None)
    if view is not None:
        tear_down(task, view)
        if is_lightning_module(task):
            task._trainer = None
            task.teardown("fit")
        else:
            del task.__dict__["_trainer"]
    if loaded is not None:
        loaded.teardown()
        if loaded.owner is not task:
            loaded.owner.trainer = None


def _refuse(task: Any) -> None:
    advice = [f"{name} ({instead})" for name, instead in _REFUSED_HOOKS.items() if overrides(task, name)]
    if advice:
        raise UserError(f"{type(task).__name__} overrides what isoscale does not call: {'; '.join(advice)}")
    removed = [f"{name} (use {instead})" for name, instead in _OF_LIGHTNING_1.items() if overrides(task, name)]
    if removed:
        raise UserError(
            f"{type(task).__name__} defines hooks of Lightning 1, which nobody calls any more: {'; '.join(removed)}"
        )
    for name in _SIGNATURES_OF_LIGHTNING_1:
        taken = inspect.signature(getattr(task, name)).parameters.values() if overrides(task, name) else ()
        old = [
            each.name for each in taken if each.name in _SIGNATURES_OF_LIGHTNING_1[name] and each.default is each.empty
        ]
        if old:
            raise UserError(
                f"{name} of {type(task).__name__} takes {old[0]}, as in Lightning 1: leave it out"
                + "; keep outputs in a list of your own" * (old[0] != "optimizer_idx")
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
    backward = overrides(task, "backward")

    def manual_backward(loss: Tensor, *arguments: Any, **options: Any) -> None:
        if before:
            task.on_before_backward(loss)
        if backward:
            task.backward(loss, *arguments, **options)
        else:
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


def _clip_by_default(
    view: TrainerView, optimizer: Optimizer, gradient_clip_val: float | None = None, *arguments: Any, **options: Any
) -> None:
    clip_gradients(
        optimizer, view.gradient_clip_val if gradient_clip_val is None else gradient_clip_val, *arguments, **options
    )


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
