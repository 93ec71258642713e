"""Optimizers as a LightningModule gets them: `self.optimizers()`, and the argument of `optimizer_step`."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

_OF_OPTIMIZER = ("state_dict", "load_state_dict", "zero_grad", "add_param_group", "__repr__")


class LightningOptimizer:
    """An optimizer whose `step` calls the hooks of an update; everything else is that of the optimizer inside.

    An instance of the optimizer's own class as well, so that whoever asks for that finds it.
    """

    def __init__(self, optimizer: Optimizer, owner: Any) -> None:
        """`owner`, the module's trainer, knows what precedes and follows an update."""
        self._optimizer = optimizer
        self._owner = owner
        own = {name: _forwarded(name) for name in _OF_OPTIMIZER}
        self.__class__ = type(f"Lightning{type(optimizer).__name__}", (LightningOptimizer, type(optimizer)), own)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update the weights; a closure computes loss and gradients, as often as the optimizer asks for them."""

        def computed() -> Any:
            loss = None if closure is None else closure()
            self._owner.before_update(self._optimizer)
            return loss

        output = self._optimizer.step(closure=computed, **options)
        self._owner.after_update(self._optimizer)
        return output

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Let gradients flow to the parameters of this optimizer only; ranks share gradients when they are used."""
        module = self._owner.lightning_module
        module.toggle_optimizer(self)
        try:
            yield
        finally:
            module.untoggle_optimizer(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: LightningOptimizer, *arguments: Any, **options: Any) -> Any:
        return getattr(self._optimizer, name)(*arguments, **options)

    return method


def plain(optimizer: Any) -> Any:
    """The optimizer itself, of one that may be wrapped."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer computes loss and gradients itself (LBFGS, SAM), and not only where it is asked to.

    The `step` of most begins with `if closure is not None: loss = closure()`, and can do without.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    step = inspect.unwrap(type(optimizer).step)
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None:
        return False
    if closure.default is closure.empty:
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(step)))
    except (OSError, TypeError, SyntaxError):  # written where nobody can read it
        return False
    return _demands_closure(tree)


def _demands_closure(tree: ast.AST) -> bool:
    """Whether the code of a `step` insists on its closure: outside of a branch that asks whether there is one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.IfExp) and _names_closure(node.test):
            refuses = isinstance(node, ast.If) and any(isinstance(each, ast.Raise) for each in node.body)
            several = sum(_calls_closure(each) for each in ast.walk(node)) > 1
            if refuses or several:
                return True
            continue
        if isinstance(node, ast.Assert) and _names_closure(node.test):
            return True
        if _calls_closure(node) or _demands_closure(node):
            return True
    return False


def _calls_closure(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "closure"


def _names_closure(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "closure" for each in ast.walk(node))
