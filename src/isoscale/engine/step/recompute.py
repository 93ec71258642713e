"""Activation checkpointing: what a module saves for the backward pass is computed again there instead of being kept.

The forward pass of a module is run once more by torch.utils.checkpoint, from the state that it began with: buffers,
attributes, modes, random numbers, statistics of batch norms over ranks. It leaves no trace, so that losses, gradients,
buffers and what is logged have the bits that they have without it.
"""

import random as python_random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint

from isoscale.data import rng
from isoscale.data.generators import kept_generators
from isoscale.engine.state.module_state import MOST_COPIED, ModuleSnapshot
from isoscale.errors import UserError
from isoscale.parallel import batch_norm
from isoscale.system import devices

_MOST_COMPARED = 1000
"""Entries of a list that are looked at for changes."""
_SMALL = 1 << 20
"""Bytes of a buffer that may be the statistics of a batch norm which somebody has written himself."""
_running = 0


def is_running() -> bool:
    """Whether a forward pass is run that happened before: what it logs was logged."""
    return _running > 0


class _Buffer(NamedTuple):
    """A buffer before a forward pass."""

    owner: dict[str, Tensor | None]
    key: str
    tensor: Tensor | None
    version: int
    is_statistic: bool
    """Whether it may change without being counted as written to: torch's batch norm does that to its statistics."""

    @property
    def is_changed(self) -> bool:
        """Whether it is not for sure what it was."""
        return self.is_statistic or self.owner.get(self.key) is not self.tensor or self.version != version(self.tensor)


class ForwardState:
    """What a forward pass depends on besides its arguments, as it is before it."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Of these modules, and of the generators of random numbers that torch.utils.checkpoint does not know."""
        self._modules = modules
        self._attributes = [dict(vars(module)) for module in modules]
        self._parameters = [(module._parameters, dict(module._parameters)) for module in modules]
        self._versions = [
            (each, each._version, each.requires_grad)
            for _, entries in self._parameters
            for each in entries.values()
            if each is not None
        ]
        self._buffers = [
            _Buffer(module._buffers, key, each, version(each), isinstance(module, _NormBase) or _is_small(each))
            for module in modules
            for key, each in module._buffers.items()
        ]
        with torch.no_grad():
            self._copies = {
                id(each.tensor): each.tensor.clone()
                for each in self._buffers
                if each.tensor is not None and each.tensor.nbytes <= MOST_COPIED
            }
        self._generators = python_random.getstate(), np.random.get_state(legacy=False)
        self._random = rng.current()
        self._position = self._random.position() if self._random is not None else None
        self.statistics: list[batch_norm.Statistics] = []
        """Those of batch norms over all ranks, which the first pass has found."""

    def passed(self, name: str) -> None:
        """The forward pass of the module `name` is over: keep copies only of buffers that it may have changed."""
        self._buffers = [each for each in self._buffers if each.is_changed]
        wanted = {id(each.tensor) for each in self._buffers if each.tensor is not None}
        if not wanted <= self._copies.keys():
            raise UserError(
                f"{name} changes a buffer of more than {MOST_COPIED >> 20} MiB in its forward pass, which would have "
                f"to be copied to compute it again: {_leave_out(name)}"
            )
        self._copies = {key: copy for key, copy in self._copies.items() if key in wanted}
        if any(each._version != version for each, version, _ in self._versions):
            raise UserError(
                f"{name} changes its own parameters in its forward pass, which cannot be computed again: "
                f"{_leave_out(name)}"
            )

    def check_weights(self, name: str) -> None:
        """Refuse weights that are not those of the forward pass any more."""
        if any(each._version != version for each, version, _ in self._versions):
            raise UserError(
                f"the weights of {name} were changed between its forward pass and the backward pass, in which it is "
                f"computed again: call backward before the optimizer's step, or {_leave_out(name)}"
            )

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Be in this state for a while; whatever is done to the modules in between is undone."""
        global _running
        with ExitStack() as undo:
            if self._random is not None and self._position is not None:
                undo.enter_context(self._random.repeated(self._position))
            undo.enter_context(kept_generators())
            python_random.setstate(self._generators[0])
            np.random.set_state(self._generators[1])
            for module, attributes in zip(self._modules, self._attributes, strict=True):
                undo.callback(_put, vars(module), dict(vars(module)))
                _put(vars(module), attributes)
            for owner, entries in self._parameters:
                undo.callback(_put, owner, dict(owner))
                _put(owner, entries)
            for parameter, _, flag in self._versions:
                if parameter.requires_grad != flag:
                    undo.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(flag)
            with torch.no_grad():
                copies = {key: copy.clone() for key, copy in self._copies.items()}
            for each in self._buffers:
                undo.callback(each.owner.__setitem__, each.key, each.owner[each.key])
                each.owner[each.key] = copies.get(id(each.tensor), each.tensor)
            _running += 1
            try:
                yield
            finally:
                _running -= 1


def version(tensor: Tensor | None) -> int:
    """How often a tensor was written to."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _is_small(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.nbytes <= _SMALL


