"""Replicas: all ranks begin with the state of rank 0, and silent divergence is an error that names rank and tensor."""

import torch

from isoscale.engine.state.checkpoint import State
from isoscale.engine.state.registry import Registry, digest
from isoscale.errors import UserError
from isoscale.parallel.collectives import Ranks

_OWN = ("metrics/", "extra/")
"""What each rank counts or keeps for itself."""


class Diverged(UserError):
    """The ranks no longer hold the same weights."""


def verify(registry: Registry, ranks: Ranks, step: int) -> None:
    """Compare a hash of every tensor on all ranks; waits for the device once."""
    if ranks.alone:
        return
    tensors = {name: tensor for name, tensor in registry.tensors().items() if not name.startswith(_OWN)}
    hashes = torch.stack([digest(tensor).cpu() for tensor in tensors.values()])
    every = ranks.all_gather((list(tensors), hashes), "the hashes of the weights")
    for rank, (names, found) in enumerate(every):
        if names != every[0][0]:
            other = sorted(set(names) ^ set(every[0][0]))
            raise Diverged(f"step {step}: {ranks.name(rank)} has other tensors than rank 0: {', '.join(other[:4])}")
        different = (found != every[0][1]).nonzero().flatten().tolist()
        if different:
            raise Diverged(_words(ranks, rank, names[different[0]], len(different), step))


def _words(ranks: Ranks, rank: int, name: str, count: int, step: int) -> str:
    more = f" and {count - 1} more" if count > 1 else ""
    if step == 0:
        return (
            f"{ranks.name(rank)} starts with another {name}{more} than {ranks.name(0)}: the model draws on something "
            "that the seed does not reach, or the ranks run different code or versions"
        )
    return (
        f"step {step}: {name}{more} of {ranks.name(rank)} differs from that of {ranks.name(0)}: an update was not the "
        "same on all ranks (a hook that changes weights, a custom optimizer, failing memory). Checkpoints were "
        "compared up to the last verification; the same command goes on from the last one"
    )


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
