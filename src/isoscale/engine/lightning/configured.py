"""What `configure_optimizers` returned: optimizers and schedulers, moved when their time comes, saved and restored."""

import math
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.metrics.monitors import spelled
from isoscale.errors import UserError


class Configured:
    """What `configure_optimizers` returned, in one form."""

    def __init__(self, returned: Any, task: Any, steps_per_epoch: int) -> None:
        """Accepts every form that Lightning does; `frequency` counts inside an epoch of so many steps, as there."""
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[dict[str, Any]] = []
        self.updates = 0
        """Updates that manual optimisation has made by the optimizers of `self.optimizers()`."""
        self.is_updated = False
        """Whether any of its optimizers has made an update in this process."""
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
        for entry in self.schedulers if self._automatic else []:
            if entry["interval"] not in ("step", "epoch"):
                raise UserError(f"an lr_scheduler's interval is {entry['interval']!r}: use 'step' or 'epoch'")
            if entry["reduce_on_plateau"] and entry["interval"] == "step":
                raise UserError("a plateau scheduler reads the metrics of an epoch: use interval 'epoch'")
            if entry["reduce_on_plateau"] and not entry["monitor"]:
                raise UserError("a plateau scheduler needs the name of a metric: add 'monitor' to the lr_scheduler")

    def after_step(self, step: int) -> None:
        """Move the schedulers that count steps, and after the last step of an epoch those that count epochs."""
        within, epoch = (step - 1) % self._steps_per_epoch + 1, step // self._steps_per_epoch
        done = {"step": within, "epoch": epoch if within == self._steps_per_epoch else None}
        for entry in self.schedulers if self._automatic else []:
            count = None if entry["reduce_on_plateau"] else done[entry["interval"]]
            if count is not None and count % entry["frequency"] == 0:
                self._move(entry["scheduler"], None)

    def after_epoch(self, epoch: int, values: dict[str, float], is_cut: bool = False) -> None:
        """Move plateau schedulers, which count epochs, by the metric they watch; of an epoch without its end, all."""
        for entry in self.schedulers if self._automatic else []:
            if entry["interval"] != "epoch" or epoch % entry["frequency"]:
                continue
            if not entry["reduce_on_plateau"]:
                if is_cut:
                    self._move(entry["scheduler"], None)
                continue
            known = spelled(entry["monitor"], values)
            watched = None if known is None else values[known]
            if watched is None:
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

    def note_update(self, *arguments: Any) -> None:
        """An optimizer has made a step, whoever called it."""
        self.is_updated = True

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
