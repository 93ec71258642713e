"""Optimizers by name or class, on the path that a captured step can take: fused where torch has it, lr as a tensor."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from isoscale.engine.config import AnyOptimizer, Group
from isoscale.engine.config import Optimizer as Section
from isoscale.engine.optim.fused_adam import FusedAdam
from isoscale.engine.optim.late_compiler import comes_from
from isoscale.engine.state.registry import in_format_of
from isoscale.errors import UserError
from isoscale.parallel.serialize import NotPlain, names_of, put_together, take_apart
from isoscale.system.devices import Accelerator

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
UNFIT = {
    "lbfgs": "LBFGS evaluates the loss several times in one step (a closure), which a captured step cannot do",
    "sparseadam": "SparseAdam takes sparse gradients only; adam is the one for dense gradients",
}
"""Optimizers of torch that cannot train here, and why."""


@dataclass(frozen=True)
class OptimizerPath:
    """How the optimizer runs; decided at the first start and stored, because it affects bits."""

    fused: bool
    capturable: bool
    tensor_lr: bool


def optimizer_classes() -> dict[str, type[Optimizer]]:
    """The optimizers of torch that train in steps, by lower-case name."""
    classes = [value for value in vars(torch.optim).values() if inspect.isclass(value) and issubclass(value, Optimizer)]
    found = {cls.__name__.lower(): cls for cls in classes if cls is not Optimizer}
    return {name: cls for name, cls in found.items() if name not in UNFIT}


def optimizer_class(name: str) -> type[Optimizer]:
    """The class of torch.optim with this name, whatever its case."""
    found = optimizer_classes()
    if name.lower() not in found:
        raise UserError(f"torch has no optimizer {name!r} that trains in steps; it has {', '.join(sorted(found))}")
    return found[name.lower()]


def is_of_torch(cls: Callable[..., Any]) -> bool:
    """Whether a class is one of torch.optim itself, and not one that somebody has derived from it."""
    return vars(torch.optim).get(cls.__name__) is cls


def why_unfit(cls: Callable[..., Any]) -> str | None:
    """Why a class cannot be the optimizer of a recipe, if so."""
    if not (inspect.isclass(cls) and issubclass(cls, Optimizer)):
        return f"{getattr(cls, '__name__', cls)} is not an optimizer: expected a subclass of torch.optim.Optimizer"
    if is_of_torch(cls) and cls.__name__.lower() in UNFIT:
        return UNFIT[cls.__name__.lower()]
    needed = [
        name for name, each in list(inspect.signature(cls.step).parameters.items())[1:]
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]  # fmt: skip
    if needed:
        return (
            f"the step of {cls.__name__} needs {', '.join(needed)}, but a training step computes the loss once and "
            "calls step() without arguments; a task of your own with automatic_optimization = False can call it"
        )
    return why_no_lr(cls)


def why_no_lr(cls: Callable[..., Any]) -> str | None:
    """Why the schedule cannot drive an optimizer of this signature, if so."""
    taken = inspect.signature(cls).parameters
    if "lr" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return None
    return (
        f"{cls.__name__} takes no lr, by which the schedule sets the learning rate of every step; give its __init__ an "
        'argument lr that it puts among its defaults, and let step read group["lr"]'
    )


def choose_path(cls: Callable[..., Any], accelerator: Accelerator) -> OptimizerPath:
    """Fused if the optimizer can, else capturable on devices that capture, else as torch makes it."""
    unfit = why_unfit(cls)
    if unfit:
        raise UserError(f"optimizer: {unfit}")
    # a class derived from a fused one need not heed the flag by which an update is left out
    fused = is_of_torch(cls) and cls.__name__ in FUSED and accelerator.has_fused
    capturable = accelerator.can_capture and "capturable" in inspect.signature(cls).parameters
    # only a captured step needs the learning rate in a tensor, and reading it from one costs time on a CPU
    return OptimizerPath(
        fused=fused, capturable=capturable, tensor_lr=accelerator.can_capture and (fused or capturable)
    )


def path_for(path: OptimizerPath, parameters: Iterable[Tensor]) -> OptimizerPath:
    """The path for these parameters: torch has no fused kernels for complex numbers."""
    if not any(parameter.is_complex() for parameter in parameters):
        return path
    return replace(path, fused=False, tensor_lr=path.capturable)


def make_optimizers(
    section: AnyOptimizer, named: Iterable[tuple[str, nn.Parameter]], path: OptimizerPath,
    own: "partial[Optimizer] | None" = None,
) -> list[Optimizer]:  # fmt: skip
    """Build the optimizer, `own` where it is named by its class; Muon takes the matrices and leaves the rest to AdamW.

    Frozen parameters are in it as well: without a gradient they are passed over, and they may be unfrozen in training.
    """
    parameters = dict(named)
    if not parameters:
        raise UserError("the task has no parameters: nothing to optimise")
    if own is None:
        assert isinstance(section, Section)
        arguments: dict[str, Any] = section.arguments
        own = partial(optimizer_class(section.name), **arguments)
    cls, arguments = own.func, own.keywords
    groups = _grouped(parameters, section.groups)
    if not (is_of_torch(cls) and cls.__name__ == "Muon"):
        return [_build(cls, section.lr, arguments, groups, path)]
    matrices = _chosen(groups, lambda parameter: parameter.dim() == 2)
    rest = _chosen(groups, lambda parameter: parameter.dim() != 2)
    # with this rule one learning rate suits both
    muon = {"adjust_lr_fn": "match_rms_adamw", **arguments}
    decay = {key: value for key, value in arguments.items() if key == "weight_decay"}
    wanted = ((cls, muon, matrices), (torch.optim.AdamW, decay, rest))
    return [_build(kind, section.lr, given, chosen, path) for kind, given, chosen in wanted if chosen]


ParameterGroup = dict[str, Any]
"""Parameters under `params`, with what is special about them, as torch's optimizers take it."""


