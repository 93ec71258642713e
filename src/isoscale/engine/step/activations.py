"""Activation memory of a task's modules, and which of them are computed again in the backward pass because of it.

Measured in one forward pass that keeps nothing and leaves no trace: which module saves which tensor for the backward
pass. Of modules that are computed again only the inputs are kept, and one at a time has its activations again.
"""

import difflib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from isoscale.data.batches import Batch, map_tensors, tensors_of
from isoscale.data.generators import kept_generators
from isoscale.engine.config import parse_bytes
from isoscale.engine.diagnose.memory import size
from isoscale.engine.metrics import torchmetrics as metrics
from isoscale.engine.state.module_state import ModuleSnapshot
from isoscale.engine.step.recompute import ForwardState, InPieces, Recomputed, put_forward, version, wrap
from isoscale.engine.step.untrained import named
from isoscale.errors import UserError

WORTH = 0.01
"""Share of all activations that is not worth computing more modules again."""
FEWEST_LAYERS = 4
"""Of an `nn.Sequential` that is looked at in pieces."""
MOST_CUTS = 50
"""Ways through the tree of modules that are compared."""


@dataclass
class _Call:
    """A call of a module."""

    module: nn.Module
    parent: int | None
    inputs: set[int] = field(default_factory=set)
    saves: set[int] = field(default_factory=set)
    """Tensors, by number, that are saved in it and not in a module that it calls."""


Pieces = dict[nn.Module, dict[str, nn.Module]]
"""Of every long `nn.Sequential`, by their names."""


def pieces_of(task: nn.Module) -> Pieces:
    """Every `nn.Sequential` of single layers, a few layers at a time: single ones save nothing, all together too much.

    Their modules belong to nobody, and so change no name in the task.
    """
    found: Pieces = {}
    for name, module in task.named_modules():
        layers = list(module.children())
        is_plain = type(module).forward is nn.Sequential.forward and "forward" not in vars(module)
        is_long = len(layers) == len(module._modules) >= FEWEST_LAYERS  # each of them once
        if name and is_plain and is_long and not any(len(each._modules) for each in layers):
            length = math.isqrt(len(layers))
            starts = [0, *(start for start in range(length, len(layers), length) if not _writes_input(layers[start]))]
            ends = [*starts[1:], len(layers)]
            found[module] = {
                f"{name}[{start}:{end}]": nn.Sequential(*layers[start:end])
                for start, end in zip(starts, ends, strict=True)
            }
    return found


class _Differentiated(Exception):
    """A saved tensor is asked for in the forward pass already, because the task differentiates there."""


