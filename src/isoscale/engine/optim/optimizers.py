"""Optimizers by name, on the path that a captured step can take: fused where torch has it, lr as a device tensor."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from isoscale.engine.config import Group
from isoscale.engine.config import Optimizer as Section
from isoscale.engine.device import Accelerator
from isoscale.engine.optim.fused_adam import FusedAdam
from isoscale.errors import UserError
from isoscale.parallel.serialize import names_of, put_together, take_apart

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


def choose_path(name: str, accelerator: Accelerator) -> OptimizerPath:
    """Fused if the optimizer can, else capturable on devices that capture, else as torch makes it."""
    cls = optimizer_class(name)
    fused = cls.__name__ in FUSED and accelerator.kind in ("cpu", "cuda")
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
    section: Section, named: Iterable[tuple[str, nn.Parameter]], path: OptimizerPath
) -> list[Optimizer]:
    """Build the optimizer; Muon takes the matrices and leaves the rest to AdamW.

    Frozen parameters are in it as well: without a gradient they are passed over, and they may be unfrozen in training.
    """
    parameters = dict(named)
    if not parameters:
        raise UserError("the task has no parameters: nothing to optimise")
    cls, arguments = optimizer_class(section.name), section.arguments
    groups = _grouped(parameters, section.groups)
    if cls.__name__ != "Muon":
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
    cls: type[Optimizer], lr: float, arguments: dict[str, Any], groups: list[ParameterGroup], path: OptimizerPath
) -> Optimizer:
    known = inspect.signature(cls).parameters
    unknown = {key for group in groups for key in group} - set(known) - {"params", "lr_scale"}
    if unknown:
        raise UserError(f"optimizer.groups: {cls.__name__} has no argument {', '.join(sorted(unknown))}")
    chosen = {"fused": path.fused, "capturable": path.capturable}
    options: dict[str, Any] = {name: True for name, wanted in chosen.items() if wanted and name in known}
    device = groups[0]["params"][0].device
    rate = torch.tensor(lr, dtype=torch.float32, device=device) if path.tensor_lr else lr
    try:
        return cls(groups, lr=rate, **options, **arguments)  # type: ignore[call-arg]
    except (TypeError, ValueError, LookupError) as error:  # the last of betas that are too few
        raise UserError(f"optimizer {cls.__name__} refuses its arguments: {error}") from None


def listeners(optimizer: Optimizer) -> tuple[int, ...]:
    """The hooks that somebody has put on the steps of an optimizer."""
    return (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)


def plain_step(optimizer: Optimizer) -> Callable[[], Any]:
    """The optimizer's update without what torch wraps around it, a third of a small step on a CPU.

    Where somebody has put a hook or a counter on it (a scheduler of torch does), the wrapper stays.
    """
    inner = getattr(type(optimizer).step, "__wrapped__", None)
    if inner is None or listeners(optimizer) or "step" in vars(optimizer):
        return optimizer.step
    ordinary = partial(inner, optimizer)
    if isinstance(optimizer, SGD) and optimizer.defaults["fused"] and optimizer.defaults["momentum"]:
        return partial(_sgd_step, optimizer, ordinary)
    is_fused_adam = type(optimizer) in (Adam, AdamW) and optimizer.defaults["fused"]
    return FusedAdam(optimizer, ordinary) if is_fused_adam else ordinary  # type: ignore[arg-type]


def _sgd_step(optimizer: SGD, ordinary: Callable[[], Any]) -> None:
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
    """The state of optimizers by parameter name, so that it does not depend on the order of parameters."""

    def __init__(self, optimizers: list[Optimizer], task: nn.Module) -> None:
        """The state of `optimizers`, whose parameters must be those of a task."""
        self._optimizers = optimizers
        self._task = task
        own = {id(parameter) for parameter in task.parameters()}
        for optimizer in optimizers:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if id(parameter) not in own:
                    raise UserError(
                        f"{type(optimizer).__name__} optimises a tensor of shape {tuple(parameter.shape)} that is no "
                        f"parameter of {type(task).__name__}, so that it would not be saved; make it one: "
                        "self.name = nn.Parameter(…), or register the module that it belongs to"
                    )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors as `number/key/parameter`, plain numbers beside them; lists of tensors (LBFGS) in their parts."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._task.named_parameters()}
        tensors: dict[str, Tensor] = {}
        values = {}
        for number, optimizer in enumerate(self._optimizers):
            for parameter, entries in optimizer.state.items():
                for key, value in entries.items():
                    name = f"{number}/{key}/{names[parameter]}"
                    structure = take_apart(value, name, tensors)
                    if not isinstance(value, Tensor) and value is not None:
                        values[name] = structure
        return tensors, values

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over a state."""
        parameters = dict(self._task.named_parameters())
        for optimizer in self._optimizers:
            optimizer.state.clear()
        inside = {name for structure in values.values() for name in names_of(structure)}
        whole = {name: tensor for name, tensor in tensors.items() if name not in inside}
        for name, value in {**whole, **values}.items():
            number, key, owner = [*name.split("/", 2), "", ""][:3]
            if owner not in parameters or not number.isdigit() or int(number) >= len(self._optimizers):
                raise UserError(f"the checkpoint's optimizer knows {name!r}, which is not a parameter of the model")
            optimizer, parameter = self._optimizers[int(number)], parameters[owner]
            copies = {each: tensors[each].clone() for each in names_of(value)}
            entry = put_together(value, copies, device=parameter.device)
            optimizer.state[parameter][key] = _placed(optimizer, key, entry, parameter)


def _placed(optimizer: Optimizer, key: str, value: Any, parameter: Tensor) -> Any:
    """A copy of a state entry where the optimizer keeps it: step counters of plain optimizers stay on the host."""
    if not isinstance(value, Tensor):
        return value
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value.clone() if on_host else value.to(parameter.device, copy=True)