def _grouped(parameters: dict[str, nn.Parameter], sections: list[Group]) -> list[ParameterGroup]:
    """The parameters by the first group that matches their name; those that none matches come last."""
    groups: list[ParameterGroup] = []
    left = dict(parameters)
    for section in sections:
        names = [name for name in left if any(fnmatch(name, pattern) for pattern in section.match)]
        if not names:
            raise UserError(
                f"optimizer.groups: {section.match} matches no parameter that is left; there are "
                f"{', '.join(list(left)[:8])}{' …' * (len(left) > 8)}"
            )
        own = {**section.arguments, **({"lr_scale": section.lr_scale} if section.lr_scale != 1 else {})}
        groups.append({"params": [left.pop(name) for name in names], **own})
    return groups + ([{"params": list(left.values())}] if left else [])


def _chosen(groups: list[ParameterGroup], wanted: Callable[[nn.Parameter], bool]) -> list[ParameterGroup]:
    """The groups with only those parameters that are wanted, where there are any."""
    chosen = [
        {**group, "params": [parameter for parameter in group["params"] if wanted(parameter)]} for group in groups
    ]
    return [group for group in chosen if group["params"]]


def _build(
    cls: Callable[..., Optimizer], lr: float, arguments: dict[str, Any], groups: list[ParameterGroup],
    path: OptimizerPath,
) -> Optimizer:  # fmt: skip
    known = inspect.signature(cls).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
    unknown = {key for group in groups for key in group} - set(known) - {"params", "lr_scale"}
    if unknown and not takes_any:
        raise UserError(f"optimizer.groups: {cls.__name__} has no argument {', '.join(sorted(unknown))}")
    chosen = {"fused": path.fused, "capturable": path.capturable}
    options: dict[str, Any] = {name: True for name, wanted in chosen.items() if wanted and name in known}
    device = groups[0]["params"][0].device
    rate = torch.tensor(lr, dtype=torch.float32, device=device) if path.tensor_lr else lr
    try:
        made = cls(groups, lr=rate, **options, **arguments)
    except (TypeError, ValueError, LookupError) as error:  # the last of betas that are too few
        if not cls.__module__.startswith("torch."):
            error.add_note(f"while making the optimizer {cls.__name__}")
            raise
        raise UserError(f"optimizer {cls.__name__} refuses its arguments: {error}") from None
    if any("lr" not in group for group in made.param_groups):
        raise UserError(
            f"{cls.__name__} has no lr among its defaults, by which the schedule sets the learning rate of every step; "
            'call super().__init__(params, {"lr": lr, …}), and let step read group["lr"]'
        )
    return made