class Activations:
    """What each module saved in one forward pass; tensors that share memory are one."""

    def __init__(self, task: nn.Module, batch: Batch, keeps: bool) -> None:
        """Parameters, buffers and the batch are there anyway; `keeps` what is saved, where it is asked for."""
        self.calls: list[_Call] = [_Call(task, None)]
        self.sizes: list[int] = []
        """Bytes of each tensor."""
        self.writes_input: set[nn.Module] = set()
        self._keeps = keeps
        self._numbers: dict[int, tuple[StorageWeakRef, int | None]] = {}
        """By the address of memory that is in use: a number, or None where it does not count."""
        self._present = 0
        for tensor in (*task.parameters(), *task.buffers(), *tensors_of(batch)):
            storage = tensor.untyped_storage()
            self._numbers[storage.data_ptr()] = StorageWeakRef(storage), None

    def _number(self, tensor: Tensor) -> int | None:
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse, say
            return None
        known = self._numbers.get(storage.data_ptr())
        if known is None or known[0].expired():
            self.sizes.append(storage.nbytes())
            known = self._numbers[storage.data_ptr()] = StorageWeakRef(storage), len(self.sizes) - 1
        return known[1]

    def pack(self, tensor: Tensor) -> Tensor | None:
        """Note a tensor that is saved for the backward pass."""
        number = self._number(tensor)
        if number is not None:
            self.calls[self._present].saves.add(number)
        return tensor.detach() if self._keeps else None

    def unpack(self, packed: Tensor | None) -> Tensor:
        """A saved tensor is asked for."""
        if packed is None:
            raise _Differentiated
        return packed

    def forward(self, module: nn.Module, plain: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a module, and note what it is given."""
        inputs = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        numbers = {number for number in map(self._number, inputs) if number is not None}
        self.calls.append(_Call(module, self._present, numbers))
        before, self._present = self._present, len(self.calls) - 1
        versions = [version(tensor) for tensor in inputs]
        try:
            return plain(*arguments, **options)
        finally:
            self._present = before
            if versions != [version(tensor) for tensor in inputs]:
                self.writes_input.add(module)

    def inside(self) -> dict[nn.Module, int]:
        """Bytes that each module saves in one call, together with the modules that it calls."""
        saves = [set(call.saves) for call in self.calls]
        for index, call in reversed(list(enumerate(self.calls))):
            if call.parent is not None:
                saves[call.parent] |= saves[index]
        found: dict[nn.Module, int] = {}
        for call, numbers in zip(self.calls, saves, strict=True):
            found[call.module] = max(found.get(call.module, 0), self._total(numbers))
        return found

    def peak(self, chosen: Iterable[nn.Module]) -> int:
        """Bytes that activations take at most where `chosen` are computed again: what is kept, and one of these."""
        chosen = set(chosen)
        kept: set[int] = set()
        again: dict[int, set[int]] = {}
        outermost: list[int | None] = []
        for index, call in enumerate(self.calls):
            top = outermost[call.parent] if call.parent is not None else None
            if top is None and call.module in chosen:
                top, again[index] = index, set()
                kept |= call.inputs
            outermost.append(top)
            (kept if top is None else again[top]).update(call.saves)
        return self._total(kept) + max((self._total(numbers - kept) for numbers in again.values()), default=0)

    def _total(self, numbers: Iterable[int]) -> int:
        return sum(self.sizes[number] for number in numbers)


def measure(
    task: nn.Module, compute: Callable[[Batch, int], Any], batch: Batch, batch_idx: int, pieces: Pieces
) -> Activations:
    """Run a training step's forward pass once, and undo whatever it does."""
    devices = {each.device for each in task.parameters() if each.device.type != "cpu"}
    for keeps in (False, True):
        copy = map_tensors(batch, torch.clone)
        snapshot, go_back = ModuleSnapshot(task, copies=True), metrics.keep(task)
        state = ForwardState(list(task.modules()))
        with ExitStack() as undo:
            undo.callback(go_back)
            undo.callback(snapshot.restore, task)
            undo.enter_context(kept_generators())
            for device in devices:
                undo.enter_context(torch.random.fork_rng([device.index or 0], device_type=device.type))
            undo.enter_context(state.repeated())
            found = Activations(task, copy, keeps)
            for module in [*task.modules(), *(piece for each in pieces.values() for piece in each.values())]:
                if _is_called(module) and module is not task:
                    plain = InPieces(module, list(pieces[module].values())) if module in pieces else module.forward
                    undo.callback(put_forward, module, vars(module).get("forward"))
                    object.__setattr__(module, "forward", partial(found.forward, module, plain))
            undo.enter_context(saved_tensors_hooks(found.pack, found.unpack))
            try:
                output = compute(copy, batch_idx)
                del output
                return found
            except _Differentiated:
                continue
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
                raise UserError(
                    "train.recompute cannot measure what modules save, because training_step uses torch.func (grad, "
                    "jacrev, hessian …): name modules that are called outside of it, such as "
                    f"train.recompute=[{_examples(task)[0]}]"
                ) from error
    raise AssertionError


def best(found: Activations, task: nn.Module, pieces: Pieces) -> list[nn.Module]:
    """The modules with which activations take the least: outermost ones that save up to some size each."""
    inside = found.inside()
    fit = {module for module in inside if module is not task and why_not(module) is None} - found.writes_input
    sizes = sorted({inside[module] for module in fit if inside[module]})
    sizes = sizes[:: -(-len(sizes) // MOST_CUTS)] if sizes else []
    chosen: list[nn.Module] = []
    for largest in sizes:
        cut = _outermost(task, {module for module in fit if 0 < inside[module] <= largest}, pieces)
        if found.peak(cut) <= found.peak(chosen):  # of several ways, the one with the fewest modules
            chosen = cut
    # what saves next to nothing costs time all the same
    most = found.peak(chosen) + WORTH * found.peak(())
    ordered = sorted(chosen, key=lambda each: inside[each])
    spared = bisect_right(range(len(ordered)), most, key=lambda count: found.peak(ordered[count:])) - 1
    left = set(ordered[max(spared, 0) :])
    return [module for module in chosen if module in left]


def within(found: Activations, modules: Sequence[nn.Module], budget: int) -> list[nn.Module]:
    """So many of these modules, those that save most first, that activations take no more than `budget` bytes."""
    inside = found.inside()
    chosen: list[nn.Module] = []
    for module in sorted(modules, key=lambda each: -inside[each]):
        if found.peak(chosen) <= budget:
            break
        chosen.append(module)
    return chosen


def _outermost(module: nn.Module, wanted: set[nn.Module], pieces: Pieces | None = None) -> list[nn.Module]:
    """Those of `wanted` that are not inside of others of them, in the order of the tree; shared ones once."""
    found: dict[nn.Module, None] = {}
    for child in (pieces or {}).get(module, dict(module.named_children())).values():
        found.update(dict.fromkeys([child] if child in wanted else _outermost(child, wanted, pieces)))
    return list(found)


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def why_not(module: nn.Module) -> str | None:
    """Why a module cannot be computed again, in words."""
    if not _is_called(module):
        return f"is a {type(module).__name__}, which is never called itself"
    for name, part in module.named_modules():
        where = f"holds {name}, which " if name else ""
        if part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule":
            return f"{where}is compiled (torch.compile)"
        if metrics.is_metric(part):
            return f"{where}is a torchmetrics object, which would count twice"
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values()) if part is not module else ()
        if any(not getattr(hook, "__module__", "").startswith("torch.") for hook in hooks):
            return f"{where}has forward hooks, which would be called twice"
    return None


def by_name(task: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that a recipe names; of those that one pattern matches, the outermost ones that are called."""
    modules = {name: module for name, module in task.named_modules(remove_duplicate=False) if name}
    found: dict[nn.Module, str] = {}
    for pattern in patterns:
        matches = {name: module for name, module in modules.items() if fnmatchcase(name, pattern)}
        if not matches:
            raise UserError(_unknown(task, pattern, modules))
        if pattern not in matches:  # a pattern takes what can be taken
            fit = {module for module in matches.values() if why_not(module) is None and not _writes_input(module)}
            outer = set(_outermost(task, fit))
            matches = {name: module for name, module in matches.items() if module in outer} or matches
        for name, module in matches.items():
            reason = why_not(module)
            if reason is not None:
                inner = ", ".join(f"{name}.{key}" for key, _ in module.named_children())
                raise UserError(
                    f"train.recompute names {name!r}, but that {reason}; "
                    + (f"name modules inside it: {inner}" if inner else "leave it out")
                )
            found.setdefault(module, name)
    return {name: module for module, name in found.items()}


def _writes_input(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return len(module) > 0 and _writes_input(module[0])
    return bool(getattr(module, "inplace", False)) and not list(module.children())


def _unknown(task: nn.Module, pattern: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or _examples(task)
    return (
        f"train.recompute names {pattern!r}, but {type(task).__name__} has no module of that name; did you mean "
        f"{' or '.join(close)}? Try train.recompute=[{close[0]}]; patterns such as {close[0].rpartition('.')[0] or '*'}"
        f"{'.*' if '.' in close[0] else ''} match several"
    )


def _examples(task: nn.Module) -> list[str]:
    """Names of modules that could be computed again."""
    names = {module: name for name, module in task.named_modules()}
    fit = {module for module in names if why_not(module) is None}
    return [names[module] for module in _outermost(task, fit)][:3] or ["model"]


class Recompute:
    """A task's step method that computes modules again in its backward pass; which, it finds out at the first batch."""

    def __init__(
        self, task: Any, wanted: str | list[str], compute: Callable[[Batch, int], Any],
        agree: Callable[[list[str]], list[str]], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`wanted` is what the recipe says; `agree` gives all ranks the names of the first one."""
        self._task = task
        self._wanted = wanted
        self._compute = compute
        self._agree = agree
        self._say = say
        self._wrapped: list[Recomputed] | None = None
        self._undo = ExitStack()
        self._pieces: Pieces = {}
        if isinstance(wanted, list):
            by_name(task, wanted)  # a name that is not known is refused before anything else is done
        elif not getattr(task, "automatic_optimization", True):
            raise UserError(
                f"train.recompute={wanted} measures a forward pass, but the task updates its weights itself (manual "
                f"optimisation): name modules, such as train.recompute=[{', '.join(_examples(task))}]"
            )

    def __call__(self, batch: Batch, batch_idx: int) -> Any:
        """Run the step method."""
        if self._wrapped is None:
            self._pieces = {} if isinstance(self._wanted, list) else pieces_of(self._task)
            names = self._agree(self._chosen(batch, batch_idx))
            modules = dict(self._task.named_modules(remove_duplicate=False))
            for module, own in self._pieces.items():
                if own.keys() & set(names):
                    modules.update(own)
                    object.__setattr__(module, "forward", InPieces(module, list(own.values())))
                    self._undo.callback(put_forward, module, None)
            self._wrapped, undo = wrap({name: modules[name] for name in names})
            self._undo.callback(undo)
        return self._compute(batch, batch_idx)

    def _chosen(self, batch: Batch, batch_idx: int) -> list[str]:
        if isinstance(self._wanted, list):
            names = list(by_name(self._task, self._wanted))
            self._say(f"recompute: {named(names)} ({_count(names)}) in the backward pass")
            return names
        found = measure(self._task, self._compute, batch, batch_idx, self._pieces)
        modules, budget = best(found, self._task, self._pieces), parse_bytes(self._wanted)
        whole, least = found.peak(()), found.peak(modules)
        if budget is not None and least <= budget:
            modules = within(found, modules, budget)
        own = {module: name for name, module in self._task.named_modules()}
        own |= {piece: name for pieces in self._pieces.values() for name, piece in pieces.items()}
        names = [own[module] for module in modules]
        takes = f"activations take {size(found.peak(modules))}" + (f" instead of {size(whole)}" if names else "")
        if budget is not None:
            takes += f", {'within' if least <= budget else 'more than'} the {self._wanted} of train.recompute"
        if not names and (budget is None or least > budget):
            takes += "; no module would save any of it: put a few layers at a time into modules of their own"
        elif budget is not None and least > budget:
            takes += ": a larger train.accumulate makes them smaller"
        self._say(
            f"recompute: {f'{named(names)} ({_count(names)}) in the backward pass' if names else 'nothing'}, {takes}"
        )
        return names

    def undo(self) -> None:
        """Give the modules their own forward passes back, and say which were never called."""
        unused = [each.name for each in self._wrapped or () if not each.num_calls]
        if unused and isinstance(self._wanted, list):
            self._say(
                f"train.recompute names {named(unused)}, never called with something to differentiate: it saved nothing"
            )
        self._undo.close()


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} module{'s' * (len(names) != 1)}"
