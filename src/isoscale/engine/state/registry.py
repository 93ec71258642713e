"""The registry of everything that a run needs to go on: what is registered here is what a checkpoint holds."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from isoscale.errors import UserError

NUM_REPEATS = 8
"""Of steps whose bits are not always the same, to see how far they are apart."""


class Stateful(Protocol):
    """Something that can be saved and restored: tensors, and JSON-able values beside them."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The live tensors (not copies) and plain values."""

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over a state, copying the tensors."""


class Registry:
    """State by name. The name of a part is the name of its file in a checkpoint."""

    def __init__(self) -> None:
        """An empty registry."""
        self._parts: dict[str, Stateful] = {}

    def register(self, name: str, part: Stateful) -> None:
        """Add a part to everything that is saved."""
        if name in self._parts:
            raise ValueError(f"the state {name!r} is registered twice")
        self._parts[name] = part

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Any]]]:
        """Live tensors and values of every part."""
        states = {name: part.state() for name, part in self._parts.items()}
        return {name: state[0] for name, state in states.items()}, {name: state[1] for name, state in states.items()}

    def together(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Any]]]:
        """The state of all ranks as one, for a checkpoint: most of it is equal on all, the rest is added up."""
        states = {name: getattr(part, "together", part.state)() for name, part in self._parts.items()}
        return {name: state[0] for name, state in states.items()}, {name: state[1] for name, state in states.items()}

    def load(self, tensors: Mapping[str, dict[str, Tensor]], values: Mapping[str, dict[str, Any]]) -> None:
        """Restore every part; a part that the saved state does not know, or that nobody asked for, is an error."""
        missing, extra = set(self._parts) - set(values), set(values) - set(self._parts)
        if missing or extra:
            raise UserError(
                "the checkpoint does not fit this run: "
                + "; ".join(
                    f"{word} {', '.join(sorted(names))}"
                    for word, names in (("it lacks", missing), ("it also holds", extra))
                    if names
                )
            )
        for name, part in self._parts.items():
            part.load(tensors.get(name, {}), values[name])

    def load_some(
        self, names: Sequence[str], tensors: Mapping[str, dict[str, Tensor]], values: Mapping[str, dict[str, Any]]
    ) -> None:
        """Restore some parts, where they are registered and saved."""
        for name in names:
            if name in self._parts and name in values:
                self._parts[name].load(tensors.get(name, {}), values[name])

    def tensors(self) -> dict[str, Tensor]:
        """Every live tensor, as `part/name`."""
        tensors, _ = self.state()
        return {f"{part}/{name}": tensor for part, group in tensors.items() for name, tensor in group.items()}

    def snapshot(self, room: int) -> "Snapshot":
        """Copies of all tensors, to put back after a rehearsal; on the host if they take more bytes than `room`."""
        tensors = self.tensors()
        return Snapshot(tensors, on_host=sum(tensor.nbytes for tensor in tensors.values()) > room)


class Snapshot:
    """Copies of live tensors."""

    def __init__(self, live: dict[str, Tensor], on_host: bool) -> None:
        """Copy `live` now."""
        self._addresses = {name: _address(tensor) for name, tensor in live.items()}
        self._copies = {
            name: tensor.to("cpu", copy=True) if on_host else tensor.clone() for name, tensor in live.items()
        }

    def restore(self, registry: Registry) -> None:
        """Put the copies back, in place."""
        for name, tensor in registry.tensors().items():
            if name in self._copies:
                tensor.copy_(self._copies[name])

    def replaced(self, registry: Registry) -> str | None:
        """Says which tensor is another one than at the time of the snapshot: a replay could not update it."""
        for name, tensor in registry.tensors().items():
            if not name.startswith("extra/") and self._addresses.get(name) != _address(tensor):
                return f"it replaces the tensor {name} instead of updating it in place"
        return None

    def difference(self, registry: Registry) -> str | None:
        """The first tensor whose bits are not those of the snapshot any more, or None."""
        live = registry.tensors()
        for name, copy in self._copies.items():
            if name not in live or not same_bits(copy, live[name].to(copy.device)):
                return name
        return None

    def among_repeats(self) -> "Repeats":
        """Compares this snapshot with several others of what should be the same."""
        return Repeats(self._copies)


def _address(tensor: Tensor) -> int:
    return 0 if tensor.is_sparse else tensor.data_ptr()


class Repeats:
    """How far several results of the same steps are apart, where their bits are not always the same."""

    def __init__(self, judged: dict[str, Tensor]) -> None:
        """`judged` is the result that may be no farther from the others than these are from each other."""
        self._judged = judged
        self._low: dict[str, Tensor] = {}
        self._high: dict[str, Tensor] = {}

    def add(self, registry: Registry) -> None:
        """Take the tensors as they are now for one more result."""
        for name, tensor in registry.tensors().items():
            if name in self._judged:
                value = as_real(tensor).to(self._judged[name].device)
                self._low[name] = torch.minimum(self._low.get(name, value), value)
                self._high[name] = torch.maximum(self._high.get(name, value), value)

    def outside(self) -> str | None:
        """The first tensor that is too far off: by more than the width of the others, and than rounding."""
        for name, tensor in self._judged.items():
            low, high, judged = self._low[name], self._high[name], as_real(tensor)
            if not low.is_floating_point():
                is_far = (judged < low) | (judged > high)
            elif low.numel():
                rounding = 4 * torch.finfo(low.dtype).eps * torch.maximum(low.abs(), high.abs()).max()
                room = (high - low).max() + rounding
                is_far = (judged < low - room) | (judged > high + room)
            else:
                continue
            if bool(is_far.any()):
                return f"{name} is farther off than {NUM_REPEATS} eager repeats are from each other"
        return None


def as_real(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as a dense real one, for operations that know no other: a view where there is one."""
    if tensor.is_sparse:
        tensor = tensor._values()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def in_format_of(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A gradient or state in the memory format of its parameter: fused optimizers take all in the order of memory."""
    if tensor.is_sparse or tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def digest(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bits, on its device."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    real = as_real(tensor)
    known = real.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)
    return torch.hash_tensor(real if known else real.contiguous().view(torch.uint8)).view(torch.int64)


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN."""
    equal = (one == two) | ((one != one) & (two != two))
    return one.shape == two.shape and bool(equal.all())


class ModuleState:
    """The weights and buffers of a module, persistent or not."""

    def __init__(self, module: nn.Module) -> None:
        """The state of `module`; torchmetrics keep their own."""
        self._module = module

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Parameters and buffers by name, shared ones once; what a module keeps besides must be JSON."""
        tensors = {name: tensor.detach() for name, tensor in self._module.named_parameters()}
        tensors.update({name: buffer for name, buffer in self._module.named_buffers() if buffer is not None})
        return tensors, {}

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Copy weights in; names and shapes must be those of the module."""
        # what a loss keeps was not saved once; what it shares with the module is the module's
        kept = {name: buffer for name, buffer in self._module.named_buffers() if name.startswith("criterion.")}
        load_weights(self._module, {**kept, **tensors})


class DifferentWeights(UserError):
    """Weights that are not those of a module: which are missing, unexpected or of another shape."""

    def __init__(self, missing: Sequence[str], unexpected: Sequence[str], reshaped: Mapping[str, str]) -> None:
        """Names, and for those of another shape what was found and expected."""
        self.names = [*missing, *unexpected, *reshaped]
        shapes = [f"{name} is {shapes}" for name, shapes in reshaped.items()]
        kinds = {"no weights for ": missing, "unexpected ": unexpected, "": shapes}
        told = "; ".join(kind + _some(texts) for kind, texts in kinds.items() if texts)
        super().__init__(f"these weights do not fit the model: {told}")


def _some(texts: Sequence[str], most: int = 8) -> str:
    """The first few, and how many there are."""
    return ", ".join(texts[:most]) + (f", … ({len(texts):,} in all)" if len(texts) > most else "")


@torch.no_grad()
def copy_weights(module: nn.Module, tensors: Mapping[str, Tensor], exclude: frozenset[str] = frozenset()) -> None:
    """Copy weights into a module by name; every mismatch is named."""
    own, _ = ModuleState(module).state()
    wanted = [name for name in own if name not in exclude]
    given = [name for name in tensors if name not in exclude]
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in given if name not in own]
    reshaped = {
        name: f"{tuple(tensors[name].shape)}, expected {tuple(own[name].shape)}"
        for name in wanted
        if name in tensors and tensors[name].shape != own[name].shape
    }
    if missing or unexpected or reshaped:
        raise DifferentWeights(missing, unexpected, reshaped)
    for name in wanted:
        own[name].copy_(tensors[name])


def load_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the weights of a checkpoint into its module, whose buffers may have changed their shapes in training.

    Lazy modules take the shapes of what was saved.
    """
    for path, owner in module.named_modules():
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            saved = tensors.get(f"{path}.{key}" if path else key)
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer) and saved is not None:
                tensor.materialize(saved.shape)
        for key, buffer in owner._buffers.items():
            saved = tensors.get(f"{path}.{key}" if path else key)
            is_same = buffer is not None and saved is not None and buffer.shape == saved.shape
            if saved is not None and not (is_same and buffer.dtype == saved.dtype):
                like = buffer if buffer is not None else next(iter(module.parameters()), saved)
                owner._buffers[key] = saved.to(like.device, copy=True)
    copy_weights(module, tensors)


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, dtypes, shapes and bytes, independent of how they are stored."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}\x1f".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