def listeners(optimizer: Optimizer) -> tuple[int, ...]:
    """The hooks that somebody has put on the steps of an optimizer."""
    return (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)


def plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """The optimizer's update without what torch wraps around it, a third of a small step on a CPU.

    Where somebody has put a hook or a counter on it (a scheduler of torch does), the wrapper stays.
    """
    wrapped = type(optimizer).step
    if not comes_from(wrapped, "Optimizer.profile_hook_step") or listeners(optimizer) or "step" in vars(optimizer):
        return optimizer.step
    inner: Callable[..., Any] = wrapped.__wrapped__  # type: ignore[attr-defined]
    ordinary = partial(inner, optimizer)
    if isinstance(optimizer, SGD) and optimizer.defaults["fused"] and optimizer.defaults["momentum"]:
        return partial(sgd_step, optimizer, ordinary)
    is_fused_adam = type(optimizer) in (Adam, AdamW) and optimizer.defaults["fused"]
    return FusedAdam(optimizer, ordinary) if is_fused_adam else ordinary  # type: ignore[arg-type]


def sgd_step(optimizer: SGD, ordinary: Callable[[], Any]) -> None:
    """The update of a fused SGD: its kernel wants momenta of all parameters or of none, and some are unfrozen later."""
    for group in optimizer.param_groups:
        moving = [parameter for parameter in group["params"] if parameter.grad is not None]
        late = [each for each in moving if optimizer.state[each].get("momentum_buffer") is None]
        if len(late) < len(moving):
            for parameter in late:  # such that it is the gradient after this step, as in any first one
                momentum = torch.zeros_like(parameter)
                if group["dampening"]:
                    gradient = -parameter.grad if group["maximize"] else parameter.grad
                    gradient = torch.nan_to_num(gradient.add(parameter.detach(), alpha=group["weight_decay"]))
                    momentum = gradient * (group["dampening"] / group["momentum"])
                optimizer.state[parameter]["momentum_buffer"] = momentum
    ordinary()


