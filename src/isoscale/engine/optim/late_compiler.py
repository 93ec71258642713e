"""Torch's compiler, imported when something is compiled and not by the first optimizer.

torch.optim asks the compiler to keep out of some methods, and imports it to ask: as long as torch itself takes, at
every start, although most trainings compile nothing. Here those methods ask only where the compiler is there already.
A torch that does it in another way is left as it is.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer

COMPILER = "torch._dynamo"


def put_off_compiler() -> None:
    """Have the optimizers of torch do without the compiler until somebody imports it."""
    if COMPILER in sys.modules:
        return
    for method in vars(Optimizer).values():
        if getattr(method, "__module__", None) == Optimizer.__module__ and comes_from(method, "_disable_dynamo"):
            _ask_later(method.__wrapped__)
    for cls in vars(torch.optim).values():
        step = vars(cls).get("step") if isinstance(cls, type) else None
        if comes_from(step, "_use_grad_for_differentiable"):
            cls.step = _without_graph_break(step)


def comes_from(function: Any, decorator: str) -> bool:
    """Whether a function is what a decorator of torch made of another."""
    if not hasattr(function, "__wrapped__") or not hasattr(function, "__code__"):
        return False
    return str(function.__code__.co_qualname).startswith(f"{decorator}.<locals>.")


def _ask_later(method: Callable[..., Any]) -> None:
    """Give a method the answer that torch keeps with it: what to call instead of it where something may be compiled."""

    def call(*arguments: Any, **named: Any) -> Any:
        if COMPILER not in sys.modules:
            return method(*arguments, **named)
        method.__dynamo_disable = sys.modules[COMPILER].disable(method, wrapping=False)  # type: ignore[attr-defined]
        return method.__dynamo_disable(*arguments, **named)  # type: ignore[attr-defined]

    method.__dynamo_disable = call  # type: ignore[attr-defined]


def _without_graph_break(step: Any) -> Callable[..., Any]:
    """The step of an optimizer, which breaks a compiled graph only where there may be one."""
    plain: Callable[..., Any] = step.__wrapped__

    @wraps(step)
    def optimizer_step(self: Optimizer, *arguments: Any, **named: Any) -> Any:
        if COMPILER in sys.modules:
            return step(self, *arguments, **named)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return plain(self, *arguments, **named)

    return optimizer_step
