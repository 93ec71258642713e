"""The options of `self.log` in a LightningModule, and what they are by default in each of its hooks."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from isoscale.engine.lightning.overrides import overrides
from isoscale.errors import UserError

_STEP, _EPOCH = (True, False), (False, True)
_TRAINING = (
    "training_step", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward",
    "backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad",
    "configure_gradient_clipping", "clip_gradients",
)  # fmt: skip
_EVALUATED = (
    "validation_step", "on_validation_batch_start", "on_validation_batch_end", "test_step", "on_test_batch_start",
    "on_test_batch_end",
)  # fmt: skip
_OF_EPOCHS = (
    "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_start", "on_validation_epoch_start",
    "on_validation_epoch_end", "on_test_start", "on_test_epoch_start", "on_test_epoch_end",
)  # fmt: skip
DEFAULTS = {
    **dict.fromkeys(_TRAINING, _STEP), **dict.fromkeys(_EVALUATED, _EPOCH), **dict.fromkeys(_OF_EPOCHS, _EPOCH),
}  # fmt: skip
"""(on_step, on_epoch) where nobody says it, by hook; what is not here may not log."""
_SILENT = (
    "on_fit_start", "on_fit_end", "on_train_end", "on_validation_end", "on_test_end", "on_predict_start",
    "on_predict_epoch_start", "on_predict_batch_start", "on_predict_batch_end", "on_predict_epoch_end",
    "on_predict_end", "predict_step", "on_after_batch_transfer", "on_before_batch_transfer", "lr_scheduler_step",
    "on_validation_model_zero_grad", "on_save_checkpoint", "on_load_checkpoint", "setup", "configure_model",
    "configure_optimizers",
)  # fmt: skip
NAMED_HOOKS = (*(name for name in DEFAULTS if not name.endswith("_step") or name == "optimizer_step"), *_SILENT)
"""Hooks during which `self.log` has to know where it is."""
REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass(frozen=True)
class LogOptions:
    """How one name is logged in one hook."""

    name: str
    hook: str
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduce: str
    suffix: str = ""
    """Which of several loaders it is of."""

    @property
    def step_name(self) -> str:
        """Of the value of a step."""
        return f"{self.name}{'_step' * self.on_epoch}{self.suffix}"

    @property
    def epoch_name(self) -> str:
        """Of the value of an epoch."""
        return f"{self.name}{'_epoch' * self.on_step}{self.suffix}"

    @property
    def bare_name(self) -> str:
        """As callbacks find the newest of both."""
        return f"{self.name}{self.suffix}"

    @property
    def is_of_epoch(self) -> bool:
        """Whether the hook is called once per epoch, and its values count one each."""
        return self.hook in _OF_EPOCHS

    def as_dict(self) -> dict[str, Any]:
        """In plain values."""
        return asdict(self)


def checked(
    name: str, hook: str, on_step: bool | None, on_epoch: bool | None, prog_bar: bool, logger: bool | None,
    reduce_fx: Any, suffix: str,
) -> LogOptions:  # fmt: skip
    """The options as they are in a hook, or why they cannot be."""
    refuse_silent(name, hook)
    step, epoch = DEFAULTS[hook]
    on_step, on_epoch = step if on_step is None else on_step, epoch if on_epoch is None else on_epoch
    if hook in _OF_EPOCHS and (on_step, on_epoch) != _EPOCH:
        raise UserError(f"log({name!r}, on_step={on_step}, on_epoch={on_epoch}): {hook} belongs to no step, only "
                        "on_step=False with on_epoch=True is possible there")  # fmt: skip
    if not on_step and not on_epoch:
        raise UserError(f"log({name!r}, on_step=False, on_epoch=False) would log nothing: set one of them")
    if suffix and "/dataloader_idx_" in name:
        raise UserError(f"log({name!r}): the number of the loader is added by itself; give a name without it, or "
                        "add_dataloader_idx=False")  # fmt: skip
    return LogOptions(
        name, hook, on_step, on_epoch, bool(prog_bar), logger is None or bool(logger), _reduction(name, reduce_fx),
        suffix,
    )  # fmt: skip


def refuse_silent(name: str, hook: str) -> None:
    """Refuse to log where Lightning has nowhere to put it."""
    if hook not in DEFAULTS:
        raise UserError(f"log({name!r}) cannot be called in {hook}, as in Lightning: log in another hook, or write by "
                        "self.logger.log_metrics or self.logger.experiment")  # fmt: skip


def _reduction(name: str, reduce_fx: Any) -> str:
    word = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", str(reduce_fx))
    word = {"avg": "mean"}.get(word.lower(), word.lower())
    if word not in REDUCTIONS:
        raise UserError(
            f"log({name!r}, reduce_fx={word}): only {', '.join(REDUCTIONS)} are possible; for another reduction log a "
            "torchmetrics object"
        )
    return word


def name_hooks(task: Any, view: Any) -> None:
    """Let `self.log` know in which hook of a task it is called."""
    for name in NAMED_HOOKS:
        if overrides(task, name):
            object.__setattr__(task, name, _named(name, getattr(task, name), view))


def _named(name: str, hook: Callable[..., Any], view: Any) -> Callable[..., Any]:
    @functools.wraps(hook)
    def called(*arguments: Any, **options: Any) -> Any:
        with view.in_hook(name):
            return hook(*arguments, **options)

    return called