def set_lr(optimizer: Optimizer, lr: Tensor | float) -> None:
    """Give every group the learning rate of the step: a number, or a tensor that a captured step can read."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"] if "lr_scale" in group else lr


class OptimizerState:
    """The state of optimizers by parameter name, so that it does not depend on the order of parameters.

    Of a class of one's own also what its steps may change besides: entries of the parameter groups, plain attributes,
    and the optimizers that it has inside itself.
    """

    def __init__(self, optimizers: list[Optimizer], task: nn.Module, own_class: bool = False) -> None:
        """The state of `optimizers`, whose parameters must be those of a task."""
        self._has_settings = own_class and not all(is_of_torch(type(each)) for each in optimizers)
        inner = [each for optimizer in optimizers for each in vars(optimizer).values() if isinstance(each, Optimizer)]
        self._optimizers = [*optimizers, *(inner if self._has_settings else ())]
        self._task = task
        own = {id(parameter) for parameter in task.parameters()}
        for optimizer in self._optimizers:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if id(parameter) not in own:
                    raise UserError(
                        f"{type(optimizer).__name__} optimises a tensor of shape {tuple(parameter.shape)} that is no "
                        f"parameter of {type(task).__name__}, so that it would not be saved; make it one: "
                        "self.name = nn.Parameter(…), or register the module that it belongs to"
                    )

    def unsaved(self) -> list[str]:
        """Attributes of a class of one's own that cannot be saved, such as objects of other classes."""
        return [] if not self._has_settings else [
            f"{type(optimizer).__name__}.{name}"
            for optimizer in self._optimizers
            for name, value in vars(optimizer).items()
            if name not in _OF_TORCH and not _is_plain(value) and not _is_reference(value)
        ]  # fmt: skip

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors as `number/key/parameter`, plain numbers beside them; lists of tensors (LBFGS) in their parts."""
        names: dict[Any, str] = {parameter: name for name, parameter in self._task.named_parameters()}
        tensors: dict[str, Tensor] = {}
        values = {}
        for number, optimizer in enumerate(self._optimizers):
            for parameter, entries in optimizer.state.items():
                of_all = not isinstance(parameter, Tensor)  # a key of the class's own, for no single parameter
                for key, value in [(_OF_ALL, entries)] if of_all else entries.items():
                    name = f"{number}/{key}/{parameter if of_all else names[parameter]}"
                    structure = take_apart(value, name, tensors)
                    if not isinstance(value, Tensor) and value is not None:
                        values[name] = structure
            for place, settings in self._settings(optimizer).items():
                for key in _plain_keys(settings):
                    name = f"{number}/{place}/{key}"
                    values[name] = take_apart(settings[key], name, tensors)
        return tensors, values

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over a state."""
        parameters = dict(self._task.named_parameters())
        places: dict[str, dict[str, Any]] = {}
        for index, optimizer in enumerate(self._optimizers):
            optimizer.state.clear()
            for place, settings in self._settings(optimizer).items():
                places[f"{index}/{place}"] = settings
                for key in _plain_keys(settings):
                    if f"{index}/{place}/{key}" not in values:  # made by a later step
                        del settings[key]
        inside = {name for structure in values.values() for name in names_of(structure)}
        whole = {name: tensor for name, tensor in tensors.items() if name not in inside}
        for name, value in {**whole, **values}.items():
            number, key, owner = [*name.split("/", 2), "", ""][:3]
            copies = {each: tensors[each].clone() for each in names_of(value)}
            if f"{number}/{key}" in places:
                settings = places[f"{number}/{key}"]
                settings[owner] = put_together(value, copies, settings.get(owner), self._device)
                continue
            is_known = number.isdigit() and int(number) < len(self._optimizers)
            if not is_known or (owner not in parameters and key != _OF_ALL):
                raise UserError(f"the checkpoint's optimizer knows {name!r}, which is not a parameter of the model")
            optimizer = self._optimizers[int(number)]
            if key == _OF_ALL:
                entry = put_together(value, copies, device=self._device)
                optimizer.state[owner] = entry.clone() if isinstance(entry, Tensor) else entry
                continue
            parameter = parameters[owner]
            entry = put_together(value, copies, device=parameter.device)
            optimizer.state[parameter][key] = _placed(optimizer, key, entry, parameter)

    @property
    def _device(self) -> torch.device:
        return next(self._task.parameters()).device

    def _settings(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """Where a class of one's own keeps values besides states, by place: its groups and its attributes."""
        if not self._has_settings or is_of_torch(type(optimizer)):
            return {}
        groups = {f"group {index}": group for index, group in enumerate(optimizer.param_groups)}
        return {**groups, "attribute": vars(optimizer)}


_OF_ALL = "of all"
"""In the place of a parameter's key: states that a class keeps under a key of its own, such as `state["step"]`."""
_OF_TORCH = {
    "defaults", "state", "param_groups", "params", "lr", "step", "found_inf", "grad_scale", "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured",
    *(f"_optimizer_{when}_hooks" for when in ("step_pre", "step_post", "state_dict_pre", "state_dict_post")),
    "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
}  # fmt: skip
"""Attributes and groups of every optimizer."""


def _plain_keys(settings: dict[str, Any]) -> list[str]:
    """The settings that can be saved, and are neither torch's nor set by the schedule."""
    return [key for key, value in settings.items() if key not in _OF_TORCH and _is_plain(value)]


def _is_reference(value: Any) -> bool:
    """Whether a value belongs elsewhere, or cannot change."""
    several = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(each, nn.Parameter | Optimizer) or callable(each) for each in several)


def _is_plain(value: Any) -> bool:
    """Whether a value can be saved, and is no parameter, which is saved elsewhere."""

    def refused(value: Any, name: str) -> None:
        if isinstance(value, nn.Parameter):
            raise NotPlain("it is a parameter")

    try:
        take_apart(value, "", {}, refused)
    except NotPlain:
        return False
    return True


def _placed(optimizer: Optimizer, key: str, value: Any, parameter: Tensor) -> Any:
    """A copy of a state entry where the optimizer keeps it: step counters of plain optimizers stay on the host."""
    if not isinstance(value, Tensor):
        return value
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    if on_host:
        return value.clone()
    copy = value.to(parameter.device, copy=True)
    return in_format_of(parameter, copy) if copy.shape == parameter.shape else copy
