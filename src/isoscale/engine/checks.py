"""What would make a training other than its user believes: refused, or said."""

import math
from typing import Any

from torch import nn

from isoscale.engine.assembly import Assembly
from isoscale.engine.step.untrained import named, not_optimised
from isoscale.errors import UserError
from isoscale.observe.observers import Observers


def check_task(task: Any) -> None:
    """Refuse what is not a task, saying how to make one of it."""
    if not isinstance(task, nn.Module):
        raise UserError(f"a task must be an nn.Module, not {type(task).__name__}")
    if not callable(getattr(task, "training_step", None)):
        raise UserError(
            f"{type(task).__name__} has no training_step; wrap a plain network: isoscale.Supervised(model, loss='mse')"
        )


def buffer_names(task: nn.Module) -> set[str]:
    """The names of buffers, also of those that are None so far."""
    return {f"{path}.{key}".lstrip(".") for path, module in task.named_modules() for key in module._buffers}


def check_buffers(before: set[str], now: set[str]) -> None:
    """Refuse buffers that are registered in training: the constructor of a restart would not know them."""
    if now - before:
        raise UserError(
            f"the buffer {sorted(now - before)[0]} was registered in training, so that checkpoints would not fit the "
            "task any more; register it before training begins, as None if it has no value yet"
        )


def check_parameters(before: dict[str, nn.Parameter], now: dict[str, nn.Parameter]) -> None:
    """Refuse other parameters than those that training began with, of which optimizer and checkpoints know nothing."""
    added, removed = sorted(set(now) - set(before)), sorted(set(before) - set(now))
    if added or removed:
        what = "; ".join(
            f"{word} {', '.join(names[:4])}" for word, names in (("new:", added), ("gone:", removed)) if names
        )
        raise UserError(
            f"the parameters of the task changed in training ({what}), so that its checkpoints would not fit it any "
            "more; make all parameters (layers, masks of pruning, parametrisations) before training begins, in "
            "__init__, setup or configure_model. They may be frozen and unfrozen at any time (requires_grad_)"
        )
    for name in (name for name, parameter in now.items() if parameter is not before[name]):
        raise UserError(
            f"{name} was replaced by another parameter in training, and the optimizer would train the old one; change "
            "its values in place: with torch.no_grad(): parameter.copy_(…)"
        )


def tell_modes(task: nn.Module, observers: Observers) -> None:
    """Say which modules are in eval mode when training begins: people forget that."""
    resting = [name for name, module in task.named_modules() if not module.training]
    outermost = [name for name in resting if not any(name.startswith(f"{other}.") for other in resting if other)]
    if outermost:
        names = ", ".join(name or "the task itself" for name in outermost[:4])
        observers.note(
            f"in eval mode when training begins, and left so: {names}{' …' * (len(outermost) > 4)} (no dropout, no "
            "new batch norm statistics; module.train() changes that)"
        )


def tell_not_optimised(parts: Assembly, observers: Observers) -> None:
    """Say which parameters no optimizer has: that may be meant, or forgotten."""
    names = not_optimised(parts.task, parts.optimizers)
    if names:
        observers.note(
            f"in no optimizer, and so not trained: {named(names)} (requires_grad_(False) says that this is meant)"
        )


def tell_never_updated(parts: Assembly, num_steps: int, observers: Observers) -> None:
    """Say of a task that is to update its weights itself that it never did."""
    configured = parts.configured
    if parts.step is None and configured is not None and not configured.is_updated and num_steps:
        observers.note(
            "training_step is to update the weights itself (automatic_optimization = False), and in "
            f"{num_steps:,} steps no optimizer of configure_optimizers made one: call "
            "self.optimizers().step() there, unless the weights are changed in another way",
            "warning",
        )


def check_not_skipped(parts: Assembly, num_steps: int) -> None:
    """Refuse to call it a training where every step returned None."""
    if parts.step is not None and num_steps and parts.step.num_skipped >= num_steps:
        raise UserError(
            f"nothing was trained: training_step returned None in all {num_steps:,} steps, by which a step is skipped; "
            "does it return its loss?"
        )


def tell_unsaved(parts: Assembly, told: set[str], observers: Observers) -> None:
    """Say what a checkpoint does not hold, once; `told` remembers."""
    found = {name: kind for name, kind in parts.extra.unsaved().items() if name not in told}
    told.update(found)
    if found:
        names = ", ".join(f"{name} ({kind})" for name, kind in list(found.items())[:4])
        observers.note(
            f"changed in training and cannot be saved: {names}{' …' * (len(found) > 4)}; after a restart it is as "
            "the constructor makes it. Keep numbers, text, tensors, lists or dicts of these in attributes, or give "
            "the class state_dict and load_state_dict",
            "warning",
        )


def tell_not_finite(values: dict[str, float], step: int, observers: Observers) -> None:
    """Say which metrics are no numbers."""
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        observers.note(
            f"{', '.join(bad)} at step {step} {'is' if len(bad) == 1 else 'are'} NaN or infinite: "
            "look for bad samples in the data; training goes on, and `best` is not moved",
            "warning",
        )
