"""The extra state of a module: what people change of it in training besides weights and buffers.

Training modes, parameters that are frozen or not, plain attributes, what `get_extra_state` gives, and the gradients of
an accumulation that a task has begun itself. Saved is what differs from how the task came: all else is as its
constructor and the hooks of a start leave it.
"""

import random
import sys
from argparse import Namespace
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, EnumType
from types import SimpleNamespace
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from isoscale.data.hashing import derive_key
from isoscale.engine.metrics.torchmetrics import is_metric
from isoscale.engine.state.registry import digest, in_format_of
from isoscale.errors import UserError
from isoscale.parallel.collectives import ALONE, Ranks
from isoscale.parallel.serialize import MOST_ENTRIES, SCALARS, names_of, put_together, take_apart

_OF_TORCH = {*vars(nn.Module()), "_compiled_call_impl"}
_OF_LIGHTNING = {
    "_automatic_optimization", "_compiler_ctx", "_current_fx_name", "_device", "_device_mesh", "_dtype",
    "_example_input_array", "_fabric", "_fabric_optimizers", "_hparams_initial", "_hparams_name",
    "_jit_is_scripting", "_log_hyperparams", "_metric_attributes", "_param_requires_grad_state", "_strict_loading",
    "_trainer", "prepare_data_per_node",
}  # fmt: skip
_OF_ENGINE = {
    "_hooks_of_callbacks", "_loaded_data", "_toggled", "_trainer", "all_gather", "clip_gradients", "forward",
    "in_stored_units", "log", "log_dict", "lr_schedulers", "manual_backward", "on_train_epoch_start", "on_train_start",
    "optimizers", "print", "toggle_optimizer", "untoggle_optimizer",
}  # fmt: skip
"""Set on an instance while it trains."""
_AS_IT_CAME = "_as_it_came"
"""Where a task keeps the snapshot of its first training in a process: it may be trained on, or again."""
_OF_TASK = _OF_TORCH | _OF_ENGINE | {_AS_IT_CAME}
_OF_PART = _OF_TORCH | {"forward"}
_LIBRARIES = {"torch", "torchmetrics", "lightning", "pytorch_lightning", "numpy", "isoscale", *sys.stdlib_module_names}
"""Packages whose objects are not looked into: their insides are not the user's."""
_PLAIN_BASES = {"builtins", "abc", "typing"}
_DEEPEST = 6
MOST_COPIED = 64 << 20
"""Bytes of a tensor that is copied to be put back: larger ones are tables, and are not written to."""
_NAMESPACES = (SimpleNamespace, Namespace, UserDict)
"""Of Python, and made to hold what is the user's."""
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
KIND = "class and hooks"
EXTRA = "get_extra_state"
_PARAMETER = "parameter "

Path = tuple[str, str]
"""A module's name, and that of an attribute."""


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (lambda each: each.get_state(), lambda each, state: each.set_state(state.cpu())),
    np.random.Generator: (lambda each: each.bit_generator.state, _set_bits),
    np.random.RandomState: (lambda each: each.get_state(legacy=False), lambda each, state: each.set_state(state)),
    random.Random: (lambda each: each.getstate(), lambda each, state: each.setstate(state)),
}
"""How to read and to set the state of random generators that people keep."""


class Attribute(NamedTuple):
    """An attribute at one moment, comparable with itself at another."""

    value: Any
    """Kept, so that nothing else can take its place in memory."""
    structure: Any
    tokens: tuple[Any, ...]
    """Which tensors these are, and how often they were written to."""

    def differs(self, other: "Attribute | None") -> bool:
        """Whether it has changed."""
        if other is None:
            return True
        if self.structure is other.structure and not self.tokens and not other.tokens:
            return False
        return repr((self.structure, self.tokens)) != repr((other.structure, other.tokens))


