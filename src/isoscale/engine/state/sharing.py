"""A state that one rank has read, brought to all."""

import torch

from isoscale.engine.state.checkpoint import State
from isoscale.parallel.collectives import Ranks


def told(state: State | None, ranks: Ranks) -> State | None:
    """The state that rank 0 gives, on every rank: only that one needs to see the files."""
    if ranks.alone:
        return state
    words = None if state is None else ({part: _shapes(group) for part, group in state[0].items()}, state[1])
    words = ranks.broadcast(words, "the state of the run")
    if words is None:
        return None
    shapes, values = words
    given = state[0] if state is not None else {}
    tensors: dict[str, dict[str, torch.Tensor]] = {part: {} for part in shapes}
    for part, group in shapes.items():
        for name, (shape, dtype) in group.items():
            tensor = given[part][name].contiguous() if state is not None else torch.empty(shape, dtype=dtype)
            ranks.broadcast_tensor(tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor)
            tensors[part][name] = tensor
    return tensors, values


def _shapes(group: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in group.items()}
