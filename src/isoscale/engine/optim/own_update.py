"""The update of an optimizer that the task configures itself, in a form that a captured step can replay.

Between steps its parameter groups hold plain numbers, which schedulers, hooks and people read and set. For the time of
an update tensors take their place, which a replay can be given other numbers in. Eager steps do the same: a number and
a tensor of it do not give the same bits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from isoscale.engine.optim.optimizers import choose_path, path_for, sgd_step, why_unfit
from isoscale.system.devices import Accelerator

Place = tuple[dict[str, Any], str]
"""A parameter group, and the setting in it that is fed."""


class OwnUpdate:
    """Runs the optimizer's step; `row` holds the numbers of a step inside a capture, else they are sent each time."""

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any], accelerator: Accelerator) -> None:
        """Put the optimizer on the path that torch can capture, where it has one; what the task asked for stays."""
        self.optimizer = optimizer
        self.row: Tensor | None = None
        self.used: list[list[float]] | None = None
        """Where somebody wants to know them: the numbers of eager steps."""
        self.constant: str | None = None
        """Why its numbers cannot be fed, so that they must stay as they are in a captured step."""
        self._send: Callable[[Tensor], Tensor] = accelerator.sent
        self._momentum = moved_momentum(optimizer, schedulers)
        self._step: Callable[[], Any] = optimizer.step
        self._is_fused = False
        self._choose(accelerator)

    def _choose(self, accelerator: Accelerator) -> None:
        optimizer, cls = self.optimizer, type(self.optimizer)
        if why_unfit(cls) is not None:
            self.constant = f"{cls.__name__} reads its settings on the host"
            return
        groups = [optimizer.defaults, *optimizer.param_groups]
        path = path_for(choose_path(cls, accelerator), self._parameters())
        asked = any(group.get("foreach") or group.get("fused") is False for group in groups)
        self._is_fused = is_fused = path.fused and not asked and self._momentum is None
        if is_fused:
            self._set(groups, fused=True, foreach=False)
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        if path.capturable:
            self._set(groups, capturable=True)
            optimizer._warned_capturable_if_run_uncaptured = True
        if self._momentum == "betas" and path.capturable:
            self._set(groups, fused=False, foreach=False)  # the only path that takes them as tensors
        elif self._momentum == "momentum" and isinstance(optimizer, SGD):
            self._set(groups, fused=False)
            self._step = partial(_sgd_by_tensors, optimizer)
        elif self._momentum is not None:
            self.constant = f"its scheduler moves the {self._momentum} of {cls.__name__}: use cycle_momentum=False"
        elif is_fused and isinstance(optimizer, SGD) and optimizer.defaults["momentum"]:
            self._step = partial(sgd_step, optimizer, optimizer.step)
        elif not is_fused and not path.capturable:
            self.constant = f"{cls.__name__} reads its learning rate on the host"

    def _leave_fused(self) -> None:
        """Take torch's other kernels, from the first step on: the fused ones know no sparse gradients."""
        groups = [self.optimizer.defaults, *self.optimizer.param_groups]
        self._set(groups, fused=False, foreach=None)
        self.optimizer.found_inf = None  # type: ignore[attr-defined]  # which only they heed
        self._is_fused = False
        self.constant = "its gradients are sparse"
        self._step = self.optimizer.step

    def _set(self, groups: list[dict[str, Any]], **settings: bool | None) -> None:
        for group in groups:
            group.update({name: value for name, value in settings.items() if name in group})

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    @property
    def fed(self) -> tuple[str, ...]:
        """The settings of the groups that are no constants of a captured step."""
        return () if self.constant else ("lr",) if self._momentum is None else ("lr", self._momentum)

    def read(self) -> list[float]:
        """The numbers of the next step, group by group."""
        return [float(_get(place)) for place in self._places()]

    def _places(self) -> list[Place]:
        return [(group, key) for group in self.optimizer.param_groups for key in self.fed]

    def __call__(self) -> None:
        """Update the weights."""
        if self._is_fused and any(each.grad is not None and each.grad.is_sparse for each in self._parameters()):
            self._leave_fused()
        if self.constant:
            self._step()
            return
        row = self.row
        if row is None:
            numbers = self.read()
            if self.used is not None:
                self.used.append(numbers)
            row = self._send(torch.tensor(numbers, dtype=torch.float32))
        with self._replaced(row):
            self._step()

    @contextmanager
    def _replaced(self, row: Tensor) -> Iterator[None]:
        places = self._places()
        plain = [group[key] for group, key in places]
        for place, number in zip(places, row.unbind(), strict=True):
            _put(place, number)
        try:
            yield
        finally:
            for (group, key), value in zip(places, plain, strict=True):
                group[key] = value


def moved_momentum(optimizer: Optimizer, schedulers: Sequence[Any]) -> str | None:
    """The setting by which schedulers move the momentum (OneCycleLR and CyclicLR do), if they do."""
    moves = any(
        getattr(each, "cycle_momentum", False) or moved_momentum(optimizer, getattr(each, "_schedulers", ()))
        for each in schedulers
    )
    return ("betas" if "betas" in optimizer.defaults else "momentum") if moves else None


def _get(place: Place) -> Any:
    group, key = place
    return group[key][0] if key == "betas" else group[key]


def _put(place: Place, value: Tensor) -> None:
    group, key = place
    group[key] = (value, *group[key][1:]) if key == "betas" else value


@torch.no_grad()
def _sgd_by_tensors(optimizer: SGD) -> None:
    """SGD with rate and momentum in tensors, which torch's own reads on the host."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # else a scheduler of torch warns that there was no step
    for group in optimizer.param_groups:
        parameters = [each for each in group["params"] if each.grad is not None]
        if not parameters:
            continue
        gradients = [-each.grad if group["maximize"] else each.grad for each in parameters]
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        states = [optimizer.state[each] for each in parameters]
        moving = [index for index, state in enumerate(states) if state.get("momentum_buffer") is not None]
        if moving:
            kept = [states[index]["momentum_buffer"] for index in moving]
            torch._foreach_mul_(kept, group["momentum"])
            torch._foreach_add_(kept, [gradients[index] for index in moving], alpha=1 - group["dampening"])
        for state, gradient in zip(states, gradients, strict=True):
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = gradient.detach().clone()
        updates = [state["momentum_buffer"] for state in states]
        if group["nesterov"]:
            updates = list(torch._foreach_add(gradients, torch._foreach_mul(updates, group["momentum"])))
        torch._foreach_add_(parameters, torch._foreach_mul(updates, -group["lr"]))