class ModuleSnapshot:
    """Everything about a module but the values of its parameters and buffers, at one moment."""

    def __init__(
        self, module: nn.Module, known: Iterable[Any] = (), most_entries: int = MOST_ENTRIES, copies: bool = False
    ) -> None:
        """Look at `module`; objects in `known` (optimizers, schedulers) are saved elsewhere, as are its own parts.

        A list or dict with more than `most_entries` is told apart by what it is and how long, not by what is in it.
        With `copies`, tensors are copied, and buffers too, so that `restore` can put back what is written to them.
        """
        self._most_entries = most_entries
        buffers = [each for each in module.buffers() if each.nbytes <= MOST_COPIED] if copies else []
        self._buffers = [(each, each.clone()) for each in buffers]
        modules = dict(module.named_modules())
        registered = _registered(module, modules)
        self._known = {id(each): f"known {number}" for number, each in enumerate(known)}
        self._known.update({id(each): name for name, each in registered.items()})
        self.modes = {name: child.training for name, child in modules.items()}
        parameters = (name for name in registered if name.startswith(_PARAMETER))
        self.trainable = {name.removeprefix(_PARAMETER): registered[name].requires_grad for name in parameters}
        self.tensors: dict[str, Tensor] = {}
        self.objects: dict[str, Any] = {}
        """What is not plain, by name: kept, so that it can be told from others."""
        self.attributes: dict[Path, Attribute] = {}
        for name, child in modules.items():
            if is_metric(child):
                continue
            self.attributes[name, KIND] = Attribute(None, {"object": name, "id": _kind(child)}, ())
            for key, value in _attributes(child, name == ""):
                is_scalar = type(value) in SCALARS
                self.attributes[name, key] = (
                    Attribute(value, value, ()) if is_scalar else self._attribute(value, f"{name}/{key}")
                )
            if type(child).get_extra_state is not nn.Module.get_extra_state:
                self.attributes[name, EXTRA] = self._attribute(child.get_extra_state(), f"{name}/{EXTRA}")
        if copies:
            self.tensors = {
                name: each.clone() if each.nbytes <= MOST_COPIED else each for name, each in self.tensors.items()
            }

    def _attribute(self, value: Any, name: str) -> Attribute:
        try:
            structure = take_apart(value, name, self.tensors, self._special, self._most_entries)
            tokens = tuple(_token(self.tensors[each], self._most_entries) for each in names_of(structure))
        except Exception:  # whatever an object does when somebody looks at it
            for each in [each for each in self.tensors if each == name or each.startswith(f"{name}.")]:
                del self.tensors[each]
            structure, tokens = self._opaque(value, name), ()
        return Attribute(value, structure, tokens)

    def _special(self, value: Any, name: str) -> Any:
        """The structure of an object: its state where it can save itself, or its fields where they are the user's."""
        wrapped = getattr(value, "__dict__", {}).get("_optimizer")  # as self.optimizers() gives it to a module
        for each in (value, wrapped):
            if id(each) in self._known:
                return {"registered": self._known[id(each)]}
        if isinstance(value, Tensor | np.ndarray | np.generic | dict | list | tuple | set | frozenset):
            return None
        get = next((get for kind, (get, _) in _GENERATORS.items() if isinstance(value, kind)), None)
        if get is not None:
            self.objects[name] = value
            return {"state": take_apart(get(value), name, self.tensors), "of": name}
        if isinstance(value, Enum) and type(value.value) in SCALARS:
            return {"enum": [type(value).__module__, type(value).__qualname__, value.value]}
        fields = _fields(value)
        if isinstance(value, type) or fields is None:
            return None if isinstance(value, deque) else self._opaque(value, name)
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            self.objects[name] = value
            return {"state": take_apart(dict(value.state_dict()), name, self.tensors), "of": name}
        own, *bases = (base.__module__.partition(".")[0] for base in type(value).__mro__)
        foreign = own in _LIBRARIES or ({*bases} - _PLAIN_BASES) & _LIBRARIES
        if (foreign and type(value) not in _NAMESPACES) or name.partition("/")[2].count(".") > _DEEPEST:
            return self._opaque(value, name)
        self.objects[name] = value
        apart = {
            key: take_apart(each, f"{name}.{key}", self.tensors, self._special, self._most_entries)
            for key, each in fields.items()
        }
        return {"fields": apart, "of": name}

    def _opaque(self, value: Any, name: str) -> Any:
        self.objects[name] = value
        is_container = isinstance(value, dict | list | tuple | set | frozenset | deque)
        return {"object": name, "id": id(value), "length": len(value) if is_container else None}

    def __reduce__(self) -> Any:
        """A copy of a module is another module, of which this says nothing."""
        return type(None), ()

    def changed(self, before: "ModuleSnapshot") -> list[Path]:
        """The attributes that are not what they were, or not there any more."""
        found = [path for path, found in self.attributes.items() if found.differs(before.attributes.get(path))]
        return [*found, *(path for path in before.attributes if path not in self.attributes)]

    def restore(self, module: nn.Module) -> None:
        """Make modes, flags and attributes what they were at this moment."""
        _set_modes(module, self.modes)
        _set_trainable(module, self.trainable)
        for buffer, copy in self._buffers:
            if buffer.shape == copy.shape:
                buffer.copy_(copy)
        for path in ModuleSnapshot(module).changed(self):
            owner = module.get_submodule(path[0])
            if path in self.attributes and path[1] != KIND:
                attribute = self.attributes[path]
                if path[1] != EXTRA:
                    object.__setattr__(owner, path[1], attribute.value)  # the same object, then what was in it
                _give(owner, path[1], attribute.structure, self.tensors, None, _registered(module))
            elif path[1] in vars(owner):
                del vars(owner)[path[1]]


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of an object, in its dict and its slots; None where it has neither."""
    slots = [name for cls in type(value).__mro__ for name in _names(vars(cls).get("__slots__", ()))]
    if not slots and not hasattr(value, "__dict__"):
        return None
    found = {name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _kind(module: nn.Module) -> list[Any]:
    """The class of a module, and which hooks are on it and on its parameters."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    of_parameters = [
        (key, *(tuple(getattr(parameter, name, None) or ()) for name in _HOOKS))
        for key, parameter in module._parameters.items()
        if parameter is not None and any(getattr(parameter, name, None) for name in _HOOKS)
    ]
    return [type(module).__qualname__, *(tuple(each) for each in hooks if each), *of_parameters]