def _put(live: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Make the entries of a dict what they were; most are."""
    for key in [key for key in live if key not in wanted]:
        del live[key]
    for key, value in wanted.items():
        if key not in live or live[key] is not value:
            live[key] = value


class Recomputed:
    """The forward pass of a module, whose activations are computed again in the backward pass."""

    def __init__(self, name: str, module: nn.Module) -> None:
        """Takes the place of `module.forward`."""
        self.name = name
        self.num_calls = 0
        self._module = module
        self._modules = list(module.modules())
        self._forward = module.forward
        self._is_checked = False
        """Whether a repetition was seen to leave no trace."""

    def __reduce__(self) -> Any:
        """A copy of a module that is being trained, or a file with it, has its plain forward pass."""
        return _itself, (self._forward,)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run the module; where nothing is saved for a backward pass, there is nothing to compute again."""
        leaves, structure = tree_flatten((arguments, options))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not torch.is_grad_enabled() or not any(
            each.requires_grad for each in (*tensors, *self._module.parameters())
        ):
            return self._forward(*arguments, **options)
        if torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            raise UserError(
                f"{self.name} is called inside torch.func (grad, jacrev, hessian …), where nothing can be computed "
                f"again: {_leave_out(self.name)}"
            )
        del arguments, options
        self.num_calls += 1
        state: ForwardState | None = None

        def run(*leaves: Any) -> Any:
            nonlocal state
            arguments, options = tree_unflatten(leaves, structure)
            if state is None:
                state = ForwardState(self._modules)
                with batch_norm.recorded(state.statistics):
                    output = self._forward(*arguments, **options)
                state.passed(self.name)
                return output
            state.check_weights(self.name)
            with self._checked(), batch_norm.repeated(state.statistics), state.repeated():
                return self._forward(*arguments, **options)

        versions = [version(tensor) for tensor in tensors]
        # the generators of a device may not be asked in a capture; a step that draws on them is found out by its proof
        preserve = not devices.is_capturing()
        output = checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=preserve)
        if versions != [version(tensor) for tensor in tensors]:
            raise UserError(
                f"{self.name} writes to its input (in place), from which it would be computed again: use "
                f"inplace=False there, or {_leave_out(self.name)}"
            )
        return output

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Refuse what a repetition does to objects that cannot be put back, at the first one."""
        if self._is_checked:
            yield
            return
        before = ModuleSnapshot(self._module, most_entries=_MOST_COMPARED)
        try:
            yield
        finally:
            self._is_checked = True
            changed = ModuleSnapshot(self._module, most_entries=_MOST_COMPARED).changed(before)
            if changed:
                path = ".".join(filter(None, (self.name, *changed[0])))
                raise UserError(
                    f"{self.name} changes {path} in its forward pass, which "
                    f"would happen twice: keep such things in buffers, or {_leave_out(self.name)}"
                )


class InPieces:
    """The forward pass of an `nn.Sequential`, a few layers at a time."""

    def __init__(self, module: nn.Module, pieces: Sequence[nn.Module]) -> None:
        """Takes the place of `module.forward`."""
        self._forward = module.forward
        self._pieces = pieces

    def __reduce__(self) -> Any:
        """As for modules that are computed again."""
        return _itself, (self._forward,)

    def __call__(self, input: Any) -> Any:
        """Run the layers."""
        for piece in self._pieces:
            input = piece(input)
        return input


def _itself(value: Any) -> Any:
    return value


def _leave_out(name: str) -> str:
    return f"leave {name} out of train.recompute, or name other modules there"


def wrap(modules: dict[str, nn.Module]) -> tuple[list[Recomputed], Callable[[], None]]:
    """Let modules be computed again, by name; the function returned undoes it."""
    made, before = [], []
    for name, module in modules.items():
        before.append((module, vars(module).get("forward")))
        made.append(Recomputed(name, module))
        object.__setattr__(module, "forward", made[-1])

    def undo() -> None:
        for module, forward in reversed(before):
            put_forward(module, forward)

    return made, undo


def put_forward(module: nn.Module, forward: Any) -> None:
    """Give a module its forward pass back: one of its own, or None for that of its class."""
    vars(module).pop("forward", None)
    if forward is not None:
        object.__setattr__(module, "forward", forward)


@contextmanager
def differences_explained() -> Iterator[None]:
    """Say in words that a module did something else the second time."""
    try:
        yield
    except CheckpointError as error:
        if "already unpacked" in str(error):
            raise UserError(
                "the backward method of an autograd.Function in a module of train.recompute reads ctx.saved_tensors "
                "more than once, which torch allows only where nothing is computed again: read it once, into a variable"
            ) from error
        raise UserError(
            "a module of train.recompute did something else when it was computed again in the backward pass "
            f"({str(error).splitlines()[0].removeprefix('torch.utils.checkpoint: ')}); it depends on something outside "
            "of it that has changed meanwhile: leave it out of train.recompute, or name other modules there"
        ) from error
