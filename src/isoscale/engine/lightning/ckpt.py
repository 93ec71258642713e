"""Lightning's checkpoint files (`.ckpt`): what `trainer.save_checkpoint` writes and `load_from_checkpoint` reads."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.lightning.trainer_view import TrainerView

_OLDEST = "2.0.0"
"""The version that a file says where no Lightning is there to say its own."""


def contents(view: TrainerView, task: Any, weights_only: bool = False) -> dict[str, Any]:
    """What Lightning's checkpoint of a training holds, before hooks have seen it."""
    found: dict[str, Any] = {
        "epoch": view.current_epoch,
        "global_step": view.global_step,
        "pytorch-lightning_version": version(),
        "state_dict": task.state_dict(),
        "loops": {},
    }
    if not weights_only:
        states = {getattr(each, "state_key", type(each).__qualname__): each.state_dict()
                  for each in view.callbacks if callable(getattr(each, "state_dict", None))}  # fmt: skip
        found["callbacks"] = {key: state for key, state in states.items() if state}
        found["optimizer_states"] = [optimizer.state_dict() for optimizer in view.optimizers]
        found["lr_schedulers"] = [scheduler.state_dict() for scheduler in view.schedulers]
    data = view.datamodule if view.datamodule is not task else None
    for owner in filter(None, (task, data)):
        settings = getattr(owner, "hparams", None)
        if settings:
            if hasattr(owner, "_hparams_name"):
                found[getattr(owner, "CHECKPOINT_HYPER_PARAMS_NAME", "hparams_name")] = owner._hparams_name
            kept, left_out = plain_parameters(owner)
            found[getattr(owner, "CHECKPOINT_HYPER_PARAMS_KEY", "hyper_parameters")] = kept
            if left_out and type(owner) not in view.told:
                view.told.add(type(owner))
                view.note(
                    f"hyperparameters of {type(owner).__name__} that are no plain values are not in .ckpt files, which "
                    f"would not load without running code: {', '.join(left_out)}"
                )
    if data is not None and overrides(data, "state_dict"):
        found[type(data).__qualname__] = data.state_dict()
    return found


def plain_parameters(owner: Any) -> tuple[dict[str, Any], list[str]]:
    """The hyperparameters of a module that a file can hold without pickled code, and the names of the others."""
    given = dict(getattr(owner, "hparams", None) or {})
    kept = {name: value for name, value in given.items() if _is_plain(value)}
    return kept, [name for name in given if name not in kept]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return type(value) in (str, int, float, bool, type(None))


def save(view: TrainerView, task: Any, path: str | os.PathLike[str], weights_only: bool = False) -> None:
    """Write Lightning's checkpoint of the present state: aside, then renamed. All ranks call it, the first one writes.

    Hooks that add to it are called on all ranks.
    """
    checkpoint = contents(view, task, weights_only)
    if not weights_only:
        for callback in view.callbacks:
            if callable(getattr(callback, "on_save_checkpoint", None)):
                callback.on_save_checkpoint(view, task, checkpoint)
    if overrides(task, "on_save_checkpoint"):
        task.on_save_checkpoint(checkpoint)
    if view.is_global_zero:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}-{os.getpid()}")
        try:
            with aside.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    if str(path) not in view.written:
        view.written.append(str(path))


def version() -> str:
    """Of Lightning, for a file in its format."""
    loaded = (sys.modules.get(name) for name in ("lightning.pytorch", "pytorch_lightning"))
    return next((str(each.__version__) for each in loaded if each is not None), _OLDEST)