def _attributes(module: nn.Module, is_task: bool) -> Iterator[tuple[str, Any]]:
    """What a user may have put on a module; tensors that torch's own reparametrisations derive are no state."""
    hooks = vars(module).get("_hooks_of_callbacks", ())
    derived = {name.removesuffix(end) for name in module._parameters for end in ("_orig", "_g") if name.endswith(end)}
    skipped = _OF_TASK if is_task else _OF_PART
    if hasattr(type(module), "automatic_optimization"):
        skipped = skipped | _OF_LIGHTNING
    for key, value in list(vars(module).items()):
        if key not in skipped and key not in derived and key not in hooks:
            yield key, value


def _token(tensor: Tensor, most_entries: int) -> tuple[Any, ...]:
    """Which tensor this is, and as far as that is cheap, what is in it; never waits for a device."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    version = 0 if tensor.is_inference() else tensor._version
    content = None
    if tensor.device.type == "cpu" and tensor.numel():
        values, most = tensor.reshape(-1), 1024 * most_entries
        few = values if values.nbytes <= most else values[:: -(-values.nbytes // most)]
        content = crc32(few.contiguous().view(torch.uint8).numpy().data)
    place = tensor.data_ptr() if content is None else None
    return place, version, str(tensor.dtype), tuple(tensor.shape), content


def _set_modes(module: nn.Module, modes: Mapping[str, bool]) -> None:
    for name, child in module.named_modules():
        if name in modes:
            child.training = modes[name]


def _set_trainable(module: nn.Module, trainable: Mapping[str, bool]) -> None:
    for name, parameter in module.named_parameters():
        if name in trainable and parameter.requires_grad != trainable[name]:
            parameter.requires_grad_(trainable[name])


def _registered(module: nn.Module, modules: Mapping[str, nn.Module] | None = None) -> dict[str, Any]:
    """What belongs to a module and has a name there, shared parts once: attributes may refer to it."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, child in (dict(module.named_modules()) if modules is None else modules).items():
        found[f"module {name}"] = child
        for kind, parts in ((_PARAMETER, child._parameters), ("buffer ", child._buffers)):
            for key, part in parts.items():
                if part is not None and id(part) not in seen:
                    seen.add(id(part))
                    found[f"{kind}{name}.{key}" if name else f"{kind}{key}"] = part
    return found


def _give(
    owner: Any, key: str, structure: Any, tensors: Mapping[str, Tensor], device: Any, registered: Mapping[str, Any]
) -> None:
    """Set an attribute to what was saved of it, inside the objects that are there where it was objects."""

    def special(found: dict[str, Any], live: Any) -> Any:
        if "registered" in found:
            return registered.get(found["registered"], live)
        if "object" in found:
            return live
        if "enum" in found:
            return _member(*found["enum"])
        if live is None:
            return None if "state" in found or "fields" in found else NotImplemented
        if "state" in found:
            state = put_together(found["state"], tensors, device=device)
            put = next((put for kind, (_, put) in _GENERATORS.items() if isinstance(live, kind)), None)
            live.load_state_dict(state) if put is None else put(live, state)
            return live
        if "fields" in found:
            for name, entry in found["fields"].items():
                object.__setattr__(live, name, value_of(entry, getattr(live, name, None)))
            return live
        return NotImplemented

    def value_of(found: Any, live: Any) -> Any:
        return put_together(found, tensors, live, device, special)

    if key == EXTRA:
        owner.set_extra_state(value_of(structure, None))
    else:
        object.__setattr__(owner, key, value_of(structure, getattr(owner, key, None)))


def _member(module: str, name: str, value: Any) -> Any:
    """A member of an enumeration that the program has: nothing is imported for it."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, EnumType):
        raise UserError(f"the checkpoint holds a member of {module}.{name}, which is not an enumeration any more")
    return found(value)


def _nodes(structure: Any) -> Iterator[dict[str, Any]]:
    """The objects in a structure."""
    if isinstance(structure, dict):
        if "object" in structure or "of" in structure:
            yield structure
        structure = list(structure.values())
    if isinstance(structure, list):
        for entry in structure:
            yield from _nodes(entry)


def _cloned(snapshot: ModuleSnapshot, attribute: Attribute) -> dict[str, Tensor]:
    return {name: snapshot.tensors[name].clone() for name in names_of(attribute.structure)}


def _kind_of(attribute: Attribute) -> str:
    """What an attribute is, for people."""
    is_hooks = attribute.value is None and isinstance(attribute.structure, dict)
    return str(attribute.structure["id"][0]) if is_hooks else type(attribute.value).__name__


class ExtraState:
    """The extra state of a task, for a checkpoint."""

    def __init__(
        self, task: nn.Module, known: Iterable[Any] = (), ranks: Ranks = ALONE, keeps_gradients: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """`task` as it is now is what is not saved; with `keeps_gradients`, those of the parameters are part of it."""
        self._task = task
        self._known = list(known)
        self._ranks = ranks
        self._keeps_gradients = keeps_gradients
        self._say = say
        self.share: Callable[[], float] = lambda: 1.0
        """By how much the gradients of this rank count among those of all."""
        self._start: ModuleSnapshot = vars(task).get(_AS_IT_CAME) or ModuleSnapshot(task, self._known, copies=True)
        object.__setattr__(task, _AS_IT_CAME, self._start)

    def unsaved(self) -> dict[str, str]:
        """Attributes that have changed and cannot be saved: how a person writes them, and what they are."""
        now = ModuleSnapshot(self._task, self._known)
        paths = [path for path in now.changed(self._start) if not self._can_be_saved(path, now)]
        return {".".join(["self", *filter(None, path)]): _kind_of(now.attributes[path]) for path in paths}

    def _can_be_saved(self, path: Path, now: ModuleSnapshot) -> bool:
        """What objects hold is put into those that the constructor makes: they must be the same ones still."""
        if path not in now.attributes:
            return True
        for node in _nodes(now.attributes[path].structure):
            name = node.get("of")
            if name is None or self._start.objects.get(name) is not now.objects[name]:
                return False
        return True

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What has changed since the start, of this rank."""
        now = ModuleSnapshot(self._task, self._known)
        start = self._start
        attributes: dict[str, dict[str, Any]] = {}
        tensors: dict[str, Tensor] = {}
        changed = now.changed(start)
        for path in changed:
            if path in now.attributes and self._can_be_saved(path, now):
                structure = now.attributes[path].structure
                attributes.setdefault(path[0], {})[path[1]] = structure
                tensors.update({name: now.tensors[name].detach() for name in names_of(structure)})
        values: dict[str, Any] = {
            "modes": {name: mode for name, mode in now.modes.items() if mode != start.modes.get(name, mode)},
            "trainable": {
                name: flag for name, flag in now.trainable.items() if flag != start.trainable.get(name, flag)
            },
            "attributes": attributes,
            "deleted": [list(path) for path in changed if path not in now.attributes],
        }
        if self._keeps_gradients:
            found = {name: each.grad for name, each in self._task.named_parameters() if each.grad is not None}
            values["gradients"] = {name: grad.is_sparse for name, grad in found.items()}
            tensors.update({f"gradient/{name}": _dense(grad.detach()) for name, grad in found.items()})
        return tensors, {name: value for name, value in values.items() if value}

    def together(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state of all ranks: once where it is the same on all, else that of each."""
        tensors, values = self.state()
        if self._ranks.alone:
            return tensors, values
        mine = repr((values, [(name, int(digest(tensor))) for name, tensor in tensors.items()]))
        if len(set(self._ranks.all_gather(mine, "whether modules keep the same on all ranks"))) == 1:
            return tensors, values
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        every = self._ranks.all_gather((on_host, values, self.share()), "what modules keep on each rank")
        joined = {f"{rank}/{name}": each for rank, (found, _, _) in enumerate(every) for name, each in found.items()}
        return joined, {"ranks": [values for _, values, _ in every], "shares": [share for _, _, share in every]}

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over a state; that of another number of ranks as far as it means anything."""
        if "ranks" not in values:
            self._load(tensors, values)
            return
        of_ranks = values["ranks"]
        same = len(of_ranks) == self._ranks.world_size
        rank = self._ranks.rank if same else 0
        own = {name.removeprefix(f"{rank}/"): each for name, each in tensors.items() if name.startswith(f"{rank}/")}
        if not same:
            self._say(
                f"modules kept something else on each of {len(of_ranks)} ranks; there are {self._ranks.world_size} "
                "now: gradients are added up, everything else is as it was on the first rank"
            )
            for name in of_ranks[0].get("gradients", ()):
                parts = [tensors[f"{each}/gradient/{name}"] * share for each, share in enumerate(values["shares"])]
                own[f"gradient/{name}"] = torch.stack(parts).sum(0)
        self._load(own, of_ranks[rank])

    def _load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        task, start = self._task, self._start
        _set_modes(task, {**start.modes, **values.get("modes", {})})
        _set_trainable(task, {**start.trainable, **values.get("trainable", {})})
        now, registered = ModuleSnapshot(task, self._known), _registered(task)
        for path in now.changed(start):  # by hooks, or in an earlier training in this process, and not saved
            before = start.attributes.get(path)
            if before is not None and self._can_be_saved(path, now) and self._can_be_saved(path, start):
                owner = task.get_submodule(path[0])
                _give(owner, path[1], before.structure, _cloned(start, before), None, registered)
        for name, key in values.get("deleted", ()):
            vars(task.get_submodule(name)).pop(key, None)
        give_attributes(task, tensors, values, self._known)
        if self._keeps_gradients:
            saved = values.get("gradients", {})
            for name, parameter in task.named_parameters():
                parameter.grad = None
                if name in saved:
                    gradient = tensors[f"gradient/{name}"].to(parameter.device, copy=True)
                    parameter.grad = gradient.to_sparse(1) if saved[name] else in_format_of(parameter, gradient)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


class HostGenerators:
    """Where Python's and numpy's global generators are, from which a step may draw."""

    def __init__(self, seed: int) -> None:
        """They begin where the seed of a run says."""
        self._key = derive_key(seed, "generators of the host")[0]
        self._loaded: dict[str, Any] = {}

    def begin(self) -> None:
        """Set both for a training that begins, or goes on from what was loaded."""
        random.seed(self._key)
        np.random.seed(self._key % 2**32)
        self.load({}, self._loaded)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Both states, as plain numbers."""
        version, numbers, gauss = random.getstate()
        state: Any = np.random.get_state()
        _, key, *rest = state
        return {}, {"python": [version, list(numbers), gauss], "numpy": [key.tolist(), *rest]}

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over both; earlier versions did not save them."""
        self._loaded = values
        if values:
            version, numbers, gauss = values["python"]
            random.setstate((version, tuple(numbers), gauss))
            key, *rest = values["numpy"]
            np.random.set_state(("MT19937", np.array(key, np.uint32), *rest))


def give_attributes(
    task: nn.Module, tensors: Mapping[str, Tensor], values: Mapping[str, Any], known: Sequence[Any] = ()
) -> None:
    """Set the attributes of a module and of those below it to what a checkpoint holds of them.

    Attributes that were optimizers or schedulers are those in `known`, where they are.
    """
    if "ranks" in values:
        of_first = {name.removeprefix("0/"): each for name, each in tensors.items() if name.startswith("0/")}
        return give_attributes(task, of_first, values["ranks"][0], known)
    device = next((each.device for each in task.parameters()), None)
    modules, registered = dict(task.named_modules()), _registered(task)
    registered.update({f"known {number}": each for number, each in enumerate(known)})
    for name, attributes in values.get("attributes", {}).items():
        for key, structure in attributes.items() if name in modules else ():
            own = {each: tensors[each].clone() for each in names_of(structure)}
            _give(modules[name], key, structure, own, device, registered)
